"""Segments and counters: what others see, what is reserved, and that nothing is left of either."""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fullshard.buffer import shared_memory
from fullshard.buffer.shared_memory import LINE, Address, Counters, Segment, missing
from tests.harness.held import mappings, open_files
from tests.harness.slow import slow

pytestmark = pytest.mark.skipif(bool(missing()), reason="this system shares no memory")

PAGE = mmap.PAGESIZE


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    gc.collect()
    before = mappings(), open_files()
    yield
    gc.collect()
    assert (mappings(), open_files()) == before


def in_child(action: Callable[[], None]) -> int:
    child = multiprocessing.get_context("fork").Process(target=action)
    child.start()
    child.join(30)
    assert child.exitcode is not None
    return child.exitcode


@pytest.mark.parametrize("nbytes", [1, 63, PAGE, 3 * PAGE + 5])
def test_what_one_writes_others_read(nbytes: int) -> None:
    segment = Segment.create(nbytes)
    other = Segment.open(segment.address)
    mine, theirs = segment.tensor(0, nbytes, torch.uint8), other.tensor(0, nbytes, torch.uint8)
    assert not theirs.any(), "it begins with zeros"
    mine[-1] = 7
    assert theirs[-1] == 7
    theirs[-1] = 8
    assert mine[-1] == 8


def test_memory_moves_to_a_segment_as_large() -> None:
    segments = [Segment.reserve(nbytes) for nbytes in (5000, 5000, 9000)]
    one, other, larger = (segment.tensor(0, 5000, torch.uint8) for segment in segments)
    for value in (7, 8):
        one.fill_(value)
        segments[0].discard_writes(segments[1])
        assert other.tolist() == [value] * 5000
        assert not one.any()
    segments[1].discard_writes(segments[2])
    assert not other.any()
    assert not larger.any()


def test_another_process_opens_it() -> None:
    segment = Segment.create(16)

    def write() -> None:
        Segment.open(segment.address).tensor(8, 1, torch.int64).fill_(-5)

    assert in_child(write) == 0
    assert segment.tensor(0, 2, torch.int64).tolist() == [0, -5]


def test_tensors_have_storages_of_their_own_and_keep_the_memory() -> None:
    segment = Segment.create(4 * PAGE)
    tensor = segment.tensor(PAGE + 4, 10, torch.float32)
    assert tensor.untyped_storage().nbytes() == 40
    assert tensor.storage_offset() == 0
    assert not tensor.is_inference()
    other = Segment.open(segment.address).tensor(PAGE + 4, 10, torch.float32)
    del segment
    gc.collect()
    tensor.fill_(3)
    assert other.tolist() == [3] * 10
    del tensor, other
    gc.collect()
    assert mappings() == 0


def test_tensors_of_nothing_and_in_inference_mode() -> None:
    segment = Segment.create(0)
    assert segment.tensor(0, 0, torch.float64).numel() == 0
    with torch.inference_mode():
        tensor = segment.tensor(0, 1, torch.uint8)
    assert not tensor.is_inference()
    tensor.fill_(1)


def test_mappings_keep_no_file_open() -> None:
    before = open_files()
    segment = Segment.create(PAGE)
    others = [Segment.open(segment.address) for _ in range(20)]
    assert open_files() == before + 1, "that of the owner, by which others find it"
    segment.file = None
    assert open_files() == before
    with pytest.raises(FileNotFoundError):
        Segment.open(segment.address)
    del others


def test_another_file_in_the_place_of_a_segment_is_not_taken_for_it() -> None:
    gone = Segment.create(PAGE).address
    gc.collect()
    other = Segment.create(PAGE)
    assert other.address.fd == gone.fd, "the number is used again"
    with tempfile.TemporaryFile() as file, pytest.raises(FileNotFoundError, match="another file"):
        Segment.open(Address(os.getpid(), file.fileno(), os.fstat(file.fileno()).st_ino, 0))
    for mistaken in (gone, other.address._replace(nbytes=2 * PAGE)):
        with pytest.raises(FileNotFoundError, match="another file"):
            Segment.open(mistaken)


