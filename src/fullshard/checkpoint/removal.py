"""Chooses the old checkpoints that a save removes."""

from __future__ import annotations

from collections.abc import Iterator

from fullshard.checkpoint.blocks import CorruptCheckpointError
from fullshard.checkpoint.manifest import Location, number_of
from fullshard.checkpoint.reader import Checkpoint
from fullshard.checkpoint.storage import storage_of
from fullshard.policies import warn


def remove_older(directory: Location, name: str, keep: int, replicas: bool = False) -> None:
    """Removes checkpoints that are whole, older than the one with this ``name``, and not among the ``keep`` newest.

    Replicas take memory. So with ``replicas``, it also removes replicas with higher numbers, which training has gone
    back from, and those that are not whole.
    """
    storage, made = storage_of(directory), number_of(name) or (0, 0)
    paths = storage.list()
    newer = [path for path in paths if (number_of(path.name) or made) > made]
    older = paths[len(newer) :]  # the checkpoint itself first, unless another job has removed it
    for path in [*newer, *older[keep:]] if replicas else _whole(older, keep):
        try:
            storage.remove(path)
        except FileNotFoundError:
            pass  # another job removes it too
        except OSError as error:
            warn(f"{path} could not be removed: {error.strerror}")


def _whole(paths: list[Location], skip: int) -> Iterator[Location]:
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
