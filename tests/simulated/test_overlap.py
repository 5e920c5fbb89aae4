"""What the computation waits for, and when: communication that is waited for too early overlaps with nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fullshard
from fullshard.comm import collective
from fullshard.comm.backends import BACKENDS
from fullshard.device import CPU, Lane
from fullshard.group.gradients import Gradients
from fullshard.schedule import step_log
from fullshard.torch_private import all_gather_single
from tests.fully_shard.cases import groups_of
from tests.harness import World, ranks
from tests.harness.compare import each_block
from tests.harness.models import seeded
from tests.simulated import simulated
from tests.simulated.device import COMPUTE, Event, Stream

BLOCKS = 5


class Waits:
    """How many runs of each lane the computation has waited for, the oldest first."""

    def __init__(self) -> None:
        self.done: Counter[Lane] = Counter()
        self._runs: Counter[Lane] = Counter()
        self._lanes: dict[int, Lane] = {}  # by stream

    def done_in(self, model: Any, lane: str) -> Callable[[], int]:
        """Counts them for a lane of a model."""
        return lambda: self.done[getattr(groups_of(model)[0].comm.lanes, lane)]

    @contextmanager
    def counted(self) -> Iterator[Waits]:
        run, record, wait = Lane.run, Stream.record_event, Stream.wait_event

        def run_lane(lane: Lane, *args: Any, **kwargs: Any) -> Any:
            self._lanes[lane._stream.stream_id] = lane  # type: ignore[union-attr]
            self._runs[lane] += 1
            return run(lane, *args, **kwargs)

        def record_event(stream: Stream) -> Event:
            event: Any = record(stream)
            lane = self._lanes.get(stream.stream_id)
            event.run = (lane, self._runs[lane]) if lane is not None else None
            return event

        def wait_event(stream: Stream, event: Any) -> None:
            wait(stream, event)
            if stream.stream_id == COMPUTE and event.run is not None:
                lane, number = event.run
                self.done[lane] = max(self.done[lane], number)

        with (
            mock.patch.object(Lane, "run", run_lane),
            mock.patch.object(Stream, "record_event", record_event),
            mock.patch.object(Stream, "wait_event", wait_event),
        ):
            yield self


def blocks(width: int) -> Any:
    """Equal blocks, and a root without parameters of its own."""
    model = nn.Module()
    model.blocks = nn.Sequential(*[nn.Linear(width, width) for _ in range(BLOCKS)])
    model.forward = model.blocks.forward
    return model


@ranks(4, transport="collective")
@pytest.mark.parametrize("buffers", [1, 2])
def test_the_all_reduces_of_so_many_reductions_may_run(world: World, buffers: int) -> None:
    """Those of the last reductions overlap with the backward that follows, whatever the number of buffers."""
    with simulated("late"), Waits().counted() as waits:
        model = seeded(lambda: blocks(6))
        each_block(mesh=world.mesh(2, 2, names=("replicate", "shard")))(fullshard, model)
        model.set_reduce_scatter_max_input_buffers(buffers)
        done = waits.done_in(model, "all_reduce")
        waited: list[int] = []
        model.add_observer(lambda event: waited.append(done()) if event.action == "reduce" else None)
        for step in range(2):
            waited.clear()
            model(torch.randn(3, 6)).sum().backward()
            assert waited == [BLOCKS * step + max(0, number - buffers) for number in range(BLOCKS)]
            assert done() == BLOCKS * (step + 1)


@ranks(2, transport="collective")
@pytest.mark.parametrize("buffers", [1, 2])
def test_a_reduction_is_waited_for_when_the_next_buffer_is_written(world: World, buffers: int) -> None:
    """Until then it overlaps with the whole backward of the next block, as torch's does."""
    found: list[tuple[str, int]] = []
    receive = Gradients.receive

    def look(*args: Any) -> None:
        found.append(("gradient", done()))
        receive(*args)

    with (
        simulated("late"),
        Waits().counted() as waits,
        mock.patch.dict(BACKENDS, gloo=BACKENDS["gloo"]._replace(launches_together=True)),
        mock.patch.object(Gradients, "receive", staticmethod(look)),
    ):
        model = seeded(lambda: blocks(128))
        each_block()(fullshard, model)
        model.set_reduce_scatter_max_input_buffers(buffers)
        done = waits.done_in(model, "reduce")
        model.add_observer(lambda event: found.append(("reduce", done())) if event.action == "reduce" else None)
        for step in range(2):
            found.clear()
            model(torch.randn(3, 128).requires_grad_()).sum().backward()
            at = step * BLOCKS
            for number in range(BLOCKS):
                *gradients, reduction = found[3 * number : 3 * number + 3]
                if step:  # the places of gradients are made once, in the buffer
                    assert gradients == [("gradient", at + max(0, number - buffers))] * 2
                assert reduction == ("reduce", at + max(0, number + 1 - buffers))


@ranks(2, transport="collective")
def test_the_computation_waits_for_no_comparison_of_passes(world: World) -> None:
    found: list[int] = []

    def look(*args: Any, **kwargs: Any) -> Any:
        found.append(streams.current(CPU).stream_id)
        return all_gather_single(*args, **kwargs)

    with simulated("checked") as streams, mock.patch.object(step_log, "all_gather_single", look):
        model = seeded(lambda: blocks(6))
        each_block()(fullshard, model)
        for _ in range(2):
            model(torch.randn(3, 6)).sum().backward()
    assert len(found) == 4
    assert COMPUTE not in found


@ranks(2, transport="collective")
def test_a_collective_is_waited_for_before_the_next_of_its_lane_starts(world: World) -> None:
    """Where a backend does not launch several as one: not every backend tells those apart that are under way."""
    found: list[str] = []

    class Work:
        def __init__(self, work: Any) -> None:
            self._work = work

        def wait(self) -> None:
            found.append("waited")
            if self._work is not None:
                self._work.wait()

    def over(*args: Any) -> Any:
        def call(output: torch.Tensor, source: torch.Tensor) -> Any:
            found.append("started")
            return Work(one(output, source))

        one, together = made(*args)
        return call, together

    with simulated("checked"):
        made = collective.reduce_scatter_over
        with mock.patch.object(collective, "reduce_scatter_over", over):
            model = seeded(lambda: nn.Sequential(*[nn.Linear(512, 512) for _ in range(2)]))
            fullshard.fully_shard(model)
            model(torch.randn(3, 512)).sum().backward()
    assert found == ["started", "waited"] * 3  # two weights that move where they lie, and the rest
