"""The save that is written in the background: its thread, the memory it is written from, and its result."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable

import torch

from fullshard.checkpoint.blocks import CheckpointError
from fullshard.checkpoint.manifest import Location
from fullshard.watch.watch import waiting_for_thread


class Background:
    """The one save that is written in the background, and the memory it is written from."""

    _thread: threading.Thread | None = None
    _path: Location | None = None
    _error: BaseException | None = None
    _arena = torch.empty(0, dtype=torch.uint8)

    @classmethod
    def start(cls, write: Callable[[], Location | None]) -> None:
        def run() -> None:
            try:
                cls._path = write()
            except BaseException as error:
                cls._error = error

        cls._thread = threading.Thread(target=run, name="fullshard.checkpoint.save")
        cls._thread.start()

    @classmethod
    def wait_until_finished(cls) -> Location | None:
        thread, cls._thread = cls._thread, None
        if thread is not None:
            with waiting_for_thread(thread):
                thread.join()
        (path, cls._path), (error, cls._error) = (cls._path, None), (cls._error, None)
        if error is not None:
            raise CheckpointError(f"the last save, in the background, failed: {error}") from error
        return path

    @classmethod
    def memory(cls, nbytes: int, pin: bool) -> torch.Tensor:
        """Host memory that is reused by each save, so that its pages exist already."""
        if cls._arena.numel() < nbytes or cls._arena.is_pinned() != pin:
            cls._arena = torch.empty(0, dtype=torch.uint8)
            cls._arena = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin)
        return cls._arena

    @classmethod
    def give_memory_back(cls) -> None:
        if cls._arena.is_pinned():
            cls._arena = torch.empty(0, dtype=torch.uint8)
            torch.accelerator.empty_host_cache()  # torch caches pinned memory there
        cls._arena = torch.empty(0, dtype=torch.uint8)


def wait_until_finished() -> Location | None:
    """Waits for the save in the background, if there is one, and returns its directory. It also frees the memory from
    which saves are written, which they otherwise keep for the next save.

    Raises:
        CheckpointError: the save failed.

    Ranks: each for itself.
    """
    try:
        return Background.wait_until_finished()
    finally:
        Background.give_memory_back()


@atexit.register
def _report() -> None:
    """Reports a failed save when the program ends, if no other call has raised its error."""
    try:
        Background.wait_until_finished()
    except CheckpointError as error:
        sys.excepthook(type(error), error, error.__traceback__)