def test_a_process_forks_while_another_of_its_threads_lets_go_of_segments() -> None:
    """What is copied for the child must not be unmapped meanwhile."""

    def take_turns() -> None:
        shown = Segment.create(64 * PAGE)
        shown.pages.own = [(0, 64 * PAGE)]
        end = time.monotonic() + 0.4

        def come_and_go() -> None:
            while time.monotonic() < end:
                Segment.create(64 * PAGE).pages.own = [(0, 64 * PAGE)]
                shared_memory.forget_copies()

        threads = [threading.Thread(target=come_and_go) for _ in range(2)]
        for each in threads:
            each.start()
        while time.monotonic() < end:
            shared_memory._before_fork()
        for each in threads:
            each.join()

    assert in_child(take_turns) == 0
    gc.collect()


def test_its_space_is_reserved() -> None:
    segment = Segment.create(64 * PAGE)
    assert segment.file is not None
    assert os.fstat(segment.file.fd).st_blocks * 512 == 64 * PAGE


@pytest.mark.parametrize("limit", ["RLIMIT_AS", *slow("RLIMIT_FSIZE", "RLIMIT_NOFILE")])
def test_too_little_of_anything_is_an_os_error_and_leaves_nothing(limit: str) -> None:
    nbytes = 16 << 20

    def try_to_create() -> None:
        used = PAGE * int(Path("/proc/self/statm").read_text().split()[0])
        little = {"RLIMIT_AS": used + nbytes // 2, "RLIMIT_FSIZE": PAGE, "RLIMIT_NOFILE": 0}[limit]
        most = resource.getrlimit(getattr(resource, limit))[1]
        resource.setrlimit(getattr(resource, limit), (little, most))
        with pytest.raises(OSError, match=r"Cannot allocate memory|File too large|Too many open files"):
            Segment.create(nbytes)
        resource.setrlimit(getattr(resource, limit), (most, most))
        assert mappings() == 0

    before = open_files()
    assert in_child(try_to_create) == 0
    assert open_files() == before


def test_writes_to_a_view_concern_nobody_else() -> None:
    segment = Segment.create(4 * PAGE)
    view = Segment.open(segment.address, mmap.MAP_PRIVATE)
    shared, seen = segment.tensor(0, 4 * PAGE, torch.uint8), view.tensor(0, 4 * PAGE, torch.uint8)
    shared[0] = 1
    assert seen[0] == 1
    assert seen.sum() == 1
    assert not view.was_written(), "reading every page is no write"
    seen[2 * PAGE] = 9
    assert view.was_written()
    assert shared[2 * PAGE] == 0
    shared[2 * PAGE + 1] = 5
    assert seen[2 * PAGE + 1] == 0, "its copy of the page is not what others write to"
    shared[3 * PAGE] = 6
    assert seen[3 * PAGE] == 6
    view.discard_writes()
    assert not view.was_written()
    assert (seen[2 * PAGE], seen[2 * PAGE + 1], seen[3 * PAGE]) == (0, 5, 6)


def test_a_write_to_the_last_page_is_found() -> None:
    segment = Segment.create(5 * PAGE + 1)
    view = Segment.open(segment.address, mmap.MAP_PRIVATE)
    view.tensor(5 * PAGE, 1, torch.uint8).fill_(1)
    assert view.was_written()
    assert not Segment.open(segment.address, mmap.MAP_PRIVATE).was_written(), "each view has pages of its own"


def test_a_fork_of_this_process_writes_nothing_into_a_view() -> None:
    segment = Segment.create(PAGE)
    view = Segment.open(segment.address, mmap.MAP_PRIVATE)
    seen = view.tensor(0, 1, torch.uint8)

    def write() -> None:
        seen.fill_(3)

    assert in_child(write) == 0
    assert seen[0] == 0
    assert not view.was_written()


@pytest.mark.parametrize("size", [2, 3, 200])
def test_counters_are_one_number_for_each_process(size: int) -> None:
    segment = Segment.create(64 + LINE * size)
    of = [Counters(Segment.open(segment.address), 64, rank, size) for rank in range(size)]
    assert all(counters.reached(0) for counters in of)
    for counters in of[:-1]:
        counters.set(1 << 40)
    assert of[-1].reached(1 << 40)
    assert not of[0].reached(1)
    assert of[0].of(0) == of[-1].of(0) == 1 << 40
    assert of[0].of(size - 1) == 0
    of[-1].set(1)
    assert of[0].reached(1)
    assert not of[0].reached(2)
    assert of[-1].value == 1
