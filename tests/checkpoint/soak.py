"""Saves into a store that are killed, or that meet random faults: the older or the newer checkpoint stays whole.

After each, a load must find one that was saved, with its values, and the next save must leave nothing else. So must a
job that is killed while it saves into memory every few steps, and into the store less often. Requests may arrive after
their save has failed and the next one has been written, and a host may sleep while another one takes over::

    python -m tests.checkpoint.soak --kills 300 --faults 300 --near-kills 300 --late 300 --sleeps 300

``--blind`` lets the store ignore the condition of a conditional write, as some do.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fullshard.checkpoint import Checkpoint, CheckpointError, list_checkpoints, remote, store
from fullshard.checkpoint.storage import located
from tests.checkpoint.stores import FAULTS, HOOKS, deliver, faults
from tests.checkpoint.test_remote import loaded, model_of, objects, other_saves, saved

#: Faults of the store that are there all the time.
BLIND = dict[str, float]()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.checkpoint.soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--near-kills", type=int, default=30)
    parser.add_argument("--late", type=int, default=30)
    parser.add_argument("--sleeps", type=int, default=30)
    parser.add_argument("--blind", action="store_true")
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    store.PAUSES = (0.001,) * 5
    wrong = 0
    BLIND.update({"blind": 1.0} if options.blind else {})
    modes = (
        (_killed, options.kills),
        (_faulty, options.faults),
        (_killed_near, options.near_kills),
        (_late, options.late),
        (_slept, options.sleeps),
    )
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


def _at_request(number: int, act: Callable[[], object]) -> Callable[[str, str], None]:
    """A hook that acts when the request with this number begins."""
    numbers = itertools.count(1)

    def begin(kind: str, path: str) -> None:
        if next(numbers) == number:
            act()

    return begin


def _killed(url: str, rng: random.Random) -> str:
    at, keep = rng.randrange(1, 80), rng.choice([None, 1, 2])

    def save() -> None:
        HOOKS.append(_at_request(at, lambda: os.kill(os.getpid(), signal.SIGKILL)))
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


def _late(url: str, rng: random.Random) -> str:
    """A save that fails, and some of whose requests arrive when the next one is written."""

    def save() -> None:
        random.seed(rng.random())
        with suppress(CheckpointError), faults(late_put=rng.choice([0.1, 0.5, 0.9]), **_probabilities(rng)):
            saved(url, 3, seed=33)
            return
        saved(url, 3, keep_last=1)
        deliver()

    assert _in_child(lambda: saved(url, 1, 2)) == 0
    assert _in_child(save) == 0
    seeds = _seeds(url)
    assert seeds[0] in (3, 33), seeds
    _check_end(url)
    return "saved" if seeds[0] == 33 else "failed, then saved"


def _slept(url: str, rng: random.Random) -> str:
    """A save during which the host sleeps, while another host takes over and saves the same step."""
    at, keep = rng.randrange(1, 60), rng.choice([None, 1, 2])

    def save() -> None:
        HOOKS.append(_at_request(at, lambda: other_saves(url, 3, seed=33, keep_last=keep)))
        with faults(lost_answer=rng.choice([0.0, 0.1])):  # late listings would hide the lease of the first one
            saved(url, 3)

    assert _in_child(lambda: saved(url, 1, 2)) == 0
    status = _in_child(save)
    assert status in (0, 1), status
    seeds = _seeds(url)
    # The other one may have removed what the first one had published.
    assert seeds[0] in (3, 33), seeds
    assert 3 in seeds or status == 1 or keep == 1, seeds
    _check_end(url)
    return "both saved" if status == 0 else "the other one saved"


def _seeds(url: str) -> list[int]:
    """The seeds of the models in all checkpoints, the newest first. Asserts that they are whole."""
    seeds, (read, write) = list[int](), os.pipe()

    def find() -> None:
        for path in list_checkpoints(url):
            with Checkpoint(path) as found:
                assert list(found.verify()) == [], path
                weight = found.tensor("model.0.weight")
                same = [each for each in (1, 2, 3, 33) if weight.equal(model_of(each).state_dict()["0.weight"])]
                os.write(write, bytes(same))

    assert _in_child(find) == 0
    os.close(write)
    with os.fdopen(read, "rb") as file:
        seeds = [*file.read()]
    return seeds


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
        assert loaded(url) in expected

    assert _in_child(check) == 0
    _check_end(url)


def _check_end(url: str) -> None:
    """Asserts that the next save is whole, and leaves nothing else once the leases of saves that failed are over."""

    def check() -> None:
        store._EXPIRY = -1.0
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
        with suppress(BaseException):
            try:
                remote.ObjectPartial.largest = 4096.0
                FAULTS.update(BLIND)
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
