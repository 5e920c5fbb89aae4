"""What the library uses of an operating system, looked up by feature, with what takes its place on a system without it.

Linux has all of it; macOS and Windows lack parts. Calls that every system has are used where they are needed. Owns the
identity of this host, too. Nothing here knows what it is used for.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import os
import select
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _loaded_library() -> Any:
    try:
        return ctypes.CDLL(None, use_errno=True)
    except (OSError, TypeError):
        return None


#: The C library; ``None`` where this process does not show its own symbols. Whether a function is there: ``hasattr``.
libc: Any = _loaded_library()
#: ``os``, for calls of Linux that were looked for before: its types know only those of the system that they check.
linux: Any = os
resource: Any = _module("resource")
_fcntl: Any = _module("fcntl")
_seeking = threading.Lock()  # where reads and writes use the one position of a file


def after_fork(in_child: Callable[[], object], before: Callable[[], object] = lambda: None) -> None:
    """Calls functions around each fork. Nothing is to be done on systems that do not fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=before, after_in_child=in_child)


def open_flags(*names: str) -> int:
    """Those flags of ``os.open`` that the system has, and the one without which Windows changes the ends of lines."""
    flags = 0
    for name in (*names, "O_BINARY"):
        flags |= getattr(os, name, 0)
    return flags


def open_directory(path: Path) -> int | None:
    """Opens a directory; ``None`` where only files can be opened. Raises OSError."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY) if hasattr(os, "O_DIRECTORY") else None


def read_at(file: int, block: memoryview, start: int) -> int:
    """Fills ``block`` with the bytes of a file from ``start`` on, and returns how many were read: fewer at its end."""
    if hasattr(os, "preadv"):
        return os.preadv(file, [block], start)
    with _seeking:
        os.lseek(file, start, os.SEEK_SET)
        data = os.read(file, len(block))
    block[: len(data)] = data
    return len(data)


def write_at(file: int, block: memoryview, start: int) -> int:
    """Writes ``block`` to a file from ``start`` on, and returns how many bytes were written."""
    if hasattr(os, "pwritev"):
        return os.pwritev(file, [block], start)
    with _seeking:
        os.lseek(file, start, os.SEEK_SET)
        return os.write(file, block)


def reserve_space(file: int, start: int, nbytes: int) -> bool:
    """Reserves space on the disk for a part of a file; without it, a full disk is noticed by a later write. Returns
    whether the system and the file system can do that. Raises OSError: the disk is full."""
    if not hasattr(os, "posix_fallocate"):
        return False
    try:
        os.posix_fallocate(file, start, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        return False
    return True


def force(file: int) -> None:
    """Forces a file to the disk. macOS needs a call of its own, without which the disk may still keep it in memory."""
    if hasattr(_fcntl, "F_FULLFSYNC"):
        with suppress(OSError):  # not every file system knows it
            _fcntl.fcntl(file, _fcntl.F_FULLFSYNC)
            return
    os.fsync(file)


def lock(file: int, shared: bool = False) -> None:
    """Locks an open file or directory until it is closed or this process ends. A shared lock is waited for.

    Raises:
        BlockingIOError: another process has locked it.
        OSError: the system, or the file system, has no locks.
    """
    if _fcntl is None:
        raise OSError(errno.ENOTSUP, "this system has no flock")
    _fcntl.flock(file, _fcntl.LOCK_SH if shared else _fcntl.LOCK_EX | _fcntl.LOCK_NB)


def has_locks() -> bool:
    """Whether the system has the locks of :func:`lock`."""
    return _fcntl is not None


def watched(process: int) -> int:
    """Opens a process of this host as a file that is :func:`ready` once the process has ended. Raises
    ProcessLookupError if it has, and OSError if the system cannot watch it."""
    if not hasattr(os, "pidfd_open"):
        raise OSError(errno.ENOSYS, "this system has no pidfd_open")
    return os.pidfd_open(process)


def ready(files: Iterable[int], event: str = "POLLIN") -> list[int]:
    """The open files that have come to an event of ``select.poll``, or to an error. None where the system lacks it."""
    if not hasattr(select, "poll"):
        return []
    poll = select.poll()
    for file in files:
        poll.register(file, getattr(select, event, 0))
    return [file for file, _ in poll.poll(0)]


def peak_memory() -> int:
    """The largest resident memory of this process so far, in bytes; 0 if the system does not say."""
    if resource is None:
        return 0
    highest = int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return highest if sys.platform == "darwin" else 1024 * highest  # nothing else tells the unit


def boot_id() -> str:
    """Differs between hosts, and between starts of a host; empty if the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
    except OSError:
        return ""


#: Part of this host's identity: tests let ranks of one machine believe that they are on several.
pretended_host = ""


def host_id() -> str:
    """Identifies the host: equal for processes of one boot, in one space of process numbers. Where the system does not
    say, it is different for each process."""
    with suppress(OSError):
        if boot := boot_id():
            return boot + os.readlink("/proc/self/ns/pid") + pretended_host
    return f"unknown to process {os.getpid()}"
