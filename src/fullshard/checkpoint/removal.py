"""Removes old checkpoints, and the leftovers of processes that ended in the middle of a save.

Owns the locks that protect from removal: readers share a lock of the manifest, and a save locks its directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from fullshard.checkpoint.blocks import CorruptCheckpointError
from fullshard.checkpoint.manifest import MANIFEST, number_of
from fullshard.checkpoint.reader import Checkpoint, list_checkpoints
from fullshard.policies import warn


def remove_older(directory: Path, name: str, keep: int, replicas: bool = False) -> None:
    """Removes checkpoints that are whole, older than the one with this ``name``, and not among the ``keep`` newest.

    Replicas take memory. So with ``replicas``, it also removes replicas with higher numbers, which training has gone
    back from, and those that are not whole.
    """
    paths, made = list_checkpoints(directory), number_of(name) or (0, 0)
    newer = [path for path in paths if (number_of(path.name) or made) > made]
    older = paths[len(newer) :]  # the checkpoint itself first, unless another job has removed it
    for path in [*newer, *older[keep:]] if replicas else _whole(older, keep):
        try:
            if not path.is_symlink():
                _remove(path)
        except FileNotFoundError:
            pass  # another job removes it too
        except OSError as error:
            warn(f"{path} could not be removed: {error.strerror}")


def _remove(path: Path) -> None:
    """Removes a checkpoint, unless somebody reads it. A later save then removes it."""
    hidden = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.removed"
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(OSError):  # there is no manifest, or there are no locks
            lock = os.open(path / MANIFEST, os.O_RDWR | os.O_CLOEXEC)  # NFS needs write access for locks
            opened.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
        path.rename(hidden)  # so that nobody sees a part of it
    shutil.rmtree(hidden)


def _whole(paths: list[Path], skip: int) -> Iterator[Path]:
    """The paths of whole checkpoints, without the first ``skip`` of them."""
    for path in paths:
        try:
            Checkpoint(path).close()
        except CorruptCheckpointError:
            continue
        if skip > 0:
            skip -= 1
        else:
            yield path


def remove_leftovers(directory: Path) -> None:
    """Removes directories of processes that ended in the middle of a save."""
    for path in [*directory.glob(".step-*.partial"), *directory.glob(".step-*.removed")]:
        try:
            opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except OSError:
            pass  # somebody writes to it
        finally:
            os.close(opened)
