"""Saves into a store that are killed, or that meet random faults: the older or the newer checkpoint stays whole.

After each, a load must find one that was saved, with its values, and the next save must leave nothing else. So must a
job that is killed while it saves into memory every few steps, and into the store less often::

    python -m tests.checkpoint.soak --kills 300 --faults 300 --near-kills 300
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
from pathlib import Path
from typing import Any

from fullshard.checkpoint import CheckpointError, remote, store
from fullshard.checkpoint.storage import located
from tests.checkpoint.stores import FAULTS, HOOKS, faults
from tests.checkpoint.test_remote import loaded, objects, saved


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.checkpoint.soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--near-kills", type=int, default=30)
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    store.PAUSES = (0.001,) * 5
    wrong = 0
    modes = (_killed, options.kills), (_faulty, options.faults), (_killed_near, options.near_kills)
    for kind, count in modes:
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


#: What a process does to files, in the words of ``sys.addaudithook``.
_ACTS = {"open", "os.link", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir", "os.utime"}


def _killed_near(url: str, rng: random.Random) -> str:
    folder = Path(located(url).path).parent
    at, every, keep = rng.randrange(1, 500), rng.choice([1, 2, 3]), rng.choice([None, 1, 2])
    near, done, count = folder / "near", folder / "done", 0

    def kill(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in _ACTS and any(str(each).startswith((f"{near}", f"{folder}/run")) for each in arguments):
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)

    def save() -> None:
        sys.addaudithook(kill)
        for step in range(2, 10):
            where = {"keep_last": keep} if step % (every + 1) == 0 else {"replicas": near}
            saved(url, step, **where)
            done.write_text(f"{step}")

    def check() -> None:
        last = int(done.read_text())
        step = loaded(url, replicas=near)
        assert step in ({9} if status == 0 else {last, last + 1}), (step, last, every)
        saved(url, step + 1, replicas=near)
        assert loaded(url, replicas=near) == step + 1
        assert [path.name for path in near.iterdir()] == [f"step-{step + 1:08}"]
        saved(url, step + 2, keep_last=1)
        assert loaded(url, replicas=near) == step + 2
        left = [name for name in objects(url) if not name.startswith(f"step-{step + 2:08}/")]
        assert left == ["near.json", "newest.json"], left

    done.write_text("1")
    assert _in_child(lambda: saved(url, 1)) == 0
    status = _in_child(save)
    assert status in (0, -signal.SIGKILL), status
    assert _in_child(check) == 0
    return "saved" if status == 0 else "killed"


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
