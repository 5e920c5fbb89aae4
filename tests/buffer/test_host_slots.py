"""Slots that the ranks of a host share, here by two mappings of one process: who may write when, and who sees it."""

from __future__ import annotations

import weakref

import torch

from fullshard.buffer.host_slots import HostSlot, HostSlotPool
from fullshard.buffer.shared_memory import PRIVATE, Segment
from fullshard.buffer.slots import SlotBuffer

CPU = torch.device("cpu")


class Ranks:
    """Two ranks, whose slots are the same memory."""

    def __init__(self) -> None:
        self.made: list[Segment] = []
        self.slots: list[weakref.WeakValueDictionary[int, HostSlot]] = [weakref.WeakValueDictionary() for _ in range(2)]
        self.pools = [
            HostSlotPool(CPU, self._first, self.slots[0], 0, 2),
            HostSlotPool(CPU, self._next, self.slots[1], 1, 2),
        ]

    def _first(self, nbytes: int) -> tuple[Segment, Segment]:
        self.made.append(Segment.create(nbytes))
        return self.made[-1], Segment.open(self.made[-1].address, PRIVATE)

    def _next(self, nbytes: int) -> tuple[Segment, Segment]:
        return Segment.open(self.made[-1].address), Segment.open(self.made[-1].address, PRIVATE)

    def buffers(self) -> list[SlotBuffer]:
        return [pool.buffer(64) for pool in self.pools]

    def slot(self, rank: int, buffer: SlotBuffer) -> HostSlot:
        return self.slots[rank][buffer.memory.untyped_storage().data_ptr()]


def take(buffers: list[SlotBuffer]) -> None:
    for buffer in buffers:
        buffer.take()


def test_what_one_rank_writes_for_all_the_others_read_and_what_it_writes_for_itself_nobody_does() -> None:
    ranks = Ranks()
    take(buffers := ranks.buffers())
    ranks.slot(0, buffers[0]).writable(0, 8, torch.float32).fill_(3.0)
    seen = [buffer.memory[:32].view(torch.float32) for buffer in buffers]
    assert [each.tolist() for each in seen] == [[3.0] * 8] * 2
    seen[1].fill_(5.0)
    assert seen[0].tolist() == [3.0] * 8
    buffers[1].give_back()
    buffers[1].take()
    assert seen[1].tolist() == [3.0] * 8, "thrown away with the use"


def test_a_slot_may_be_written_when_no_rank_reads_it_any_more() -> None:
    ranks = Ranks()
    take(buffers := ranks.buffers())
    slots = [ranks.slot(rank, buffer) for rank, buffer in enumerate(buffers)]
    buffers[0].give_back()
    assert not slots[0].read.reached(slots[0].read.value), "the other rank has not given it back"
    buffers[1].give_back()
    assert slots[0].read.reached(slots[0].read.value)
    take(others := ranks.buffers())
    assert [ranks.slot(rank, other) for rank, other in enumerate(others)] == slots, "the next ones take the same"


def test_values_are_right_after_a_debug_mode_has_filled_a_slot_with_nan() -> None:
    ranks = Ranks()
    take(buffers := ranks.buffers())
    ranks.slot(0, buffers[0]).writable(0, 8, torch.float32).fill_(3.0)
    values = buffers[1].memory[:32].view(torch.float32)
    buffers[1].poison()
    buffers[1].give_back()
    assert values.isnan().all()
    buffers[1].take()
    assert values.tolist() == [3.0] * 8
