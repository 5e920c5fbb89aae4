"""What this process waits for from other ranks, where others of its threads can see it.

Whoever waits writes it down before and after, in a few attributes: the thread that trains apart from threads beside it.
Owns the error for a rank that was lost. It looks at nothing: :mod:`fullshard.watch` reads what stands here, and sets
``begin``, ``announce`` and ``explain``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch.distributed as dist

from fullshard.comm.backends import comes_from_backend

Works = Iterable[dist.Work | None]  # collectives that were started


class PeerFailureError(RuntimeError):
    """Another rank has ended, hangs or runs something else, so that what this rank waits for will not come. It names
    that rank, its process, its step and the group. The process group cannot be used any more: end the job."""

    __module__ = "fullshard"


class Wait(NamedTuple):
    """A wait for the ranks of a process group."""

    what: str  # for people
    process_group: dist.ProcessGroup | None
    tag: int = -1  # of the group, if it is an exchange of one
    gathers: bool = False  # whether that is a gather, and no reduction


@dataclass
class Position:
    """Where the thread that trains is."""

    doing: str = "before its first forward"  # for people
    #: The last calls, by their number in the pass. The outer key names a process group and a pass that may not have
    #: ended everywhere, alike on all ranks.
    passes: dict[str, dict[str, str]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)  # of the groups, by their tags
    unlike_before: str = ""  # where the pass that runs has left the order of the one before, for people


class Waits:
    """The waits of this process.

    The exchanges of groups are the training's, in whichever thread autograd runs them: they set ``current`` and
    ``count`` themselves, without a call. All other waits go through :func:`waiting`, which looks at the thread.
    """

    def __init__(self) -> None:
        self.current: Wait | None = None  # what the training waits for now
        #: When messages of a group last began to travel, by tag and direction, as long as somebody listens.
        self.begun: dict[tuple[int, bool], int] = {}
        self.count = 0  # grows with each of its waits: one wait follows another for the same thing
        self.thread = threading.current_thread()  # that trains: the last one that sharded a model
        self.beside: dict[threading.Thread, Wait] = {}  # what other threads wait for, each in an object of its own
        self.judged: tuple[int, str] = -1, ""  # which of its waits will not end, by ``count``, and why
        self.position: Callable[[], Position] = Position  # where it is
        #: Called with each wait of the training that has ended, and its begin and end, in nanoseconds of ``clock``.
        self.listeners: list[Callable[[Wait, int, int], object]] = []
        self.clock = time.monotonic_ns
        #: Called before a wait of the training through :func:`waiting`, until ``watched`` is the default process group.
        self.begin: Callable[[], object] = lambda: None
        self.watched: Callable[[], object] = lambda: None
        #: Lets the other ranks know at once where it is, by the thread that trains.
        self.announce: Callable[[], object] = lambda: None
        #: Says what is known of the ranks of a process group after one was lost; waits for the news some seconds.
        self.explain: Callable[[dist.ProcessGroup | None], str] = lambda _: "Find the first error in other ranks' logs"

    @property
    def verdict(self) -> str | None:
        """Why the last wait of the training did not end or will not, if that is known."""
        number, why = self.judged
        return why if number == self.count else None

    def tell(self, wait: Wait, begin: int) -> None:
        """Tell the listeners of a wait that has ended."""
        for listener in [*self.listeners]:
            listener(wait, begin, self.clock())

    def change(self, wait: Wait | None) -> Wait | None:
        """Note what the calling thread waits for now; returns what it waited for before."""
        thread = threading.current_thread()
        if thread is self.thread:
            if wait is not None and self.watched() is not dist.group.WORLD:
                self.begin()
            before, self.current = self.current, wait
            self.count += 1
            return before
        before = self.beside.pop(thread, None)
        if wait is not None:
            self.beside[thread] = wait
        return before


WAITS = Waits()


def checks_are_on() -> bool:
    """Whether ranks compare what they did, and watch over what they wait for: unless ``FULLSHARD_CHECKS=0``."""
    return os.environ.get("FULLSHARD_CHECKS") != "0"


def lost(wait: Wait, error: Exception, peer: int | None = None, works: Works = ()) -> PeerFailureError:
    """What to raise for an ``error`` in a call of a backend, perhaps about the rank ``peer`` of the group: backends say
    that a rank was lost, not why. An error that no backend raised is raised as it is. Waits for the other ``works``."""
    wait_for_others(works)
    if isinstance(error, RuntimeError) and not comes_from_backend(error):
        raise error
    rank = "another rank" if peer is None else f"rank {dist.get_process_group_ranks(wait.process_group)[peer]}"
    why, at = WAITS.explain(wait.process_group), describe_with_position(wait)
    said = str(error).partition(". ")[0]
    return PeerFailureError(f"rank {dist.get_rank()} lost its connection to {rank} in {at}. {why} ({said})")


def wait_for_others(works: Works) -> None:
    """Wait for what was started beside a collective that failed: it uses memory that is about to have other values."""
    for work in works:
        with suppress(Exception):
            if work is not None:
                work.wait()


def describe(wait: Wait) -> str:
    """What is waited for, for people."""
    return f"{wait.what} of {named(wait.tag)}" if wait.tag >= 0 else wait.what


def describe_with_position(wait: Wait) -> str:
    """The same, and where this rank is."""
    return f"{describe(wait)}, {WAITS.position().doing}"


def named(tag: int) -> str:
    """The group that has a tag, for people."""
    return WAITS.position().names.get(tag, f"the group with tag {tag}")


@contextmanager
def waiting(
    what: str, process_group: dist.ProcessGroup | None, tag: int = -1, gathers: bool = False, works: Works = ()
) -> Iterator[None]:
    """A context of calls that wait for the ranks of a process group, or send to them. Raises PeerFailureError if a
    backend says that one is lost. After an error, waits for ``works``."""
    wait, begin = Wait(what, process_group, tag, gathers), WAITS.clock() if WAITS.listeners else 0
    before = WAITS.change(wait)
    try:
        yield
    except RuntimeError as error:
        raise lost(wait, error, works=works) from error
    finally:
        if begin and before is None and WAITS.current is wait:
            WAITS.tell(wait, begin)
        WAITS.change(before)
