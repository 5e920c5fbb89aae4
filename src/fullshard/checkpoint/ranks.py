"""What the ranks of a save or a load tell one another: failures above all, so that none waits for another in vain."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fullshard.checkpoint.blocks import BrokenCheckpoint, CheckpointError
from fullshard.comm.process_group import broadcast_object, decoded, encoded, gather_objects
from fullshard.comm.waits import LostRankError, waiting

_Result = TypeVar("_Result")


class LostRank(CheckpointError, LostRankError):
    """Another rank is gone: the ranks that are left can no longer agree on anything."""


class Ranks:
    """The ranks of a process group, by default all, or this process alone where there is none. Those of the background
    communicate beside training, and so by a group of their own, which every rank must make."""

    def __init__(self, process_group: dist.ProcessGroup | None, background: bool = False) -> None:
        self.group: dist.ProcessGroup | None = None  # that moves what is on the CPU
        self.rank, self.size = 0, 1
        if dist.is_initialized():
            self.group = process_group or dist.group.WORLD
            self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
            if background or "cpu:gloo" not in dist.get_backend_config(self.group):
                self.group = _gloo_beside(self.group)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def gather(self, mine: Any) -> list[Any]:
        """An object of each rank, in their order."""
        if self.group is None:
            return [mine]
        try:
            return gather_objects(mine, self.group)
        except RuntimeError as error:
            raise self.lost(error) from error

    def gather_to_first(self, mine: Any) -> list[Any]:
        """The same, on the first rank alone: what each has may be large."""
        if self.group is None:
            return [mine]
        data = encoded(mine, self.group)
        lengths = self.gather(data.numel())
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: data.numel()] = data
        every = [torch.empty_like(padded) for _ in lengths] if self.first else None
        try:
            with waiting("what each rank tells the first one of a checkpoint", self.group):
                dist.gather(padded, every, group=self.group, group_dst=0)
        except RuntimeError as error:
            raise self.lost(error) from error
        return [decoded(each[:length]) for each, length in zip(every or (), lengths, strict=False)]

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The object of one rank, on all."""
        if self.group is None:
            return value
        try:
            return broadcast_object(value, self.group, source)
        except RuntimeError as error:
            raise self.lost(error) from error

    def any(self, mine: bool) -> bool:
        """Whether it is so on any rank."""
        if self.group is None:
            return mine
        told = torch.tensor(int(mine))
        try:
            with waiting("a question to all ranks", self.group):
                dist.all_reduce(told, dist.ReduceOp.MAX, group=self.group)
        except RuntimeError as error:
            raise self.lost(error) from error
        return bool(told)

    def lost(self, error: RuntimeError) -> LostRank:
        """What to raise from the ``error`` of a collective: backends do not say what that means."""
        return LostRank(
            f"rank {self.rank} lost another rank while it saved or loaded a checkpoint: look on the others for the "
            f"first error; checkpoints that were there already are whole ({error})"
        )

    def attempt(self, call: Callable[[], _Result]) -> tuple[_Result, list[Any]]:
        """Calls on every rank; returns its result, and the last item of each rank's result, if these are tuples.

        Raises:
            BrokenCheckpoint: on all ranks, if the call raised it on one and nothing else on any.
            CheckpointError: on all ranks, if it failed on one.
        """
        result: Any = None
        error: Exception | None = None
        try:
            result = call()
        except Exception as raised:
            error = raised
        told = result[-1] if isinstance(result, tuple) else None
        everyone = self.gather((_described(error), type(error) is BrokenCheckpoint, told))
        failed = {
            f"rank {rank}: {text}" if self.size > 1 else text: broken
            for rank, (text, broken, _) in enumerate(everyone)
            if text
        }
        if failed:
            kind = BrokenCheckpoint if all(failed.values()) else CheckpointError
            raise kind("; ".join(failed)) from error
        return result, [each for _, _, each in everyone]


def _described(error: Exception | None) -> str:
    if error is None or isinstance(error, CheckpointError):
        return "" if error is None else str(error)
    return f"{type(error).__name__}: {error}"


@lru_cache(maxsize=16)
def _gloo_beside(process_group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks that moves what is on the CPU. Kept as long as the one that it stands beside."""
    ranks = dist.get_process_group_ranks(process_group)
    with waiting("a process group to be made", process_group):
        return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
