"""How much freed memory the C library keeps for the next step.

Autograd allocates every gradient, and frees it as soon as it was taken. glibc returns large pieces to the system at
once, and the top of its heap beyond a threshold, and the system clears each page again when it is touched in the next
step: a fifth of the processor time of a step that moves much. Owns the two thresholds (of ``mallopt(3)``) while there
are trees of modules that need other ones. Where memory is scarce, what the heap keeps in holes is measured and bounded.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import weakref
from pathlib import Path

from fullshard.platforms import libc as _libc

_STATUS = Path("/proc/self/statm")
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
#: The largest mmap threshold of glibc on 64 bits: larger pieces always come from the system. By default, glibc raises
#: its threshold up to this when a program frees such pieces, and the trim threshold to twice as much. Once a threshold
#: is set, glibc no longer does so. So lower ones are never set again: each tensor would then come from the system.
_LARGEST_PIECE = 32 * 2**20
KEPT_BY_ITSELF = 2 * _LARGEST_PIECE
SMALL_PIECE = 2**17  # the mmap threshold of a program that has not freed any larger piece
#: With any of these the user has chosen thresholds.
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")

kept = 0  # the bytes that the heap was told to keep; 0 while no tree asks for it
_asked: dict[int, int] = {}
_is_over = False
_returns_at_once = False
_beside: int | None = None  # resident bytes outside of allocations, after the last return; ``None``: no bound yet


def keep_freed(owner: object, nbytes: int) -> None:
    """Let the heap, if it is glibc's and the user has not decided, keep so much freed memory while ``owner`` lives."""
    if _returns_at_once or _user_decides() or not set_option(MMAP_THRESHOLD, _LARGEST_PIECE):
        return
    weakref.finalize(owner, _forget_owner, id(owner)).atexit = False
    _asked[id(owner)] = min(nbytes, 2**31 - 1)
    _set_threshold()


def return_at_once() -> None:
    """From now on the heap, if it is glibc's and the user has not decided, keeps nearly nothing that was freed: for a
    model that needs most of a given memory, and that has freed its whole parameters."""
    global _returns_at_once
    if not _user_decides() and set_option(MMAP_THRESHOLD, SMALL_PIECE):
        _returns_at_once = set_option(TRIM_THRESHOLD, SMALL_PIECE)
        return_freed()
        if hasattr(_libc, "mallinfo2"):
            _fill_holes()


def _fill_holes() -> None:
    """Allocate the free pieces of the heap, without touching them, and never free them. Otherwise tensors would use the
    free memory between other pieces, and the heap could not return it to the system when they are freed."""
    _libc.mallinfo2.restype, _libc.malloc.restype = MallInfo, ctypes.c_void_p
    nbytes = 1 << _libc.mallinfo2().fordblks.bit_length()
    while nbytes >= SMALL_PIECE:
        mapped = _libc.mallinfo2().hblks
        piece = ctypes.c_void_p(_libc.malloc(ctypes.c_size_t(nbytes)))
        if not piece or _libc.mallinfo2().hblks > mapped:  # no hole is as large
            _libc.free(piece)
            nbytes //= 2


def bound_freed(nbytes: int) -> None:
    """Let the heap, if it is glibc's and the user has not decided, keep about ``nbytes`` of freed memory: for models
    that do not fit into memory. Called often, as freed pieces between others in use are returned only here."""
    global _beside
    if _user_decides() or not hasattr(_libc, "mallinfo2"):
        return
    if _beside is None:
        if not _STATUS.exists():
            return
        set_option(MMAP_THRESHOLD, _LARGEST_PIECE)
        set_option(TRIM_THRESHOLD, nbytes)
        _libc.mallinfo2.restype, _beside = MallInfo, 0
    if _beside_allocated() > _beside + nbytes:
        return_freed()
        _beside = _beside_allocated()


def _beside_allocated() -> int:
    """Resident bytes that are neither allocated nor shared: freed memory, and what is not of the heap."""
    _, resident, shared, *_ = _STATUS.read_text(encoding="utf-8").split()
    info = _libc.mallinfo2()
    return (int(resident) - int(shared)) * mmap.PAGESIZE - info.uordblks - info.hblkhd


class MallInfo(ctypes.Structure):
    """What ``mallinfo2(3)`` returns."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def _user_decides() -> bool:
    return any(name in os.environ for name in _SETTINGS)


def _forget_owner(owner: int) -> None:
    global _is_over
    _asked.pop(owner, None)
    _set_threshold()
    if not _asked:  # the memory of the last tree is freed after this, as a rule when cycles are collected
        _is_over = True
        if _after_collection not in gc.callbacks:
            gc.callbacks.append(_after_collection)


def _after_collection(phase: str, info: object) -> None:
    global _is_over
    if _is_over and phase == "stop":
        _is_over = False
        return_freed()


def _set_threshold() -> None:
    global kept
    wanted = max(_asked.values(), default=0)
    if wanted != kept and not _returns_at_once and set_option(TRIM_THRESHOLD, max(wanted, KEPT_BY_ITSELF)):
        kept = wanted


def return_freed() -> None:
    """Give what the heap keeps back to the system: ``malloc_trim(3)``, where the C library has it."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def set_option(option: int, value: int) -> bool:
    """``mallopt(3)``; returns whether the C library has it and took the value."""
    return hasattr(_libc, "mallopt") and bool(_libc.mallopt(option, value))
