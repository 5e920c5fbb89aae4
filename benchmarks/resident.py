"""The memory of a process as the kernel sees it: now, and at its peak in a phase.

The kernel sees what every thread and every library takes, gloo's own temporaries included, which no profiler of torch
does. For its figure to be what is alive, memory that is freed must be returned to it at once: see
:func:`return_what_is_freed`. Memory that ranks share counts once a host: each rank counts its share, the mapped bytes
divided by the number of ranks. Where the kernel does not tell (not Linux), figures are ``nan``.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from fullshard.buffer import heap

_SELF = Path("/proc/self")


def return_what_is_freed() -> None:
    """From now on each allocation of 64 KiB and more is a mapping of its own, which ends when it is freed."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**16)  # or the library under test would choose its own
    heap.set_option(heap.MMAP_THRESHOLD, 2**16)


def settle() -> None:
    """Free what nobody holds, and wait until the other ranks have."""
    gc.collect()
    heap.return_freed()
    dist.barrier()


def bytes_now() -> float:
    """Bytes that this process occupies, less files, plus its share of shared mappings."""
    return _status("RssAnon") + _shared_bytes()


def page_tables() -> float:
    """Bytes of the kernel's tables of this process's pages."""
    return _status("VmPTE")


def bytes_allocated() -> float:
    """Bytes that were asked of ``malloc`` and not given back, touched or not, plus the share of shared mappings."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return math.nan
    mallinfo.restype = heap.MallInfo
    info = mallinfo()
    return int(info.uordblks) + int(info.hblkhd) + _shared_bytes()


class Peak:
    """Measures the largest number of bytes occupied while it is entered.

    Args:
        each_touches_its_own: what ranks share counts as the pages that this rank has touched. That is its share, at the
            time, while every rank writes its own part; otherwise the share of all is added to the peak of the rest.

    Attributes:
        bytes: comparable with :func:`bytes_now`.
    """

    bytes: float = math.nan

    def __init__(self, each_touches_its_own: bool = False) -> None:
        self._each_touches_its_own = each_touches_its_own

    def __enter__(self) -> Peak:
        try:
            (_SELF / "clear_refs").write_text("5")  # the peak begins anew
        except OSError:
            self._before = dict.fromkeys(("RssAnon", "VmRSS", "RssShmem", "RssFile"), math.nan)
        else:
            self._before = {field: _status(field) for field in ("RssAnon", "VmRSS", "RssShmem", "RssFile")}
        self._shared_before = _shared_bytes()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        grown = _status("VmHWM") - self._before["VmRSS"]
        fields = ("RssFile",) if self._each_touches_its_own else ("RssShmem", "RssFile")
        for field in fields:  # pages that others hold too and that this process has now seen
            grown -= max(0.0, _status(field) - self._before[field])
        shared = self._shared_before if self._each_touches_its_own else _shared_bytes()
        self.bytes = self._before["RssAnon"] + max(0.0, grown) + shared


def _shared_bytes() -> float:
    """This rank's share of what it has mapped together with others; a file that is mapped twice counts once."""
    maps = _SELF / "maps"
    sizes: dict[str, int] = {}
    for line in maps.read_text().splitlines() if maps.exists() else ():
        place, permissions, offset, device, inode = line.split()[:5]
        if permissions.endswith("s"):
            begin, end = (int(edge, 16) for edge in place.split("-"))
            key = f"{device} {inode} {offset}"
            sizes[key] = max(sizes.get(key, 0), end - begin)
    return sum(sizes.values()) / dist.get_world_size()


def _status(field: str) -> float:
    status = _SELF / "status"
    lines = status.read_text().splitlines() if status.exists() else []
    return next((float(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), math.nan)
