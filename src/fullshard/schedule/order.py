"""The order in which groups run: recorded in one step, used to gather ahead in the next.

A recorded order works even if a model synchronizes with the host. Prefetch by letting the host run ahead does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Generic, TypeVar

Group = TypeVar("Group")

_LONGEST = 100_000  # uses of groups to remember if no backward ever ends them


class Order(Generic[Group]):
    """Which group follows which, in forward and in backward.

    Attributes:
        entered: the groups whose forward has begun since that of the root did; ``entered_before``: in the last step.
        finished: those whose forward has ended and whose backward has not begun.
    """

    def __init__(self) -> None:
        self.entered: list[Group] = []
        self.finished: deque[Group] = deque(maxlen=_LONGEST)
        self.entered_before: list[Group] = []

    def begin_forward(self) -> None:
        if self.entered:
            self.entered_before = self.entered
        self.entered = []

    def next_in_forward(self) -> Iterator[Group]:
        """The groups that followed, in the last step, the one that was just entered."""
        at = len(self.entered)
        if at and self.entered_before[at - 1 : at] == self.entered[-1:]:
            return islice(self.entered_before, at, None)
        return iter(())

    def next_in_backward(self, group: Group) -> Iterator[Group]:
        """The groups whose backward follows that of the last use of ``group``, which begins."""
        for at, other in enumerate(reversed(self.finished)):
            if other == group:
                del self.finished[-1 - at]
                return islice(reversed(self.finished), at, None)
        return iter(())
