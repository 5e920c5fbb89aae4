"""The methods that torch calls deprecated: what they return, what they warn of, what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fullshard.wrapper.optim_methods import OptimStateMethods
from tests.checkpoint.cases import (
    LIBRARIES,
    OURS,
    TORCHS,
    assert_same,
    libraries,
    optimizer_of,
    quiet,
    train,
    with_optimizer,
    wrapped,
)
from tests.harness import World, ranks
from tests.harness.models import MLP, seeded
from tests.harness.slow import slow


@ranks(1, 2)
@pytest.mark.parametrize("use_orig_params", [False, *slow(True)])
def test_all_of_them_as_torch(world: World, use_orig_params: bool) -> None:
    found = []
    # On the CPU torch's lets all states of a fragment share the memory of the last one.
    for library in (OURS,) if use_orig_params and world.size > 1 else (OURS, TORCHS):
        model = wrapped(library, use_orig_params=use_orig_params)
        optimizer, methods = optimizer_of(model, "Adam"), library.methods
        train(model, optimizer, range(2), world.rank)
        with quiet():
            first = methods.full_optim_state_dict(model, optimizer)
            assert bool(first) is (world.rank == 0)
            full = methods.full_optim_state_dict(model, optimizer, rank0_only=False)
            given = methods.full_optim_state_dict(model, optimizer, model.parameters(), False)
            sharded = methods.sharded_optim_state_dict(model, optimizer)
            found.append(
                [
                    first,
                    full,
                    given,
                    sharded,
                    methods.shard_full_optim_state_dict(full, model),
                    methods.shard_full_optim_state_dict(full, model, optim=optimizer),
                    methods.shard_full_optim_state_dict(full, model, [{"params": list(model.parameters())}]),
                    methods.scatter_full_optim_state_dict(first if world.rank == 0 else None, model, optim=optimizer),
                    methods.flatten_sharded_optim_state_dict(sharded, model, optimizer),
                ]
            )
            assert_same(found[-1][-1], optimizer.state_dict())
            assert_same(found[-1][-2], optimizer.state_dict())
    assert_same(found[0], found[-1])


@ranks(1)
@libraries
def test_warnings(world: World, name: str) -> None:
    library = LIBRARIES[name]
    model, methods = wrapped(library, use_orig_params=True), library.methods
    optimizer = optimizer_of(model, "Adam")
    train(model, optimizer, range(1))
    with quiet():
        full = methods.full_optim_state_dict(model, optimizer)
    for call in (
        lambda: methods.full_optim_state_dict(model, optimizer),
        lambda: methods.sharded_optim_state_dict(model, optimizer),
        lambda: methods.shard_full_optim_state_dict(full, model),
        lambda: methods.scatter_full_optim_state_dict(full, model),
        lambda: methods.flatten_sharded_optim_state_dict(full, model, optimizer),
    ):
        with pytest.warns(FutureWarning, match="deprecated") as caught:
            call()
        assert [each.filename for each in caught if each.category is FutureWarning] == [__file__]
    for call in (
        lambda: methods.full_optim_state_dict(model, optimizer, list(model.parameters())),
        lambda: methods.shard_full_optim_state_dict(full, model, list(model.parameters())),
        lambda: methods.rekey_optim_state_dict(
            full, library.settings.OptimStateKeyType.PARAM_NAME, model, list(model.parameters())
        ),
    ):
        with pytest.warns(FutureWarning, match="optim_input"):
            call()


@ranks(1)
@libraries
def test_wrong_optim_input(world: World, name: str) -> None:
    library = LIBRARIES[name]
    model, optimizer = with_optimizer(wrapped(library), "Adam", 1)
    mistakes: list[tuple[Any, type[Exception]]] = [
        (7, TypeError),
        ([], ValueError),
        ([nn.Parameter(torch.ones(2)), {"params": []}], TypeError),
        ([{"parameters": []}], AssertionError),
        ([nn.Parameter(torch.ones(2))], KeyError),
    ]
    for given, error in mistakes:
        with quiet(), pytest.raises(error):
            library.methods.full_optim_state_dict(model, optimizer, given)


def test_names_and_numbers_as_torch() -> None:
    plain, optimizer = with_optimizer(seeded(MLP), "Adam", 1)
    for how in ({"optim": optimizer}, {"optim_input": list(plain.parameters())}, {}):
        found = []
        with quiet():
            for library in (OURS, TORCHS):
                types, rekey = library.settings.OptimStateKeyType, library.methods.rekey_optim_state_dict
                numbers = optimizer.state_dict()
                names = rekey(numbers, types.PARAM_NAME, plain, **how)
                assert rekey(names, types.PARAM_NAME, plain, **how) is names
                assert rekey(numbers, types.PARAM_ID, plain, **how) is numbers
                found.append([names, rekey(names, types.PARAM_ID, plain, **how)])
        assert_same(found[0], found[1])
        assert_same(found[0][1], optimizer.state_dict())


def test_rekeying_keys_of_two_kinds_or_to_no_kind() -> None:
    plain = seeded(MLP)
    for library in (OURS, TORCHS):
        types, rekey = library.settings.OptimStateKeyType, library.methods.rekey_optim_state_dict
        with pytest.raises(ValueError, match="scale"):
            rekey({"state": {0: {}, "scale": {}}, "param_groups": []}, types.PARAM_ID, plain)
        with pytest.raises(AssertionError):
            rekey({"state": {}, "param_groups": []}, "names", plain)


def test_torchs_own_key_types_are_taken() -> None:
    plain, optimizer = with_optimizer(seeded(MLP), "Adam", 1)
    types = (OURS.settings.OptimStateKeyType.PARAM_NAME, TORCHS.settings.OptimStateKeyType.PARAM_NAME)
    rekey = OptimStateMethods.rekey_optim_state_dict
    ours, theirs = (rekey(optimizer.state_dict(), name, plain, optim=optimizer) for name in types)
    assert_same(theirs, ours)


@ranks(2)
@libraries
def test_flat_parameters_cannot_be_rekeyed(world: World, name: str) -> None:
    library = LIBRARIES[name]
    model, optimizer = with_optimizer(wrapped(library), "Adam", 1)
    names = library.settings.OptimStateKeyType.PARAM_NAME
    with pytest.raises(RuntimeError, match="blocks"):
        library.methods.rekey_optim_state_dict(optimizer.state_dict(), names, model, optim=optimizer)


def test_rekeying_with_the_optimizer_of_another_model_names_what_is_unknown() -> None:
    plain, other = seeded(MLP), nn.Linear(3, 5)
    optimizer = optimizer_of(other, "Adam")
    other(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    rekey, name = OptimStateMethods.rekey_optim_state_dict, OURS.settings.OptimStateKeyType.PARAM_NAME
    with pytest.raises(KeyError, match=r"lacks these parameters of the optimizer: \[\(5, 3\), \(5,\)\]"):
        rekey(optimizer.state_dict(), name, plain, optim=optimizer)
