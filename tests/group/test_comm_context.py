"""What groups that communicate in turn share: reductions are waited for oldest first, and pools are made once."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from fullshard.buffer.slots import LARGE, SHARED, SlotBuffer
from fullshard.comm.collective import CollectiveTransport
from fullshard.comm.point_to_point import PointToPointTransport
from fullshard.device import CPU, PASSED, HoldingMark
from fullshard.group.comm_context import CommContext, Reductions
from tests.simulated import simulate
from tests.simulated.graphs import Graphs


class Event:
    def __init__(self, is_there: bool) -> None:
        self.is_there = is_there

    def query(self) -> bool:
        return self.is_there

    def synchronize(self) -> None:
        self.is_there = True


class NamedMark:
    def __init__(self, name: str, waited: list[str], error: Exception | None = None) -> None:
        self.name, self.waited, self.error = name, waited, error

    def wait(self) -> None:
        self.waited.append(self.name)
        if self.error is not None:
            raise self.error


def under_way(waited: list[str]) -> Reductions:
    found = Reductions()
    for number in range(3):
        found.add(NamedMark(f"scatter {number}", waited))
        found.add_sum(NamedMark(f"sum {number}", waited))
    return found


def test_the_oldest_are_waited_for_first_and_some_are_kept() -> None:
    waited = list[str]()
    reductions = under_way(waited)
    reductions.wait_for_oldest(keep=2, keep_sums=1)
    assert waited == ["scatter 0", "sum 0", "sum 1"]
    reductions.wait_for_oldest(keep=2, keep_sums=1)
    assert waited == ["scatter 0", "sum 0", "sum 1"]
    reductions.wait_for_oldest()
    assert waited[3:] == ["scatter 1", "scatter 2", "sum 2"]


def test_gradients_that_have_arrived_are_handed_over_in_their_order() -> None:
    reductions, handed = Reductions(), list[int]()
    for number, is_there in enumerate((True, False, True)):
        reductions.arriving.append((Event(is_there), lambda number=number: handed.append(number)))  # type: ignore[arg-type, misc]
    reductions.wait_for_oldest()
    assert handed == [0]
    reductions.hand_over_arrived()
    assert handed == [0, 1, 2]


def test_dropped_reductions_are_waited_for_and_not_handed_over() -> None:
    waited, handed = list[str](), list[int]()
    reductions = under_way(waited)
    reductions.add(NamedMark("failed", waited, RuntimeError("the connection is closed")))
    reductions.arriving.append((Event(False), lambda: handed.append(1)))  # type: ignore[arg-type]
    reductions.drop()
    assert len(waited) == 7
    assert (handed, len(reductions.arriving), reductions.drops) == ([], 0, 1)


def test_marks_that_are_forgotten_are_not_waited_for() -> None:
    waited = list[str]()
    reductions = Reductions()
    held = HoldingMark(NamedMark("held", waited), [torch.zeros(1)])
    reductions.add(held)
    reductions.forget_marks()
    assert held.mark is PASSED
    reductions.wait_for_oldest()
    assert waited == []


def test_there_is_one_pool_for_each_kind_of_buffer_and_transport() -> None:
    context = CommContext(CPU)
    one, other = PointToPointTransport(), PointToPointTransport()
    pool = context.pool("parameters", one)
    assert context.pool("parameters", one) is pool
    assert context.pool("gradients", one) is not pool
    assert context.pool("parameters", other) is not pool
    assert context.lanes is context.lanes


def test_without_a_capture_no_marks_are_forgotten() -> None:
    assert not CommContext(CPU).forget_marks_at_capture()


@pytest.mark.parametrize("where", ["host", "device", "device, registered", "device that captures a graph"])
def test_large_memory_that_is_not_in_use_goes_back_to_a_device_unless_a_graph_knows_it(where: str) -> None:
    device = Graphs()
    for nbytes in (LARGE, LARGE - 64):
        with simulate(device) if where != "host" else nullcontext(), mock.patch.object(SHARED, "is_in_graph", False):
            context, transport = CommContext(CPU), CollectiveTransport()
            transport.registers_memory = "registered" in where
            pool = context.pool("parameters", transport)
            used, free = SlotBuffer(pool, nbytes), SlotBuffer(pool, nbytes)
            with device.capture() if "graph" in where else nullcontext():
                for buffer in (used, free):
                    buffer.take()
                free.give_back()
                context.give_back_memory()
            context.give_back_memory()
            assert pool.nbytes_free == (0 if (nbytes, where) == (LARGE, "device") else nbytes)
            assert used.memory.untyped_storage().nbytes() >= nbytes
