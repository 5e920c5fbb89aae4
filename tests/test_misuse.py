"""Modules that run where their parameters are sharded, and plain state dicts, are refused with what to do."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import misuse
from fullshard.misuse import buffers_on_meta
from tests.harness import World, ranks
from tests.harness.models import WithBuffers, seeded

TOKENS = torch.tensor([[1, 2, 3]])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.head = nn.Linear(4, 7)
        self.scale = Scale()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.scale() * self.block(self.embedding(tokens))
        return checkpoint(self.head, x, use_reentrant=False)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x).sum()


class Scale(nn.Module):
    """Reads a parameter and no input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self) -> torch.Tensor:
        return self.weight


def composable() -> Any:
    model = seeded(Model)
    fullshard.fully_shard(model.block)
    return fullshard.fully_shard(model)


def wrapped() -> Any:
    model = seeded(Model)
    model.block = fullshard.FullyShardedDataParallel(model.block, use_orig_params=True)  # type: ignore[assignment]
    return fullshard.FullyShardedDataParallel(model, use_orig_params=True)


CALLS: dict[str, Callable[[Any], Any]] = {
    "head": lambda model: model.head(torch.ones(1, 4)),
    "embedding": lambda model: model.forward(TOKENS),
    "score": lambda model: model.score(torch.ones(1, 4)),
    "by keyword": lambda model: model.head(input=torch.ones(1, 4)),
}


@ranks(2)
@pytest.mark.parametrize("build", [composable, wrapped])
@pytest.mark.parametrize("call", CALLS)
def test_parts_and_methods_are_refused_outside_forward(world: World, build: Callable[[], Any], call: str) -> None:
    model = build()
    inside = model.module if isinstance(model, fullshard.FullyShardedDataParallel) else model
    name = call if call in ("head", "embedding") else "head"
    which = "FSDPModel" if inside is model else "the wrapped Model"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"'{name}' \(\w+\) was called outside the forward of {which}, .* Call"):
            CALLS[call](inside)
        model(TOKENS).sum().backward()


@ranks(2)
def test_parts_of_blocks_are_refused_before_the_first_forward(world: World) -> None:
    model = composable()
    with pytest.raises(RuntimeError, match=r"'0' \(Linear\) was called outside the forward of FSDPSequential"):
        model.block[0](torch.ones(1, 4))
    model(TOKENS)
    assert not model.block[0]._forward_pre_hooks
    assert model.head._forward_pre_hooks


@ranks(2)
def test_what_has_its_parameters_may_run(world: World) -> None:
    model, x = composable(), torch.ones(1, 4)
    plain = seeded(Model)
    fullshard.register_fsdp_forward_method(model, "score")
    assert torch.equal(model.score(x), plain.score(x))
    with fullshard.summon_full_params(model):
        assert torch.equal(model.head(x), plain.head(x))
    model.unshard()
    assert torch.equal(model.head(x), plain.head(x))
    model.reshard()
    distributed = model.head(DTensor.from_local(x, model.head.weight.device_mesh, [Replicate()]))
    assert torch.equal(distributed.full_tensor(), plain.head(x))
    assert isinstance(model.scale(), DTensor)
    assert torch.equal(torch.func.functional_call(model.head, dict(plain.head.named_parameters()), (x,)), plain.head(x))


@ranks(2)
def test_whole_parameters_of_a_wrapper_may_be_used(world: World) -> None:
    strategy = fullshard.ShardingStrategy.NO_SHARD
    model = fullshard.FullyShardedDataParallel(seeded(Model), sharding_strategy=strategy, use_orig_params=True)
    model(TOKENS)
    assert torch.equal(model.module.head(torch.ones(1, 4)), seeded(Model).head(torch.ones(1, 4)))


@ranks(2)
def test_copies_refuse_and_train(world: World) -> None:
    model = composable()
    twin = copy.deepcopy(model)
    assert torch.equal(twin(TOKENS), model(TOKENS))
    twin(TOKENS).sum().backward()
    assert not twin.block[0]._forward_pre_hooks
    with pytest.raises(RuntimeError, match=r"'head' .* was called outside"):
        twin.head(torch.ones(1, 4))


