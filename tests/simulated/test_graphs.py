"""A step can be captured in a graph: it does the same at the same addresses each time, and replayed it is training."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import fullshard
from fullshard import FullyShardedDataParallel
from fullshard.device import CPU, Done, EventMark, Lane, current_stream
from fullshard.group import gradient_buffer
from fullshard.torch_private import CAN_SWAP_MEMORY
from tests.fully_shard.cases import assert_close, inputs
from tests.harness import World, ranks
from tests.harness.compare import ShardFunction, each_block, kept, whole_parameters
from tests.harness.models import MLP, seeded
from tests.harness.wrapper import wrap_blocks
from tests.simulated.device import SimulatedStreams, simulate
from tests.simulated.graphs import CaptureError, Graph, Graphs

#: After so many steps all buffers are there and the order of groups is known.
_WARM_UP = 2


@pytest.fixture
def streams() -> Iterator[SimulatedStreams]:
    with simulate(Graphs()) as found:
        yield found


@pytest.fixture
def device(streams: SimulatedStreams) -> Graphs:
    assert isinstance(streams.model, Graphs)
    return streams.model


def test_what_is_replayed_reads_and_writes_where_it_did(device: Graphs) -> None:
    x, total, lane = torch.ones(3), torch.zeros(3), Lane(CPU)
    with device.capture() as graph:
        doubled = x * 2
        lane.run(Done, lambda: total.add_(doubled)).wait()
    x.fill_(10.0)
    graph.replay()
    assert total.tolist() == [22] * 3
    assert doubled.tolist() == [20] * 3
    assert [launch.lane for launch in graph.launches] == [1, 2]


def test_a_replay_keeps_the_order_of_events_and_no_other(device: Graphs) -> None:
    x, copies, lane = torch.ones(3), torch.zeros(2, 3), Lane(CPU)
    with device.capture() as graph:
        x.add_(1)
        lane.run(Done, lambda: copies[0].copy_(x)).wait()
        x.add_(1)
    graph.replay(graph.computation_last)
    assert (x[0].item(), copies[0, 0].item()) == (5, 4)
    graph.needs[1].clear()  # as if the lane had not waited
    graph.replay(graph.computation_last)
    assert (x[0].item(), copies[0, 0].item()) == (7, 5)


def test_no_stream_waits_in_a_capture_for_what_was_before_it(device: Graphs) -> None:
    mark = EventMark(current_stream(CPU).record_event(), CPU)
    with pytest.raises(CaptureError, match="lane 1 waits in a capture for an event from before it"), device.capture():
        mark.wait()


def test_nobody_waits_for_what_was_in_a_capture(device: Graphs) -> None:
    with device.capture():
        mark = EventMark(current_stream(CPU).record_event(), CPU)
    with pytest.raises(CaptureError, match="lane 1 waits for an event that another graph has"):
        mark.wait()


def test_a_stream_that_takes_part_comes_back(device: Graphs) -> None:
    x, lane = torch.zeros(3), Lane(CPU)
    with pytest.raises(CaptureError, match="has not waited for lane 2 at the end"), device.capture():
        lane.run(Done, lambda: x.add_(1))


def test_a_stream_that_waits_for_nothing_takes_no_part(device: Graphs) -> None:
    lane = Lane(CPU)
    with pytest.raises(CaptureError, match=r"zeros.* runs in lane 2, which does not take part"), device.capture():
        lane.run(Done, lambda: torch.zeros(3), after=())  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    "ask",
    [lambda x: x.sum().item(), lambda x: current_stream(CPU).record_event().query(), lambda x: x.nonzero()],
    ids=["value", "event", "size"],
)
def test_the_host_asks_for_nothing_in_a_capture(device: Graphs, ask: Callable[[Tensor], object]) -> None:
    x = torch.ones(3)
    with pytest.raises(CaptureError, match="the host waits"), device.capture():
        ask(x)


@dataclass(frozen=True)
class Way:
    """A way to train.

    Args:
        shard: what is done to the model.
        micro: batches in a step.
        around: entered for each but the last of them.
        set_to_none: how gradients are cleared.
        events: whether the next forward is told when the optimizer has ended.
    """

    shard: ShardFunction
    micro: int = 1
    around: Callable[[Any], AbstractContextManager[object]] = lambda model: nullcontext()
    set_to_none: bool = True
    events: bool = False


class Captured:
    """A sharded model that trains in steps that may be captured and replayed, and beside it a whole one."""

    def __init__(self, world: World, device: Graphs, way: Way) -> None:
        self.world, self.device, self.way = world, device, way
        self.whole, sharded = seeded(MLP), seeded(MLP)
        self.sharded: Any = way.shard(fullshard, sharded) or sharded
        self.optimizers = [torch.optim.SGD(each.parameters(), 0.1, 0.9) for each in (self.sharded, self.whole)]
        self.inputs = [inputs() for _ in range(way.micro)]
        self.steps = 0

    def step(self) -> Tensor:
        """What a program captures; returns the losses."""
        self.optimizers[0].zero_grad(self.way.set_to_none)
        losses = []
        for batch in self.inputs:
            with self.way.around(self.sharded) if batch is not self.inputs[-1] else nullcontext():
                losses.append(self.sharded(batch).square().mean())
                losses[-1].backward()
        self.optimizers[0].step()
        if self.way.events:
            self.sharded.set_post_optim_event(current_stream(CPU).record_event())
        return torch.stack(losses).detach()

    def check(self, step: Callable[[], Tensor]) -> None:
        """A step of both, after which they are equal; that of the sharded model may be a replay."""
        rank, size, micro = self.world.rank, self.world.size, self.way.micro
        batches = [inputs((self.steps * size + each) * micro + at) for each in range(size) for at in range(micro)]
        losses = [self.whole(batch).square().mean() for batch in batches]
        self.optimizers[1].zero_grad()
        (torch.stack(losses).sum() / size).backward()
        self.optimizers[1].step()
        for mine, batch in zip(self.inputs, batches[rank * micro :], strict=False):
            mine.copy_(batch)
        found = step()
        self.steps += 1
        assert_close(found, torch.stack(losses[rank * micro : (rank + 1) * micro]), "loss")
        expected = dict(self.whole.named_parameters())
        if isinstance(self.sharded, FullyShardedDataParallel):
            for name, whole in whole_parameters(fullshard, self.sharded).items():
                assert_close(whole, expected[name], name)
            return
        for name, param in self.sharded.named_parameters():
            assert_close(kept(param), expected[name], name)
            assert_close(kept(param.grad), expected[name].grad, f"gradient of {name}")  # type: ignore[arg-type]

    def capture(self) -> tuple[Graph, Tensor]:
        """A step that is captured: the graph, and its losses."""
        found: list[Any] = []

        def step() -> Tensor:
            with self.device.capture() as graph:
                found.extend((graph, self.step()))
            return found[1]

        self.check(step)
        return found[0], found[1]


def kept_storage(fsdp: ModuleType, model: Any) -> None:
    each_block()(fsdp, model)
    model.set_keep_unsharded_storage(True)


def several_in_flight(fsdp: ModuleType, model: Any) -> None:
    each_block()(fsdp, model)
    model.set_prefetch_limit(2)
    model.set_reduce_scatter_max_input_buffers(2)


@contextmanager
def without(model: Any, setter: str) -> Iterator[None]:
    getattr(model, setter)(False)
    yield
    getattr(model, setter)(True)


def ways(world: World) -> dict[str, Way]:
    mesh = world.mesh(2, 1, names=("replicate", "shard"))
    return {
        "blocks": Way(each_block()),
        "kept storage": Way(kept_storage),
        "accumulation": Way(each_block(), 2, partial(without, setter="set_requires_gradient_sync")),
        "several in flight": Way(
            several_in_flight, 2, partial(without, setter="set_is_last_backward"), set_to_none=False, events=True
        ),
        "hybrid": Way(each_block(mesh=mesh), 2, partial(without, setter="set_requires_all_reduce")),
        "wrapper": Way(wrap_blocks(), 2, lambda model: model.no_sync()),
        "flat": Way(wrap_blocks(original=False)),
    }


#: These between them do what a capture has to heed; the others are left to the long lane.
TELLING = ("several in flight", "wrapper")
OTHERS = ("blocks", "kept storage", "accumulation", "hybrid", "flat")


@pytest.mark.skipif(not CAN_SWAP_MEMORY, reason="a capture has slots of its own where storages exchange no memory")
@ranks(2, transport="collective", timeout=120)
@pytest.mark.parametrize("names", [pytest.param(TELLING, id="telling"), pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_a_step_does_the_same_in_every_capture_and_replayed_it_is_training(
    world: World, names: tuple[str, ...]
) -> None:
    for name in names:
        try:
            with simulate(Graphs()) as streams, pytest.MonkeyPatch.context() as patch:
                patch.setattr(gradient_buffer, "MOST_WAITING", 1)  # gradients do not wait for one another
                assert isinstance(streams.model, Graphs)
                train(Captured(world, streams.model, ways(world)[name]))
        except (AssertionError, RuntimeError) as error:
            error.add_note(f"in the way that is called {name!r}")
            raise


@ranks(2, transport="collective", timeout=120)
def test_a_capture_begins_while_reductions_are_under_way(world: World) -> None:
    with simulate(Graphs()) as streams, pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_buffer, "MOST_WAITING", 1)  # gradients do not wait for one another
        assert isinstance(streams.model, Graphs)
        trained = Captured(world, streams.model, ways(world)["several in flight"])
        for _ in range(_WARM_UP):
            trained.check(trained.step)
        reductions = trained.sharded._fullshard_unit.schedule.comm.reductions

        def step() -> Tensor:
            trained.optimizers[0].zero_grad()
            first, last = trained.inputs
            with trained.way.around(trained.sharded):
                losses = [trained.sharded(first).square().mean()]
                losses[0].backward()
            assert reductions._scatters
            streams.synchronize(CPU)  # as torch.cuda.graph does
            with streams.model.capture():
                losses.append(trained.sharded(last).square().mean())
                losses[1].backward()
                trained.optimizers[0].step()
            return torch.stack(losses).detach()

        trained.check(step)
        trained.check(trained.step)


def train(trained: Captured) -> None:
    for _ in range(_WARM_UP):
        trained.check(trained.step)
    (first, _), (graph, losses) = trained.capture(), trained.capture()
    assert first.launches == graph.launches

    def replay(choose: Callable[[list[int]], int] = min) -> Tensor:
        graph.replay(choose)
        return losses

    orders = min, graph.computation_last, random.Random(trained.world.rank).choice
    for order in orders:
        trained.check(partial(replay, order))
    trained.check(trained.step)
    if not trained.way.set_to_none:  # otherwise the gradients of that step lie elsewhere
        trained.check(replay)
