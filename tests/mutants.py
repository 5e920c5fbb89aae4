"""Small changes of a file, and whether its tests find them: `python -m tests.mutants text.py`.

cosmic-ray makes the changes, one at a time, in a copy of the source. On each run the tests of the file that has the
module's name, and with ``--near`` those that stand near it. A change that survives is a claim that nobody tests, or
changes nothing. :mod:`tests.mutations` has a list of chosen bugs of the engine.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

from tests.mutations import ROOT, nearest


def settings() -> dict[str, Any]:
    """What pyproject.toml says of cosmic-ray."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        return tomllib.load(file)["tool"]["cosmic-ray"]


def copy_tree(folder: Path) -> None:
    """Copies the source and the tests, and links what stands beside them."""
    for path in ROOT.iterdir():
        if path.name in ("src", "tests"):
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.name != ".git":
            (folder / path.name).symlink_to(path)


def run(file: str, tests: list[str], count: int, seed: int) -> int:
    """Runs at most ``count`` changes of a file in the current directory; returns how many no test found."""
    from cosmic_ray.commands import execute, init
    from cosmic_ray.config import ConfigDict
    from cosmic_ray.work_db import use_db
    from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkResult

    began, chosen = time.monotonic(), settings()
    command = f"{sys.executable} -m pytest -x -q --tb=no -p no:cacheprovider {' '.join(tests)}"
    unchanged = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if unchanged.returncode:
        sys.exit(f"the tests fail without a change: {command}\n{unchanged.stdout[-2000:]}")
    config = ConfigDict({"test-command": command, "timeout": chosen["timeout"], "distributor": {"name": "local"}})
    skips = re.compile("|".join(chosen["exclude-operators"]))
    with use_db("session.sqlite") as session:
        init([Path("src/fullshard", file)], session, {})
        # Their ids are random: in the order of the file, so that a seed draws the same ones.
        every = sorted(session.pending_work_items, key=lambda each: str(each.mutations))
        wanted = [each.job_id for each in every if not skips.match(each.mutations[0].operator_name)]
        drawn = set(random.Random(seed).sample(wanted, min(count, len(wanted))))
        for each in every:
            if each.job_id not in drawn:
                session.set_result(each.job_id, WorkResult(worker_outcome=WorkerOutcome.SKIPPED))
        execute(session, config)
        found = [(item, result) for item, result in session.completed_work_items if item.job_id in drawn]
    outcomes = [result.test_outcome for _, result in found]
    for item, result in found:
        if result.test_outcome is not TestOutcome.KILLED:
            lines = [line for line in (result.diff or "").splitlines() if line.startswith(("-", "+"))]
            print(f"{result.test_outcome.value} at line {item.mutations[0].start_pos[0]}:", *lines[2:], sep="\n  ")
    kinds = TestOutcome.KILLED, TestOutcome.SURVIVED, TestOutcome.INCOMPETENT
    killed, survived, odd = map(outcomes.count, kinds)
    print(f"{file}: {killed} killed, {survived} survived, {odd} without a result, of {len(wanted)} changes,", end=" ")
    print(f"by {' '.join(tests)}; {time.monotonic() - began:.0f} s", flush=True)
    return len(found) - killed


def main() -> int:
    """Runs the changes of some files; returns 1 if some were not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("files", nargs="+", help="files below src/fullshard, such as text.py")
    parser.add_argument("--count", type=int, default=10_000, help="at most so many changes of each file")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--near", action="store_true", help="run all tests that stand near the file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(Path(folder))
        os.chdir(folder)
        os.environ |= {"PYTHONPATH": f"{folder}/src:{folder}", "OMP_NUM_THREADS": "1"}
        missed = [
            run(file, nearest(file)[: None if options.near else 1], options.count, options.seed)
            for file in options.files
        ]
        os.chdir(ROOT)
    return int(any(missed))


if __name__ == "__main__":
    sys.exit(main())
