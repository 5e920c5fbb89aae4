"""How much freed memory the C library keeps for the next step.

Autograd allocates every gradient, and frees it as soon as it was taken; reduced gradients live from backward to
``zero_grad()``. glibc returns large pieces to the system at once, and the top of its heap beyond a threshold, and the
system clears each page again when it is touched in the next step: a fifth of the processor time of a step that moves
much. Owns the two thresholds. Both are documented settings of ``mallopt(3)``.
"""

from __future__ import annotations

import ctypes
import os

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
#: The largest that glibc takes on 64 bits; larger pieces always come from the system.
_LARGEST_PIECE = 32 * 2**20
_LARGEST_INT = 2**31 - 1
#: With any of these the user has decided.
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")

#: What it was told to keep, in bytes.
kept = 0


def keep_freed(nbytes: int) -> None:
    """Let the heap keep ``nbytes`` of freed memory, where the C library is glibc and the user has not decided."""
    global kept
    nbytes = min(nbytes, _LARGEST_INT)
    if nbytes <= kept or any(name in os.environ for name in _SETTINGS):
        return
    if set_option(MMAP_THRESHOLD, _LARGEST_PIECE) and set_option(TRIM_THRESHOLD, nbytes):
        kept = nbytes


def return_freed() -> None:
    """Give what the heap keeps back to the system: ``malloc_trim(3)``, where the C library has it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def set_option(option: int, value: int) -> bool:
    """``mallopt(3)``; returns whether the C library has it and took the value."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    return mallopt is not None and bool(mallopt(option, value))
