"""What this process holds of the system: shared memory and files."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path

_PROCESS = "anon_inode:[pidfd]"


def mappings() -> int:
    """How many shared segments are mapped."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:fullshard")


def open_files() -> int:
    """How many files are open, without those that a watch opens and closes in a time of its own: connections, the
    processes that it watches (:func:`watched_processes`), and what it reads of ``/proc``.
    """
    return sum(not name.startswith(("socket:", "/proc/")) and name != _PROCESS for name in _names())


def watched_processes() -> int:
    """How many processes are held open."""
    return _names().count(_PROCESS)


def _names() -> list[str]:
    names = []
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing of the folder itself
            names.append(os.readlink(file))
    return names