@ranks(2)
def test_a_module_with_a_tied_parameter_is_called_by_its_own_name(world: World) -> None:
    model: Any = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False))
    model[1].weight = model[0].weight
    fullshard.fully_shard(model)
    with pytest.raises(RuntimeError, match=r"'1' \(Linear\) was called outside the forward"):
        model[1](torch.ones(1, 4))


@ranks(2)
def test_plain_state_dicts_are_refused(world: World) -> None:
    model, other = composable(), seeded(Model, 1).state_dict()
    expected = model(TOKENS)
    for reshards in (False, True):  # a forward leaves the root unsharded
        assert isinstance(model.head.weight, DTensor) is reshards
        with pytest.raises(RuntimeError, match=r"'embedding.weight' is sharded, and load_state_dict.* shape \(7, 4\)"):
            model.load_state_dict(other)
        assert torch.equal(model(TOKENS), expected)
        model.reshard()
    set_model_state_dict(model, other, options=StateDictOptions(full_state_dict=True))
    assert torch.equal(model.head.weight.full_tensor(), seeded(Model, 1).head.weight)
    own = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(own)


@ranks(2)
def test_a_model_is_copied_that_lost_a_module_with_a_tied_parameter(world: World) -> None:
    model = seeded(Model)
    model.spare = nn.Linear(4, 7, bias=False)
    model.spare.weight = model.head.weight
    model = copy.deepcopy(fullshard.fully_shard(model))
    expected = model(TOKENS)
    del model.spare.weight, model.spare
    model(TOKENS)
    gc.collect()
    assert torch.equal(copy.deepcopy(model)(TOKENS), expected)


@ranks(2)
def test_reading_a_number_of_which_a_rank_has_a_part_warns(world: World) -> None:
    model = composable()
    model(TOKENS).sum().backward()
    weight, total = model.head.weight, nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    reads: list[Callable[[], object]] = [
        weight.grad.norm().item,
        weight.max().__float__,
        weight.sum().__bool__,
    ]
    for read in reads:
        with pytest.warns(UserWarning, match=r"placed as .*Partial.*: the ranks read different numbers") as told:
            read()
        assert {each.filename for each in told} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert total.item() > 0
        assert weight.grad.norm().full_tensor().item() > 0
        assert not torch.equal(weight, weight + 1)


@ranks(2)
def test_a_rank_without_a_part_reads_no_number(world: World) -> None:
    composable()
    total = distribute_tensor(torch.ones(1), DeviceMesh("cpu", [0]), [Replicate()]).sum()
    if world.rank == 0:
        assert total.item() == 1
    else:
        with pytest.raises(RuntimeError, match="None"):
            total.item()


def test_buffers_that_no_state_dict_fills_are_found_by_their_paths() -> None:
    with torch.device("meta"):
        model = WithBuffers()
    assert buffers_on_meta(model) == [(model.inner, "table", "inner.table")]
    assert buffers_on_meta(model.inner) == [(model.inner, "table", "table")]
    assert buffers_on_meta(WithBuffers()) == []


def test_buffers_that_nobody_wrote_after_to_empty_are_named() -> None:
    model, emptied = WithBuffers(), torch.empty(2)
    unit: Any = SimpleNamespace(emptied=[])
    schedule: Any = SimpleNamespace(units=[unit])
    noted = [(emptied, model.inner, "table", "inner.table")]
    model.inner.table = emptied
    unit.emptied = [*noted]
    with pytest.warns(UserWarning, match=r"left uninitialized by to_empty\(\): \['inner.table'\]"):
        misuse._warn_of_emptied(schedule, unit)
    assert not unit.emptied
    emptied.fill_(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unit.emptied = [*noted]
        misuse._warn_of_emptied(schedule, unit)
        model.inner.table, unit.emptied = torch.empty(2), [*noted]  # another one, which to_empty() did not leave
        misuse._warn_of_emptied(schedule, unit)
