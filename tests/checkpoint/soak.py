"""Saves into a store that are killed, or that meet random faults: the older or the newer checkpoint stays whole.

After each, a load must find one that was saved, with its values, and the next save must leave nothing else::

    python -m tests.checkpoint.soak --kills 300 --faults 300
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable

from fullshard.checkpoint import CheckpointError, remote, store
from tests.checkpoint.stores import FAULTS, HOOKS, faults
from tests.checkpoint.test_remote import loaded, objects, saved


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.checkpoint.soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    store.PAUSES = (0.001,) * 5
    wrong = 0
    for kind, count in (_killed, options.kills), (_faulty, options.faults):
        ends = dict[str, int]()
        for seed in range(options.first_seed, options.first_seed + count):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    end = kind(f"faulty://{folder}/run", random.Random(seed))
                except AssertionError:
                    traceback.print_exc()
                    end = f"WRONG: seed {seed}"
                    wrong += 1
            ends[end] = ends.get(end, 0) + 1
        print(kind.__name__.strip("_"), ends, flush=True)
    return int(wrong > 0)


def _killed(url: str, rng: random.Random) -> str:
    at, keep = rng.randrange(1, 80), rng.choice([None, 1, 2])
    count = 0

    def kill(kind: str, path: str) -> None:
        nonlocal count
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)

    def save() -> None:
        HOOKS.append(kill)
        with faults(**_probabilities(rng)):
            saved(url, 3, keep_last=keep)

    assert _in_child(lambda: saved(url, 1, 2)) == 0
    status = _in_child(save)
    assert status in (0, 1, -signal.SIGKILL), status
    _check(url, {3} if status == 0 else {2, 3})
    return {0: "saved", 1: "raised CheckpointError"}.get(status, "killed")


def _faulty(url: str, rng: random.Random) -> str:
    def save() -> None:
        with faults(fail=rng.choice([0.1, 0.5, 0.7]), **_probabilities(rng)):
            saved(url, 3, keep_last=rng.choice([None, 1, 2]))

    assert _in_child(lambda: saved(url, 1, 2)) == 0
    status = _in_child(save)
    assert status in (0, 1), status
    _check(url, {3} if status == 0 else {2, 3})
    return "saved" if status == 0 else "raised CheckpointError"


def _probabilities(rng: random.Random) -> dict[str, float]:
    return {"lost_answer": rng.choice([0.0, 0.1]), "listing_lag": rng.choice([0.0, 0.0, 3600.0]), "late": 0.05}


def _check(url: str, expected: set[int]) -> None:
    def check() -> None:
        assert not FAULTS
        assert loaded(url) in expected
        saved(url, 4, keep_last=1)
        assert loaded(url) == 4
        left = [name for name in objects(url) if not name.startswith("step-00000004/")]
        assert left == ["newest.json"], left

    assert _in_child(check) == 0


def _in_child(call: Callable[[], object]) -> int:
    """Runs a call in a process of its own. Returns 0, 1 for a CheckpointError, 2 for another error, or the negative
    signal. Processes are forked, because each import of torch takes seconds: so this one makes no threads."""
    if not (child := os.fork()):
        status = 2
        with contextlib.suppress(BaseException):
            try:
                remote.ObjectPartial.largest = 4096.0
                warnings.simplefilter("ignore")
                call()
                status = 0
            except CheckpointError:
                status = 1
            except BaseException:
                traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    sys.exit(main())
