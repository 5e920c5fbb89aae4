"""What the doctor says of facts that ranks tell of where they run."""

from __future__ import annotations

from typing import Any

import pytest

from fullshard.report.environment import Facts, _threads


def fact(rank: int = 0, **known: Any) -> Facts:
    plain = {"host": "a", "accelerators": 0, "cores": 8, "threads": 4, "files": 1 << 20, "shared": 1 << 40}
    return Facts(**{"rank": rank, "clock": 0.0, "environment": {}, "restarts": 0, **plain, **known})


@pytest.mark.parametrize(("threads", "result"), [(3, "ok"), (4, "ok"), (5, "warning")])
def test_ranks_may_have_as_many_threads_as_there_are_cores(threads: int, result: str) -> None:
    (check,) = _threads([fact(rank, threads=threads) for rank in range(2)])
    assert check.result == result
    assert check.text == f"2 ranks of a compute with {2 * threads} threads, on 8 cores."
    assert check.advice == ("Set OMP_NUM_THREADS=4." if result == "warning" else "")
