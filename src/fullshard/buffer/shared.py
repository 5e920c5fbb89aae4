"""A full buffer in memory that the ranks of a host share: it consists of their shards, so nothing has to be gathered.

This rank reads it through a mapping of its own: no other rank sees a write to an unsharded parameter, and a reshard
throws it away. Between passes other ranks write to the buffer. So parameters that are unsharded by hand lie in a copy
(:meth:`SharedBuffer.be_private`): this rank writes each page as it is, which makes the page its own, at its address.
"""

from __future__ import annotations

import mmap

import torch

from fullshard.buffer.shared_memory import Segment
from fullshard.buffer.slots import OwnBuffer
from fullshard.device import PASSED, Mark


class SharedBuffer(OwnBuffer):
    """A full buffer that ranks share. It begins ``start`` bytes into ``view``, the mapping by which this rank reads the
    memory of all."""

    def __init__(self, view: Segment, start: int, nbytes: int) -> None:
        super().__init__(view.tensor(start, nbytes, torch.uint8))
        self._view, self._is_private = view, False

    def take(self) -> Mark:
        if not self.in_use:
            self.in_use = True
            self._view.begin_use()
            self._tell_children()
        return PASSED

    def give_back(self, released: Mark | None = None) -> None:
        """End its use. Writes are thrown away."""
        self.in_use = False
        self._tell_children()
        if self._is_private:
            self.be_shared()
            return
        self._view.end_use()

    def discard_writes(self) -> None:
        """Let the views see again what the ranks share."""
        self._view.discard_writes()

    def be_private(self) -> None:
        """Let the views see a copy of what the ranks share now."""
        self.be_shared()
        self._is_private = True
        self._tell_children()
        with torch.no_grad():
            for page in (self.memory[:: mmap.PAGESIZE], self.memory[-1:]):
                page.add_(0)

    def be_shared(self) -> None:
        """Let the views see what the ranks share."""
        if self._is_private:
            self.discard_writes()
            self._is_private = False
            self._tell_children()

    def _tell_children(self) -> None:
        """Let forked processes see what the views show now; they see a private copy in any case."""
        self._view.pages.own = ((0, self._view.pages.nbytes),) if self.in_use and not self._is_private else ()
