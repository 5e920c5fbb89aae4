"""The worlds of :mod:`tests.elastic.explorer`: all processes, and what is under way between them."""

from __future__ import annotations

from typing import Any, NamedTuple

from fullshard.elastic.agreement import Agreement, Membership, Stage


class Limits(NamedTuple):
    """How much may happen in a world."""

    steps: int = 2
    deaths: int = 1
    suspicions: int = 0
    ballots: int = 0  # proposals made again because nothing was decided for long
    choices: int = 0  # of the replicas that take part in a step; 0: all do, and nobody chooses
    asks: int = 0  # whether a process is new, by default the last, and asks to join: 1 one member, 2 all of them
    copies: bool = False  # whether each process copies its state when it has all gradients of a step
    resets: int = 0  # connections whose last messages are lost when a process ends
    hangs: bool = False  # whether those that are suspected hang: they answer, and are to be left out


class World(NamedTuple):
    """All processes, and what is under way."""

    processes: tuple[int, ...]
    channels: tuple[tuple[int, ...], ...]  # messages under way, by sender * processes + receiver
    dead: frozenset[int]
    left: Limits  # what may still happen
    installed: tuple[Membership, ...]  # the membership of each number in which anybody acted first
    counted: int = 0  # steps that count somewhere
    computed: int = -1  # the last step of which anybody had all gradients
    stepped: frozenset[tuple[int, Any]] = frozenset()  # steps that anybody has made, and with which replicas


class Ask(NamedTuple):
    """A new process asks to be a member, with a state of the future since the membership ``back``."""

    back: int


class Stepped(NamedTuple):
    """A new process may get the gradients of the step before."""

    step: int


Event = tuple[Any, ...]  # a process, what happens to it, and arguments
#: Where a process does nothing of a step.
WAITING = Stage.FROZEN, Stage.OUT
#: What an event takes from the limits.
TAKES = {"dies": "deaths", "suspects": "suspicions", "hangs": "suspicions", "again": "ballots", "is reset by": "resets"}


class Watched(Agreement):
    """An agreement that notes what it changes. It may be that of a new process, which has a state of the future since
    the membership ``since``, and has ``heard`` of gradients. It has ``doubted`` those that it ever suspected."""

    since = heard = 0
    doubted: frozenset[int] = frozenset()

    def __setattr__(self, name: str, value: Any) -> None:
        notes = self.__dict__.setdefault("notes", [])
        if name in ("membership", "state"):
            notes.append((name, value))
        elif name == "step" and "step" in self.__dict__:
            replicas = self.__dict__.get("complete_with")
            notes.append((name, self.step, value, self._is_complete, self.membership.number, replicas))
        super().__setattr__(name, value)
