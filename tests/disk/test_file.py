"""The file of offloaded values: what is written is read back, or an error names it."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard import DiskError
from fullshard.disk import file as disk_file
from fullshard.disk.file import BLOCK, DiskFile, DiskStaging, DiskWork, Region, file_in

WAYS = pytest.mark.parametrize("direct", [True, False])


def written(file: DiskFile, numel: int = 3 * BLOCK // 4 + 5, dtype: torch.dtype = torch.float32) -> tuple[Region, Any]:
    values = torch.randn(numel).to(dtype)
    region = file.allocate(numel, dtype, "parameter 'layer.weight'")
    region.write(values).wait()
    return region, values


@WAYS
def test_what_is_written_is_read_back(tmp_path: Path, direct: bool) -> None:
    file, numels = DiskFile(tmp_path, direct), (0, 1, 1024, 1025, BLOCK // 8, BLOCK // 4 + 1)
    for numel, dtype in product(numels, (torch.float32, torch.bfloat16, torch.float64)):
        region, values = written(file, numel, dtype)
        for target in (values.dtype, torch.float64):
            found = torch.empty(numel, dtype=target)
            region.read(found).wait()
            assert torch.equal(found, values.to(target)), (numel, dtype)


def test_parts_begin_and_end_where_blocks_do(tmp_path: Path) -> None:
    region, values = written(DiskFile(tmp_path))
    part = torch.empty(region.step)
    region.read(part, region.step).wait()
    assert torch.equal(part, values[region.step : 2 * region.step])
    region.write(-part, region.step).wait()
    whole = torch.empty_like(values)
    region.read(whole).wait()
    assert torch.equal(whole[region.step : 2 * region.step], -part)
    assert torch.equal(whole[: region.step], values[: region.step])


def test_reads_and_writes_of_a_region_happen_in_their_order_and_what_was_never_written_is_zeros(tmp_path: Path) -> None:
    numel = BLOCK // 2
    region = DiskFile(tmp_path).allocate(numel, torch.float32, "")
    found = [torch.ones(numel) for _ in range(8)]
    work = [region.read(found[0])]
    for number in range(1, 8):
        work += [region.write(torch.full((numel,), float(number))), region.read(found[number])]
    for each in work:
        each.wait()
    assert [each.unique().tolist() for each in found] == [[float(number)] for number in range(8)]


def test_the_file_has_no_name_and_freed_regions_are_used_again(tmp_path: Path) -> None:
    file = DiskFile(tmp_path)
    region, _ = written(file)
    before = file.nbytes
    assert not any(tmp_path.iterdir())
    del region
    again, values = written(file)
    assert file.nbytes == before
    found = torch.empty_like(values)
    again.read(found).wait()
    assert torch.equal(found, values)


def test_a_process_has_one_file_in_a_directory(tmp_path: Path) -> None:
    file = file_in(tmp_path, True, 1 << 20)
    assert file_in(tmp_path, True, 1 << 20) is file
    assert file in DiskFile.opened()
    assert file_in(tmp_path / "other", True, 1 << 20) is not file


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    with pytest.raises(DiskError, match=rf"{taken}.*Give DiskOffloadPolicy a directory that can be written"):
        DiskFile(taken)


def test_a_full_disk_is_found_when_there_is_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = DiskFile(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskError, match=rf"could not write parameter 'w' in .*{tmp_path}: No space left") as caught:
        file.allocate(10, torch.float32, "parameter 'w'")
    assert caught.value.errno == errno.ENOSPC


def test_a_forked_process_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    region, values = written(DiskFile(tmp_path))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(RuntimeError, match="in a forked process"):
        region.read(values)


def _short(real: Callable[..., int]) -> Callable[..., int]:
    """Moves fewer bytes than it was asked to."""
    return lambda fd, buffers, at: real(fd, [buffers[0][: max(1, len(buffers[0]) // 2) // 4096 * 4096 or 4096]], at)


def _failing(number: int) -> Callable[..., int]:
    def move(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    return move


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
@pytest.mark.parametrize("fault", ["cut", "changed", "read error", "write error", "full", "short read", "short write"])
def test_no_fault_of_the_disk_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, seed: int) -> None:
    """The values that are read are those that were written, or an error names the parameter and the directory."""
    random.seed(seed)
    for direct, numel in product((True, False), (7, 5000, BLOCK // 4, BLOCK // 4 + 3000)):
        with monkeypatch.context() as patch:
            _check_fault(tmp_path, patch, fault, DiskFile(tmp_path, direct), numel)


def _check_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, file: DiskFile, numel: int) -> None:
    region, values = written(file, numel)
    after, harmless = torch.empty_like(values), fault.startswith("short")
    if fault == "cut":
        os.ftruncate(file.fd, random.randrange(region.nbytes))
    elif fault == "changed":
        at = random.randrange(region.nbytes)
        with open(f"/proc/self/fd/{file.fd}", "r+b") as other:
            other.seek(at)
            before = other.read(1)
            other.seek(at)
            other.write(bytes([before[0] ^ (1 << random.randrange(8))]))
    elif fault == "read error":
        monkeypatch.setattr(disk_file.os, "preadv", _failing(errno.EIO))
    elif fault == "short read":
        monkeypatch.setattr(disk_file.os, "preadv", _short(os.preadv))
    else:
        number = {"write error": errno.EIO, "full": errno.ENOSPC}.get(fault)
        with monkeypatch.context() as patch:
            patch.setattr(disk_file.os, "pwritev", _short(os.pwritev) if number is None else _failing(number))
            values = values + 1
            work = region.write(values)  # beside the caller: nobody waits for it, as in training
            work.wait_until_done()
    if harmless:
        region.read(after).wait()
        assert torch.equal(after, values)
        return
    with pytest.raises(DiskError, match=rf"parameter 'layer\.weight' in .*{tmp_path}.*from the last checkpoint"):
        region.read(after).wait()
    monkeypatch.undo()
    region.write(values).wait()  # as a checkpoint is loaded, once the disk has room again
    region.read(after).wait()
    assert torch.equal(after, values)


def test_threads_that_write_at_once_write_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = DiskFile(tmp_path)
    region, values = written(file, 5000)
    events, submit, write = list[str](), file.submit, region._write

    def slow_write(*args: Any) -> None:
        events.append("begins")
        time.sleep(0.05)
        write(*args)
        events.append("ends")

    monkeypatch.setattr(file, "submit", lambda *args: (time.sleep(0.05), submit(*args))[1])
    monkeypatch.setattr(region, "_write", slow_write)
    threads = [threading.Thread(target=region.write, args=(values + number,)) for number in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    region._last.wait()
    assert events == ["begins", "ends"] * 2


@WAYS
def test_memory_of_the_staging_is_read_and_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    file = DiskFile(tmp_path, direct)
    copies, bounce = list[int](), file.bounce
    monkeypatch.setattr(file, "bounce", lambda: copies.append(1) or bounce())
    for numel in (BLOCK // 4, BLOCK // 2 + 1024, BLOCK // 4 + 5):
        region = file.allocate(numel, torch.float32, "a tensor")
        values, found = file.staging.take(numel, torch.float32), file.staging.take(numel, torch.float32)
        region.write(values.normal_()).wait()
        region.read(found).wait()
        assert torch.equal(found, values)
        is_odd = file.direct and numel % 1024 != 0  # the end of the file's last block is not a multiple of 4 KiB
        assert len(copies) == 2 * is_odd
        copies.clear()


def test_staging_is_used_again_once_its_work_is_done_and_only_so_much_is_kept() -> None:
    staging, under_way = DiskStaging(1 << 16), Future[None]()
    first = staging.take(1 << 12, torch.float32)
    staging.give_back([first], DiskWork([under_way]))
    other = staging.take(1 << 12, torch.float32)
    assert other.data_ptr() != first.data_ptr()
    under_way.set_result(None)
    assert staging.take(1 << 13, torch.bfloat16).data_ptr() == first.data_ptr(), "of the same bytes"
    for numel in range(1, 100):  # of many sizes
        staging.give_back([staging.take(1 << 12, torch.float32), staging.take(numel, torch.float32)], DiskWork())
    assert staging._nbytes <= 3 << 15


def test_reads_do_not_wait_for_writes_of_other_regions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, go = DiskFile(tmp_path), threading.Event()
    region, values = written(file)
    other = file.allocate(BLOCK, torch.float32, "a tensor")
    write = os.pwritev

    def late(*given: Any) -> int:
        assert go.wait(60)
        return write(*given)

    monkeypatch.setattr("fullshard.disk.file.os.pwritev", late)
    works = [other.write(torch.ones(BLOCK)), region.write(-values)]
    found = torch.empty_like(values)
    with pytest.raises(TimeoutError):
        region.read(found[: region.step]).blocks[0].result(timeout=0.2)  # of the same region
    third = file.allocate(5, torch.float32, "zeros")
    third.read(torch.ones(5)).wait()
    go.set()
    for work in works:
        work.wait()
    region.read(found).wait()
    assert torch.equal(found, -values)


def test_a_slow_disk_is_waited_for_where_its_memory_would_exceed_the_limit() -> None:
    staging, written = DiskStaging(1 << 12), Future[None]()
    staging.give_back([staging.take(1 << 10, torch.float32)], DiskWork([written]))
    threading.Timer(0.05, written.set_result, [None]).start()
    staging.take(1 << 9, torch.float32)  # of another size
    assert written.done()
