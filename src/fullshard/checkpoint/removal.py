"""Removes checkpoints that no policy keeps, and none that is not whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import takewhile

from fullshard.checkpoint.blocks import CheckpointError, CorruptCheckpointError
from fullshard.checkpoint.keep import CheckpointInfo, PreservationPolicy
from fullshard.checkpoint.manifest import Location, number_of
from fullshard.checkpoint.reader import Checkpoint
from fullshard.checkpoint.replicas import mark_at
from fullshard.checkpoint.storage import storage_of
from fullshard.policies import warn

#: The directories for which this process has warned that an older step was saved.
_WARNED = set[str]()


def remove_older(directory: Location, name: str, keep: Sequence[PreservationPolicy], replicas: bool = False) -> None:
    """Removes checkpoints that are whole, older than the one with this ``name``, and kept by no policy. Without
    policies, all stay.

    It warns once per directory if a checkpoint of a higher step remains, because a resumed run would load that.

    Replicas take memory. So with ``replicas``, it also removes replicas with higher numbers, which training has gone
    back from, and those whose manifest cannot be read, unless it is not ours.

    What fails here is a warning, because the new checkpoint is already whole.
    """
    storage, made = storage_of(directory), number_of(name) or (0, 0)
    try:
        newer = [*takewhile(lambda path: (number_of(path.name) or made) > made, storage.newest_first())]
        if not replicas:
            _warn_of_newer(directory, made[0], newer)
        if not keep:
            return
        older = storage.list()[len(newer) :]
        reasons = reasons_to_stay(older, keep, whole=not replicas)
    except Exception as error:  # also of a user's policy
        warn(f"no checkpoint in {directory} was removed: {_text(error)}")
        return
    for path in [*newer, *older] if replicas else reasons:
        if reasons.get(path) or path.name == name or (replicas and not mark_at(path)):
            continue
        try:
            storage.remove(path)
        except FileNotFoundError:
            pass  # another job removes it too
        except (OSError, CheckpointError) as error:
            warn(f"{path} could not be removed: {_text(error)}")


def reasons_to_stay(
    paths: Sequence[Location], keep: Sequence[PreservationPolicy], whole: bool = True
) -> dict[Location, list[str]]:
    """What keeps each checkpoint: policies, and that it is the newest. ``paths`` are ordered from the newest on.

    The result lacks checkpoints that are not whole; with ``whole=False``, only those whose manifest cannot be read.
    """

    def described(path: Location) -> CheckpointInfo | None:
        with suppress(CorruptCheckpointError), Checkpoint(path, whole=whole) as saved:
            return CheckpointInfo(saved.manifest.step, saved.manifest.time, saved.manifest.metrics)
        return None

    with ThreadPoolExecutor(8) as threads:  # each waits for several answers of a store
        infos = zip(paths, threads.map(described, paths), strict=True)
        found = {path: info for path, info in infos if info is not None}
    reasons = {path: [] if number else ["newest"] for number, path in enumerate(found)}
    for policy in keep:
        stay = [*policy.should_preserve([*found.values()])]
        if len(stay) != len(found):
            raise ValueError(f"{policy} returned {len(stay)} values for {len(found)} checkpoints")
        for stays, each in zip(stay, reasons.values(), strict=True):
            each += [str(policy)] if stays else []
    return reasons


def _warn_of_newer(directory: Location, step: int, newer: Iterable[Location]) -> None:
    if f"{directory}" in _WARNED:
        return
    for path in newer:
        with suppress(CorruptCheckpointError), Checkpoint(path) as saved:
            if saved.manifest.step > step:
                _WARNED.add(f"{directory}")
                warn(
                    f"step {step} is saved, but {directory} has step {saved.manifest.step}, which a resumed run would "
                    "load"
                )
            return  # a load takes the newest that is whole


def _text(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or f"{error}" or type(error).__name__
