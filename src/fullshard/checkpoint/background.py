"""The saves that are written in the background: their threads, the memory they are written from, and their results."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  (what is registered first for the end of a program runs last)
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import ClassVar

import torch

from fullshard.checkpoint.blocks import CheckpointError
from fullshard.checkpoint.manifest import Location
from fullshard.checkpoint.ranks import PeerFailure
from fullshard.platforms import after_fork
from fullshard.watch.watch import waiting_for_thread

#: The memory of a save that needs none.
NO_MEMORY = torch.empty(0, dtype=torch.uint8)


class _Save:
    """One save. Its thread writes it after the thread of the save ``before`` has ended."""

    path: Location | None = None
    error: BaseException | None = None

    def __init__(
        self, write: Callable[[], Location | None], step: int | None, memory: torch.Tensor, before: _Save | None
    ) -> None:
        self.name, self.memory = "a save" if step is None else f"the save of step {step}", memory
        self.thread = threading.Thread(target=self._run, args=(write, before), name="fullshard.checkpoint.save")
        self.thread.start()

    def _run(self, write: Callable[[], Location | None], before: _Save | None) -> None:
        try:
            if before is not None:
                before.thread.join()
                if isinstance(before.error, PeerFailure) or not isinstance(before.error, CheckpointError | None):
                    raise PeerFailure(
                        f"{before.name} failed, and since then ranks cannot communicate about checkpoints"
                    )
            self.path = write()
        except BaseException as error:
            self.error = error

    def wait(self) -> None:
        with waiting_for_thread(self.thread):
            self.thread.join()


class Background:
    """The saves in the background, and the memory they are written from.

    All ranks start them in the same order, and each rank writes one at a time. So a rank may wait here for its oldest
    save while other ranks train: their threads do not wait for this rank's training.
    """

    _saves: ClassVar[list[_Save]] = []  # those under way and those that failed, the oldest first
    _spare: ClassVar[list[torch.Tensor]] = []  # memory for later saves

    @classmethod
    def start(cls, write: Callable[[], Location | None], step: int | None, memory: torch.Tensor) -> None:
        cls._saves.append(_Save(write, step, memory, cls._saves[-1] if cls._saves else None))

    @classmethod
    def has_failed(cls) -> bool:
        """Whether a save has failed. Ranks may find it out at different times."""
        return any(each.error is not None for each in cls._saves)

    @classmethod
    def wait_until_finished(cls) -> Location | None:
        for each in cls._saves:
            each.wait()
        ended, cls._saves = cls._saves, []
        cls._spare += [each.memory for each in ended]
        failed = [each for each in ended if each.error is not None]
        if failed:
            texts = [f"{each.name}, in the background, failed: {each.error}" for each in failed]
            raise CheckpointError("; ".join(texts)) from failed[0].error
        return ended[-1].path if ended else None

    @classmethod
    def memory(cls, nbytes: int, pin: bool, budget: int) -> torch.Tensor:
        """Host memory for the copy of a save. It waits until all copies fit into ``budget`` bytes, or until no older
        save is left. Memory of saves that have ended is used again, because its pages exist already."""
        for oldest in [*cls._saves]:
            if cls._bytes_under_way() + nbytes <= budget:
                break
            oldest.wait()
        ended = [each for each in cls._saves if not each.thread.is_alive()]
        for each in ended:
            cls._spare.append(each.memory)
            each.memory = NO_MEMORY
        cls._saves = [each for each in cls._saves if each not in ended or each.error is not None]
        taken = cls._bytes_under_way()
        usable = [
            each
            for each in cls._spare
            if each.numel() >= nbytes and each.is_pinned() == pin and (not taken or taken + each.numel() <= budget)
        ]
        found = min(usable, key=torch.Tensor.numel, default=None)
        cls._spare = [each for each in cls._spare if each is not found]
        size = nbytes if found is None else found.numel()
        if taken + size + sum(each.numel() for each in cls._spare) > budget:
            cls._spare.clear()
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin) if found is None else found

    @classmethod
    def _bytes_under_way(cls) -> int:
        return sum(each.memory.numel() for each in cls._saves if each.thread.is_alive())

    @classmethod
    def give_memory_back(cls) -> None:
        pinned = any(each.is_pinned() for each in cls._spare)
        cls._spare.clear()
        if pinned:
            torch.accelerator.empty_host_cache()  # torch caches pinned memory there


def wait_until_finished() -> Location | None:
    """Waits for all saves in the background, and returns the directory of the last one; ``None`` if there is none. It
    also frees the memory from which saves are written, which they otherwise keep for the next save.

    Raises:
        CheckpointError: a save failed.

    Ranks: each for itself.
    """
    try:
        return Background.wait_until_finished()
    finally:
        Background.give_memory_back()


def _report() -> None:
    """Reports a failed save when the program ends, if no other call has raised its error. The program then ends with
    the status 1."""
    try:
        Background.wait_until_finished()
    except CheckpointError as error:
        sys.excepthook(type(error), error, error.__traceback__)
        atexit.register(_end)  # what is registered last runs first


def _end() -> None:
    """Ends the program with the status 1, after all else that runs at its end: Python would end it with 0."""
    atexit.unregister(_end)
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            file.flush()
    os._exit(1)


def _forget_parent() -> None:
    """Forgets the saves that only the parent of a forked process writes."""
    Background._saves = []


after_fork(_forget_parent)

# ``atexit`` would be too late: by then the pools of ``concurrent.futures``, which write to stores, refuse work.
threading._register_atexit(_report)  # type: ignore[attr-defined]
