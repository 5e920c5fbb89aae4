"""An exception inside of a step: the user never meets what the step was run on, and goes on as with DTensors."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.optim import local_step
from fullshard.torch_private import local_of
from tests.fully_shard.cases import groups_of, inputs
from tests.harness import World, ranks
from tests.optim.cases import Pair, Sign, backward, on_dtensors, runs_on_local, sharded


@contextlib.contextmanager
def failing(name: str, call: int) -> Iterator[None]:
    original, calls = getattr(torch, name), 0

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise ArithmeticError("in the middle of a step")
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, name, fail)
        yield
    assert calls == call, f"{name} was called {calls} times"


def pair_with_two_groups() -> Pair:
    """The step of the first group succeeds where the second fails."""
    pair = Pair()
    for number, (model, _) in enumerate(list(pair.both)):
        cls = (torch.optim.AdamW, on_dtensors(torch.optim.AdamW))[number]
        first, *rest = model.parameters()
        pair.optimizers[number] = cls([{"params": [first]}, {"params": rest}], foreach=True)
    return pair


def fail_both(pair: Pair, name: str, call: int, seed: int) -> list[Any]:
    """Raise in the middle of a step of each; returns what a caller may hold of it."""
    held = []
    for model, optimizer in pair.both:
        backward(model, seed)
        with failing(name, call), pytest.raises(ArithmeticError) as caught:
            optimizer.step()
        held.append(caught)
    return held


def assert_is_as_ever(model: nn.Module, optimizer: Optimizer) -> None:
    """Nothing of a user's is a plain tensor over a shard."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    assert all(one is other for one, other in zip(params, model.parameters(), strict=True))
    assert all(param.grad is None or isinstance(param.grad, DTensor) for param in params)
    assert set(optimizer.state) <= set(params)
    saved = [entry["exp_avg"] for entry in optimizer.state_dict()["state"].values() if entry]
    assert all(isinstance(each, DTensor) for each in saved)


@ranks(2)
@pytest.mark.parametrize("steps", [0, 2], ids=["first step", "third step"])
@pytest.mark.parametrize("call", [1, 2], ids=["first group", "second group"])
@pytest.mark.parametrize("holds", [False, True], ids=["dropped", "held"])
def test_a_step_that_raises(world: World, steps: int, call: int, holds: bool) -> None:
    pair = pair_with_two_groups()
    for seed in range(steps):
        pair.step(seed)
    held = fail_both(pair, "_foreach_addcdiv_", call, seed=7)
    model, optimizer = pair.models[0], pair.optimizers[0]
    assert_is_as_ever(model, optimizer)
    if not holds:
        held.clear()
        pair.check()  # with the state that the step began to make
    for each, other in pair.both:
        other.zero_grad()
        assert all(param.grad is None for param in each.parameters())
    with torch.no_grad():
        assert torch.equal(*(model(inputs(1)) for model in pair.models))
    pair.step(8)
    pair.step(9)


@ranks(2)
def test_state_that_is_loaded_after_an_error_stays(world: World) -> None:
    pair = pair_with_two_groups()
    pair.step(0)
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in pair.optimizers]
    held = fail_both(pair, "_foreach_addcdiv_", 2, seed=1)
    for optimizer, state in zip(pair.optimizers, saved, strict=True):
        optimizer.load_state_dict(state)
        optimizer.zero_grad()
    pair.check()
    held.clear()
    pair.check()
    pair.step(2)


@ranks(2)
def test_state_that_is_dropped_after_an_error_stays_dropped(world: World) -> None:
    pair = pair_with_two_groups()
    pair.step(0)
    held = fail_both(pair, "_foreach_addcdiv_", 2, seed=1)
    for optimizer in pair.optimizers:
        optimizer.state = type(optimizer.state)(dict)
        optimizer.zero_grad()
    held.clear()
    assert not pair.optimizers[0].state
    pair.step(2)


@ranks(2)
def test_an_error_does_not_keep_gradients(world: World) -> None:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    backward(model, 0)
    with failing("_foreach_addcdiv_", 1), contextlib.suppress(ArithmeticError):
        optimizer.step()
    gradients = [weakref.ref(local_of(param.grad)) for param in model.parameters() if param.grad is not None]
    optimizer.zero_grad()
    assert [reference() for reference in gradients] == [None] * len(gradients)


@ranks(2)
def test_what_a_step_wrote_before_an_error_is_noticed(world: World) -> None:
    model = sharded()
    *others, last = model.parameters()
    optimizer = torch.optim.AdamW([{"params": others}, {"params": [last]}], fused=True)
    backward(model, 0)
    before = [group.full.count_writes() for group in groups_of(model)]
    with failing("_fused_adamw_", 2), pytest.raises(ArithmeticError):
        optimizer.step()
    assert all(group.full.count_writes() != old for group, old in zip(groups_of(model), before, strict=True))


@ranks(2)
def test_a_hook_that_raises(world: World) -> None:
    pair = Pair()

    def refuse(*_: Any) -> None:
        raise ArithmeticError("in a hook")

    for register in ("register_step_pre_hook", "register_step_post_hook"):
        for model, optimizer in pair.both:
            backward(model, 0)
            handle = getattr(optimizer, register)(refuse)
            with pytest.raises(ArithmeticError):
                optimizer.step()
            handle.remove()
            optimizer.zero_grad()
        pair.check()
        assert_is_as_ever(pair.models[0], pair.optimizers[0])
    pair.step(1)


@ranks(2)
def test_an_optimizer_of_the_users_own_that_raises(world: World) -> None:
    model = sharded()
    optimizer = local_step(Sign(model.parameters()))
    backward(model, 0)
    calls = 0

    def fail(mine: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ArithmeticError
        return mine.add_(*args, alpha=-kwargs["alpha"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "sub_", fail)
        with pytest.raises(ArithmeticError):
            optimizer.step()
    assert len(optimizer.state) == 2
    assert all(isinstance(entry["mean"], DTensor) for entry in optimizer.state.values())
    assert runs_on_local(optimizer)
    assert [entry["count"] for entry in optimizer.state.values()][:3] == [2, 2, 1]
