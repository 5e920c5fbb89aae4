"""A full buffer in shared memory: views see what all ranks write, and keep what is written to them to themselves."""

from __future__ import annotations

import mmap
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from fullshard.buffer.shared import SharedBuffer
from fullshard.buffer.shared_memory import _USES, Segment, missing
from fullshard.comm.transport import SharedMemory
from fullshard.device import PASSED

pytestmark = pytest.mark.skipif(bool(missing()), reason="this system shares no memory")

NUMEL = 4096  # of float32: four pages


class Fixture:
    def __init__(self, numel: int = NUMEL) -> None:
        segment = Segment.create(64 + 4 * numel)
        view = Segment.open(segment.address, mmap.MAP_PRIVATE)
        memory = SharedMemory(segment, view, 64, cast("Any", None))
        self.buffer = SharedBuffer(view, 64, 4 * numel)
        self.leaf: Tensor = self.buffer.memory.view(torch.float32).data
        self.shared = memory.tensor(0, numel, torch.float32)

    def use(self, write: str = "") -> None:
        self.buffer.take()
        if write == "data":
            self.leaf.data[-1] = -1
        self.buffer.give_back(PASSED)


@pytest.fixture
def made() -> Fixture:
    return Fixture()


def test_views_see_what_is_shared_and_never_change_it(made: Fixture) -> None:
    made.shared.fill_(1)
    made.buffer.take()
    assert (made.leaf == 1).all()
    made.leaf[0] = 5
    assert made.shared[0] == 1
    made.buffer.discard_writes()
    assert made.leaf[0] == 1


@pytest.mark.parametrize("before", [0, 7, 20, _USES - 1, 2 * _USES + 7])
def test_writes_through_data_are_thrown_away_whenever_they_begin(made: Fixture, before: int) -> None:
    for _ in range(before):
        made.use()
    for value in range(2 * _USES):
        made.use("data")
        made.shared.fill_(value)
        assert (made.leaf == value).all()


def test_a_use_without_faults_looks_at_no_pages(made: Fixture) -> None:
    made.use()
    looks = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made.buffer._view, "was_written", lambda: looks.append(True))
        patch.setattr("fullshard.buffer.shared_memory.page_faults", lambda: 7)  # other threads of the process have some
        for _ in range(_USES // 2):
            made.use()
    assert len(looks) < _USES // 8


def test_a_write_outside_of_any_use_is_found_in_time(made: Fixture) -> None:
    other = Fixture()
    made.use()
    made.leaf.data[-1] = -1
    other.use()  # so that its page fault is none of a later use
    for _ in range(_USES):
        made.use()
    made.shared.fill_(3)
    assert (made.leaf == 3).all()


def test_reads_are_never_taken_for_writes(made: Fixture) -> None:
    for value in range(3 * _USES):
        made.shared.fill_(value)
        made.buffer.take()
        assert made.leaf.sum() == value * NUMEL
        made.buffer.give_back(PASSED)


def test_a_private_copy_stays_what_it_was(made: Fixture) -> None:
    made.shared.fill_(1)
    made.buffer.take()
    made.buffer.be_private()
    made.shared.fill_(2)
    assert (made.leaf == 1).all()
    made.leaf[0] = 7
    assert made.shared[0] == 2
    made.buffer.be_private()
    assert (made.leaf == 2).all(), "a second one is taken of what is shared now"
    made.buffer.give_back(PASSED)
    assert (made.leaf == 2).all()
    made.shared.fill_(3)
    assert (made.leaf == 3).all(), "it is shared again"


def test_views_and_storage_stay_the_same(made: Fixture) -> None:
    storage, versions, address = made.buffer.storage_id, made.leaf._version, made.leaf.data_ptr()
    for _ in range(2):
        made.buffer.take()
        made.buffer.be_private()
        assert made.leaf.untyped_storage()._cdata == storage == made.buffer.storage_id
        assert made.leaf.data_ptr() == address
        made.buffer.be_shared()
        made.buffer.give_back(PASSED)
    assert made.leaf._version == versions, "autograd sees no write"


def test_a_private_copy_lives_only_while_it_is_shown(made: Fixture) -> None:
    view = made.buffer._view
    made.buffer.take()
    made.buffer.be_private()
    assert view.was_written()
    made.buffer.give_back(PASSED)
    assert not view.was_written()


@pytest.mark.parametrize("numel", [1, 1000, 1024, 5000])
def test_all_of_a_private_copy_is_this_ranks_own(numel: int) -> None:
    made = Fixture(numel)
    made.shared.fill_(1)
    made.buffer.take()
    made.buffer.be_private()
    made.shared.fill_(2)
    assert (made.leaf == 1).all()


def test_in_inference_mode(made: Fixture) -> None:
    with torch.inference_mode():
        made.use("data")
        made.buffer.take()
        made.buffer.be_private()
        made.buffer.give_back(PASSED)
    assert not made.buffer.memory.is_inference()
