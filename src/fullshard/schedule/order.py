"""The order in which groups run: recorded in one step, used to gather ahead in the next.

Implicit prefetch that follows how far the host runs ahead is lost when a model synchronises; a recorded order is not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import islice

from fullshard.group.group import Group

_LONGEST = 100_000  # uses of groups that are remembered when no backward ever clears them


class Order:
    """Which group follows which, in forward and in backward."""

    def __init__(self) -> None:
        self._last_forward: list[Group] = []
        self._forward: list[Group] = []
        self._finished: list[Group] = []
        self._uses: defaultdict[Group, list[int]] = defaultdict(list)

    def begin_forward(self) -> None:
        if self._forward:
            self._last_forward = self._forward
        self._forward = []

    def enter(self, group: Group) -> None:
        """``group`` begins its forward."""
        self._forward.append(group)

    def leave(self, group: Group) -> None:
        """``group`` ended its forward."""
        if self._finished[_LONGEST - 1 :]:
            self.forget()
        self._uses[group].append(len(self._finished))
        self._finished.append(group)

    @property
    def entered(self) -> list[Group]:
        """The groups whose forward has begun since that of the root did."""
        return self._forward

    def next_in_forward(self) -> Iterator[Group]:
        """The groups that followed, last time, the one that has just been entered."""
        at = len(self._forward)
        if at and self._last_forward[at - 1 : at] == self._forward[-1:]:
            return islice(self._last_forward, at, None)
        return iter(())

    def next_in_backward(self, group: Group) -> Iterator[Group]:
        """The groups whose backward follows that of the last use of ``group``, without those that asked before it."""
        finished, every, uses = self._finished, self._uses, self._uses.get(group)
        earlier = range(uses.pop() - 1, -1, -1) if uses else ()
        return (finished[at] for at in earlier if at in every[finished[at]])

    def forget(self) -> None:
        """Forget the uses so far: their backward has ended."""
        self._finished.clear()
        self._uses.clear()
