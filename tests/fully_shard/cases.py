"""What the tests of `fully_shard` share: sharded models, a step compared with the same step unsharded, a recorder.

A claim that holds for torch too is tested for both libraries, by the same body: `@BOTH` gives it the one to use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fullshard
from fullshard.buffer.slots import SlotPool
from fullshard.group.param_group import ParamGroup
from fullshard.schedule.step_log import StepEvent
from fullshard.schedule.unit import unit_of
from fullshard.torch_private import CAN_SWAP_MEMORY
from tests.harness import World
from tests.harness.compare import LIBRARIES, TOLERANCE, LocalShard, deviation, each_block, kept
from tests.harness.models import MLP, seeded
from tests.harness.slow import slow


@dataclass(frozen=True)
class Library:
    """fullshard or torch's FSDP, by name, so that it can be sent to the ranks."""

    name: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "name":  # asked for while it is unpickled
            raise AttributeError(name)
        return getattr(LIBRARIES[self.name], name)


OURS = Library("fullshard")


def _either(names: list[str]) -> pytest.MarkDecorator:
    """The libraries of these names; torch's in the long lane alone, for it proves the test."""
    marks = {"torch": pytest.mark.slow}
    cases = [pytest.param(Library(name), id=name, marks=marks.get(name, ())) for name in names]
    return pytest.mark.parametrize("fsdp", cases)


BOTH = _either(list(LIBRARIES))


def both_with(method: str) -> pytest.MarkDecorator:
    """The same, without a torch whose sharded modules do not have a method yet."""
    return _either([name for name, library in LIBRARIES.items() if hasattr(library.FSDPModule, method)])


def first_of(name: str, *values: Any, quick: int = 1) -> pytest.MarkDecorator:
    """A parameter of which the quick lane has the first value or values, and the long lane all."""
    return pytest.mark.parametrize(name, [*values[:quick], *slow(*values[quick:])])


#: For tests of slots that keep their memory, and of gradients in memory that ranks share.
EXCHANGED = pytest.mark.skipif(
    not CAN_SWAP_MEMORY,
    reason="where storages cannot exchange memory, buffers are allocated when taken, and gradients travel as messages",
)


def inputs(seed: int = 0, rows: int = 4, width: int = 6) -> Tensor:
    """A batch for `MLP`."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def shard_mlp(fsdp: Any = OURS, **options: Any) -> Any:
    """An MLP with a group for each block and one for the rest."""
    model = seeded(MLP)
    each_block(**options)(fsdp, model)
    return model


class Twins:
    """A sharded model and the same model whole, which take the same steps of SGD.

    `sharded` has been sharded from a model equal to `whole`. The whole one sees the batches of all ranks.
    """

    def __init__(self, world: World, sharded: Any, whole: nn.Module) -> None:
        self.world = world
        self.sharded = sharded
        self.whole = whole
        self.steps = 0
        self._parameters = dict(sharded.named_parameters())

    def step(
        self,
        *,
        lr: float = 0.1,
        loss: Callable[[Any, Tensor], Tensor] = lambda model, x: model(x).square().mean(),
        batch: Callable[[int], Tensor] = inputs,
    ) -> None:
        """A step of both, after which losses, gradients and parameters have to be equal."""
        world, first = self.world, self.steps * self.world.size
        self.steps += 1
        expected = []
        for rank in range(world.size):
            expected.append(loss(self.whole, batch(first + rank)))
            (expected[-1] / world.size).backward()
        found = loss(self.sharded, batch(first + world.rank))
        found.backward()
        assert_close(found, expected[world.rank], "loss")
        gradients = {name: p.grad for name, p in self.whole.named_parameters()}
        self.check(gradients, {name: p.grad for name, p in self._parameters.items()}, "gradient")
        with torch.no_grad():
            for parameter in (*self.whole.parameters(), *self._parameters.values()):
                if parameter.grad is not None:
                    parameter -= lr * parameter.grad
                    parameter.grad = None
        self.check(dict(self.whole.named_parameters()), self._parameters, "parameter")

    def check(self, expected: dict[str, Any], found: dict[str, Any], kind: str) -> None:
        """Compare tensors by name; whoever has none has to have none on both sides."""
        assert list(found) == list(expected)
        for name, tensor in found.items():
            if tensor is None or expected[name] is None:
                assert tensor is expected[name], f"{kind} {name}"
            else:
                assert_close(kept(tensor), expected[name], f"{kind} {name}")


def twins(world: World, build: Callable[[], Any] = lambda: seeded(MLP), **options: Any) -> Twins:
    """A model sharded by blocks with fullshard, and its whole twin."""
    model, reference = build(), build()
    each_block(**options)(fullshard, model)
    return Twins(world, model, reference)


def assert_close(found: Tensor | LocalShard, expected: Tensor, what: str) -> None:
    """One rule for everything: equal up to the order of sums over ranks. Of a shard, this rank's part of all."""
    assert found.shape == expected.shape, what
    expected = expected.detach()
    if isinstance(found, LocalShard):
        error = deviation(found.local, found.part_of(expected), expected)
    else:
        error = deviation(found.detach(), expected)
    assert error <= TOLERANCE, f"{what} is off by {error:.2e} of its largest entry"


class Recorder:
    """An observer that remembers, as `"gather blocks.0"`; `take()` returns what happened since the last `take()`."""

    def __init__(self, model: Any, *actions: str) -> None:
        self.actions = actions
        self.events: list[StepEvent] = []
        self.stop = model.add_observer(self.events.append)

    def take(self) -> list[str]:
        """All since the last call, of the actions asked for, without the common prefix of blocks."""
        events = [event for event in self.events if not self.actions or event.action in self.actions]
        self.events.clear()
        return [f"{event.action} {event.group.replace('blocks.', '') or 'root'}" for event in events]


def groups_of(module: nn.Module) -> list[ParamGroup]:
    """All groups of the sharded modules in `module`, in the order of its modules."""
    units = dict.fromkeys(unit for child in module.modules() if (unit := unit_of(child)) is not None)
    return [group for unit in units for group in unit.groups]


def local(tensor: Any) -> Tensor:
    """This rank's part of a DTensor, or a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def kinds(module: nn.Module) -> dict[str, bool]:
    """For each parameter of the module itself and its children, whether a DTensor stands there."""
    return {name: isinstance(parameter, DTensor) for name, parameter in module.named_parameters()}


def are_sharded(module: nn.Module) -> bool:
    """Whether the module shows DTensors, all of them; a mixture is an error."""
    shown = set(kinds(module).values())
    assert len(shown) == 1, kinds(module)
    return shown.pop()


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Environment variables for the time of a block."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        yield


def slots_in_use(pool: SlotPool) -> int:
    """How many buffers have memory of a pool in use."""
    return sum(buffer.in_use for buffer in pool.buffers if buffer.pool is pool)
