"""Which cases of a test the quick lane takes: enough of them that every two values of its parameters meet.

Most mistakes show with one value or with two together. The cases that only three values together tell apart are left
to the long lane. Of tests that are dear, the quick lane takes enough cases that every value is met.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence


def covering(cases: Sequence[Mapping[str, int]], together: int = 2) -> list[int]:
    """The numbers of enough cases that every `together` values meet that meet in any; all cases of no more parameters.

    A case is told by a number for the value of each parameter. Taken next is the case with the most meetings that no
    case before it has; of equal ones the first.
    """
    meetings = [set(itertools.combinations(sorted(case.items()), together)) for case in cases]
    left = set().union(*meetings)
    if not left:
        return list(range(len(cases)))
    chosen = []
    while left:
        chosen.append(max(range(len(cases)), key=lambda number: len(meetings[number] & left)))
        left -= meetings[chosen[-1]]
    return sorted(chosen)
