"""Which cases of a test the quick lane takes: enough of them that every two values of its parameters meet.

Most mistakes show with one value or with two together. The cases that only three values together tell apart are left
to the long lane.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence


def with_all_pairs(cases: Sequence[Mapping[str, int]]) -> list[int]:
    """The numbers of enough cases that every two values meet that meet in any; all cases of one or two parameters.

    A case is told by a number for the value of each parameter. Taken next is the case with the most pairs that no
    case before it has; of equal ones the first.
    """
    pairs = [set(itertools.combinations(sorted(case.items()), 2)) for case in cases]
    left = set().union(*pairs)
    if not left:
        return list(range(len(cases)))
    chosen = []
    while left:
        chosen.append(max(range(len(cases)), key=lambda number: len(pairs[number] & left)))
        left -= pairs[chosen[-1]]
    return sorted(chosen)
