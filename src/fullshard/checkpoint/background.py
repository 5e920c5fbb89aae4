"""The save that is written beside training: its thread, the memory that it is written from, and what became of it."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from fullshard.checkpoint.blocks import CheckpointError
from fullshard.watch.watch import joining


class Background:
    """The one save that is written beside training, and the memory that it is written from."""

    _thread: threading.Thread | None = None
    _path: Path | None = None
    _error: BaseException | None = None
    _arena = torch.empty(0, dtype=torch.uint8)

    @classmethod
    def start(cls, write: Callable[[], Path | None]) -> None:
        def run() -> None:
            try:
                cls._path = write()
            except BaseException as error:
                cls._error = error

        cls._thread = threading.Thread(target=run, name="fullshard.checkpoint.save")
        cls._thread.start()

    @classmethod
    def finish(cls) -> Path | None:
        thread, cls._thread = cls._thread, None
        if thread is not None:
            with joining(thread):
                thread.join()
        (path, cls._path), (error, cls._error) = (cls._path, None), (cls._error, None)
        if error is not None:
            raise CheckpointError(f"the last save, in the background, failed: {error}") from error
        return path

    @classmethod
    def memory(cls, nbytes: int, pin: bool) -> torch.Tensor:
        """Memory of the host, the same for each save: its pages are there already."""
        if cls._arena.numel() < nbytes or cls._arena.is_pinned() != pin:
            cls._arena = torch.empty(0, dtype=torch.uint8)
            cls._arena = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin)
        return cls._arena

    @classmethod
    def give_memory_back(cls) -> None:
        if cls._arena.is_pinned():
            cls._arena = torch.empty(0, dtype=torch.uint8)
            torch.accelerator.empty_host_cache()  # where torch keeps what is pinned
        cls._arena = torch.empty(0, dtype=torch.uint8)


def finish() -> Path | None:
    """Waits for the save that is being written in the background, if there is one, and returns its directory. The
    memory from which it was written, which saves keep for the next one, is given back.

    Raises:
        CheckpointError: it could not be written.
    """
    try:
        return Background.finish()
    finally:
        Background.give_memory_back()


@atexit.register
def _report() -> None:
    """A program that ends without another call is told on the way out."""
    try:
        Background.finish()
    except CheckpointError as error:
        sys.excepthook(type(error), error, error.__traceback__)
