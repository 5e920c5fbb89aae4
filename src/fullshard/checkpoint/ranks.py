"""The communication of ranks in a save or a load. A failure on one rank is reported to all, so that none waits for
it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fullshard.checkpoint.blocks import CheckpointError, CorruptCheckpointError
from fullshard.comm.process_group import all_reduce, broadcast_object, gather_objects, gather_to_first
from fullshard.comm.waits import PeerFailureError, waiting
from fullshard.platforms import after_fork

_Result = TypeVar("_Result")

#: In a forked process, the process group that its parent had. Threads do its work, and they are in the parent only.
_PARENT = dict[str, object]()


def _note_group() -> None:
    if dist.is_initialized():
        _PARENT["group"] = dist.group.WORLD


after_fork(_note_group)


class PeerFailure(CheckpointError, PeerFailureError):
    """Another rank is lost: the remaining ranks cannot communicate any more."""


class Ranks:
    """The ranks of a process group, by default all ranks. Without a process group it is this process alone."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.group: dist.ProcessGroup | None = None  # a group that can send CPU tensors
        self.rank, self.size = 0, 1
        if dist.is_initialized():
            if dist.group.WORLD is _PARENT.get("group"):
                raise CheckpointError(
                    f"process {os.getpid()} was forked from a rank, and cannot communicate as that rank does: save and "
                    "load in the rank itself, or in a process that is started with 'spawn'"
                )
            self.group = process_group or dist.group.WORLD
            self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
            if "cpu:gloo" not in dist.get_backend_config(self.group):
                self.group = _gloo_beside(self.group)

    def communicate_in_background(self) -> None:
        """Uses another group from now on, because a save in the background communicates while training, other saves and
        :class:`PreemptionHandler` do. All ranks must call it."""
        if self.group is not None:
            self.group = _gloo_beside(self.group)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def gather(self, mine: Any) -> list[Any]:
        """The objects of all ranks, in the order of the ranks."""
        if self.group is None:
            return [mine]
        try:
            return gather_objects(mine, self.group)
        except RuntimeError as error:
            raise self.lost(error) from error

    def gather_to_first(self, mine: Any) -> list[Any]:
        """The objects of all ranks, on the first rank only. The objects may be large."""
        if self.group is None:
            return [mine]
        try:
            return gather_to_first(mine, self.group, "each rank's message to the first about a checkpoint")
        except RuntimeError as error:
            raise self.lost(error) from error

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The object of one rank, on all ranks."""
        if self.group is None:
            return value
        try:
            return broadcast_object(value, self.group, source)
        except RuntimeError as error:
            raise self.lost(error) from error

    def any(self, mine: bool) -> bool:
        """Whether it is true on any rank."""
        if self.group is None:
            return mine
        own = torch.tensor(int(mine))
        try:
            all_reduce(own, self.group, "a question to all ranks", dist.ReduceOp.MAX)
        except RuntimeError as error:
            raise self.lost(error) from error
        return bool(own)

    def lost(self, error: RuntimeError) -> PeerFailure:
        """The exception to raise after an ``error`` of a collective, which does not say that a rank was lost."""
        return PeerFailure(
            f"rank {self.rank} lost its connection to another rank while it saved or loaded a checkpoint: find "
            f"the first error in other ranks' logs; checkpoints that existed before are whole ({error})"
        )

    def attempt(self, call: Callable[[], _Result]) -> tuple[_Result, list[Any]]:
        """Makes a call that may fail, on every rank. Returns this rank's result, and a list with the last item of each
        rank's result if the results are tuples.

        Raises:
            CorruptCheckpointError: on all ranks, if the call raised it on some rank, and no other error on any rank.
            CheckpointError: on all ranks, if it failed on some rank with another error.
        """
        result: Any = None
        error: Exception | None = None
        try:
            result = call()
        except Exception as raised:
            error = raised
        own = result[-1] if isinstance(result, tuple) else None
        everyone = self.gather((_described(error), type(error) is CorruptCheckpointError, own))
        failed = {
            f"rank {rank}: {text}" if self.size > 1 else text: broken
            for rank, (text, broken, _) in enumerate(everyone)
            if text
        }
        if failed:
            kind = CorruptCheckpointError if all(failed.values()) else CheckpointError
            raise kind("; ".join(failed)) from error
        return result, [each for _, _, each in everyone]


def _described(error: Exception | None) -> str:
    if error is None or isinstance(error, CheckpointError):
        return "" if error is None else str(error)
    return f"{type(error).__name__}: {error}"


@lru_cache(maxsize=16)
def _gloo_beside(process_group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A gloo group of the same ranks, which can send CPU tensors. It is cached, and lives as long as the cache."""
    ranks = dist.get_process_group_ranks(process_group)
    with waiting("a process group to be made", process_group):
        return dist.new_group(ranks, backend="gloo", use_local_synchronization=True, group_desc="fullshard")
