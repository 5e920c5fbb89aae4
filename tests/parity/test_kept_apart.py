"""Modules that keep their weights in places of their own, besides where they registered them.

What is replaced in a module must be replaced there too: in every presentation, and after whatever shows something else.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullshard
from tests.harness import World, ranks
from tests.harness.compare import deviation
from tests.harness.models import seeded, shard_each
from tests.harness.slow import some
from tests.harness.wrapper import wrap

WIDTH = 4


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH, batch_first=True, **options)
        self.blocks = nn.ModuleList([self.cell])
        self.last = nn.Linear(options.get("proj_size", WIDTH), 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cell(x)[0])


class Keeps(nn.Module):
    """A block that computes with what it keeps in a list, in a dict in a list, and in an attribute."""

    hold: Callable[[Any], Any] = staticmethod(lambda weights: weights)
    held: Callable[[Any], Any] = staticmethod(lambda holder: holder)

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.weights = self.hold([self.one.weight, {"two": self.two.weight}])
        self.__dict__["third"] = self.three.weight

    def forward(self, x: Tensor) -> Tensor:
        weights = self.held(self.weights)
        x = torch.tanh(F.linear(x, weights[0], self.one.bias))
        x = torch.tanh(F.linear(x, weights[1]["two"], self.two.bias))
        return F.linear(x, self.__dict__["third"], self.three.bias)


class KeepsDeeper(Keeps):
    hold = staticmethod(lambda weights: [("name", deque(weights))])
    held = staticmethod(lambda holder: holder[0][1])


class Outer(nn.Module):
    """It keeps, and uses, a weight of a block that is sharded for itself."""

    def __init__(self, block: type[Keeps] = Keeps) -> None:
        super().__init__()
        self.block = block()
        self.blocks = nn.ModuleList([self.block])
        self.also = [self.block.one.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) @ self.also[0]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Recurrent(nn.LSTM, num_layers=2),
    "projected": lambda: Recurrent(nn.LSTM, proj_size=2),
    "gru": lambda: Recurrent(nn.GRU),
    "list": Outer,
    "deque in a tuple": lambda: Outer(KeepsDeeper),
}


def shard(model: Any, api: str) -> Any:
    if api == "fully_shard":
        return shard_each(*model.blocks, model)
    name = "cell" if isinstance(model, Recurrent) else "block"
    del model.blocks
    setattr(model, name, wrap(fullshard, getattr(model, name), original=api == "original"))
    return wrap(fullshard, model, original=api == "original")


def summon(model: Any, reference: Any) -> Any:
    with fullshard.summon_full_params(model):
        return model


def write(model: Any, reference: Any) -> Any:
    with fullshard.summon_full_params(model), torch.no_grad():
        for each in (model, reference):
            for parameter in each.parameters():
                parameter.mul_(0.9)
    return model


def fail(model: Any, reference: Any) -> Any:
    def raise_once(grad: Tensor) -> None:
        raise ArithmeticError

    inner = model.cell if hasattr(model, "cell") else model.block
    handle = inner.register_forward_hook(
        lambda module, args, out: (out if isinstance(out, Tensor) else out[0]).register_hook(raise_once) and None
    )
    with pytest.raises(ArithmeticError):
        model(torch.randn(2, 3, WIDTH)).sum().backward()
    handle.remove()
    if isinstance(model, fullshard.FSDPModule):
        model.reset_iter_state()
    for parameter in model.parameters():
        parameter.grad = None
    return model


def load(model: Any, reference: Any) -> Any:
    model.load_state_dict(model.state_dict())
    return model


def evaluate(model: Any, reference: Any) -> Any:
    with torch.inference_mode():
        model(torch.randn(2, 3, WIDTH))
    return model


EVENTS = {
    "summon": summon,
    "write": write,
    "error": fail,
    "load": load,
    "evaluate": evaluate,
    "copy": lambda model, _: copy.deepcopy(model),
}


@ranks(2)
@pytest.mark.parametrize("api", ["fully_shard", "original", "flat"])
@pytest.mark.parametrize("kind", some(MODELS, ("lstm", "list")))
def test_training_is_right_whatever_comes_between_steps(world: World, kind: str, api: str) -> None:
    reference = seeded(MODELS[kind])
    model = shard(seeded(MODELS[kind]), api)
    for step, event in enumerate(["", *EVENTS]):
        if event:
            model = EVENTS[event](model, reference)
        for again in range(2):
            total: Any = 0
            for rank in range(world.size):
                x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(10 * step + 5 * again + rank))
                expected = reference(x).square().mean()
                total = total + expected / world.size
                if rank == world.rank:
                    loss = model(x).square().mean()
                    assert deviation(loss.detach(), expected.detach()) < 1e-5, f"after {event or 'nothing'}"
            total.backward()
            loss.backward()
            for each in (model, reference):
                optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
                optimizer.step()
                optimizer.zero_grad()


class InTuple(nn.Linear):
    """What it keeps cannot be replaced."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.pair = (self.weight, self.bias)


@ranks(1, transport="p2p")
def test_a_tuple_of_parameters_is_refused(world: World) -> None:
    for refused in (fullshard.fully_shard, fullshard.FullyShardedDataParallel):
        with pytest.raises(ValueError, match="InTuple keeps parameters in a tuple, its attribute 'pair'"):
            refused(InTuple())


class Plain:
    def __init__(self, weight: Any) -> None:
        self.weight = weight


@dataclass
class Record:
    weight: Any


def unregistered(weight: Any) -> Any:
    linear = nn.Linear(WIDTH, WIDTH)
    linear.weight = weight
    return [linear]


#: Ways to hold a weight that nobody follows, and what reads it there.
HOLDERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "closure": (lambda weight: lambda: weight, lambda held: held()),
    "set": (lambda weight: {weight}, lambda held: next(iter(held))),
    "object": (Plain, lambda held: held.weight),
    "dataclass": (Record, lambda held: held.weight),
    "module": (unregistered, lambda held: held[0].weight),
}


class Hides(nn.Module):
    """It computes with a parameter that it holds in its own way, beside the module inside that has it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        hold, self.read = HOLDERS[how]
        self.held = hold(self.inner.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.read(self.held))


def shard_whole(model: Any, front_end: str) -> Any:
    return wrap(fullshard, model, original=False) if front_end == "flat" else fullshard.fully_shard(model)


@ranks(1, 2)
@pytest.mark.parametrize("how", HOLDERS)
@pytest.mark.parametrize("front_end", ["composable", "flat"])
def test_a_parameter_that_nobody_can_follow_is_refused_when_it_is_trained(
    world: World, front_end: str, how: str
) -> None:
    model = shard_whole(seeded(lambda: Hides(how)), front_end)
    loss = model(torch.ones(2, WIDTH)).sum()
    with pytest.raises(RuntimeError, match=r"a gradient arrived at parameter 'inner\.weight' as it was before"):
        loss.backward()


@ranks(2)
@pytest.mark.parametrize("how", HOLDERS)
@pytest.mark.parametrize("front_end", ["composable", "flat"])
def test_a_frozen_parameter_that_nobody_can_follow_keeps_its_values(world: World, front_end: str, how: str) -> None:
    """As docs/how-to/migration.md says: those that it had when it was sharded, whatever is loaded or written later."""
    model = seeded(lambda: Hides(how)).requires_grad_(False)
    before = model(torch.ones(2, WIDTH))
    model = shard_whole(model, front_end)
    for factor in (2.0, 3.0):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        x = torch.ones(2, WIDTH, requires_grad=True)
        found = model(x)
        assert torch.equal(found, before)
        found.sum().backward()
