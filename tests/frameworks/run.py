"""Runs a program on ranks with one of both libraries, and compares what two runs found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import fullshard

SOURCE = Path(fullshard.__file__).parent.parent
ROOT = Path(__file__).parent.parent.parent
Result = dict[str, Any]
#: Programs that change what others find in torch when they are imported.
APART = ("torchtitan",)
_launchers: list[Launcher] = []
#: Runs torch's FSDP beside fullshard.
_beside = ThreadPoolExecutor(1)


class Launcher:
    """A process that has imported programs, and with them one of both libraries, and forks their ranks."""

    def __init__(self, library: str) -> None:
        search = os.pathsep.join([str(SOURCE), str(ROOT), os.environ.get("PYTHONPATH", "")])
        settings = {"FULLSHARD_PATCH": "1" if library == "fullshard" else "0", "PYTHONPATH": search}
        settings |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-m", "tests.frameworks.launcher"]
        environment = {**os.environ, **settings}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        _launchers.append(self)

    def run(self, job: Result) -> Result:
        """What the launcher answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        return dict(json.loads(answer)) if answer else {"error": f"the launcher ended with {self._process.wait()}"}

    def end(self) -> None:
        """End the process, which ends with its input."""
        self._process.communicate()


def needs(*packages: str) -> None:
    """Skip a file of tests where one of these is not installed; the test process imports none of them."""
    if missing := [each for each in packages if find_spec(each) is None]:
        pytest.skip(f"needs {', '.join(missing)}: make frameworks", allow_module_level=True)


def end_launchers() -> None:
    """At the end of a session."""
    while _launchers:
        _launchers.pop().end()
    _launcher.cache_clear()


@cache
def _launcher(library: str, apart: str) -> Launcher:
    return Launcher(library)


def run(program: str, folder: Path, *options: str, library: str = "fullshard", ranks: int = 2) -> Result:
    """What `<program>_program.py` finds in a case; `folder` stays, so that a later run can resume."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name.startswith("FULLSHARD_TRANSPORT")}
    job = {"program": program, "folder": str(folder), "options": options, "ranks": ranks, "environment": environment}
    launcher = _launcher(library, program if program in APART else "")
    answer = launcher.run({**job, "timeout": 240})
    ended = answer.get("ended", [])
    if "error" in answer or any(ended):
        told = [answer.get("error", f"{program} {' '.join(options)} failed on {library}: ranks ended with {ended}")]
        told += [f"rank {rank}:\n{(folder / f'rank{rank}').read_text()[-6000:]}" for rank in range(len(ended))]
        pytest.fail("\n".join(told))
    found: Result = json.loads((folder / "result.json").read_text())
    assert found.pop("sharded by") == library, "the program ran on the other library"
    return found


@cache
def reference(program: str, *options: str, ranks: int = 2) -> Future[Result]:
    """What a program finds with torch's FSDP, once in a session. It only trains: parts of the rest fail there."""

    def train() -> Result:
        with tempfile.TemporaryDirectory() as folder:
            return run(program, Path(folder), *options, "train-only", library="torch", ranks=ranks)

    return _beside.submit(train)


def both(program: str, folder: Path, *options: str, apart: Collection[str] = (), ranks: int = 2) -> Result:
    """What a program finds with fullshard, which includes all that it finds with torch's FSDP beside it.

    torch's runs without the options in `apart`, which change no number, or which it has not.
    """
    theirs = reference(program, *(each for each in options if each not in apart), ranks=ranks)
    try:
        ours = run(program, folder, *options, ranks=ranks)
    finally:
        wait([theirs])
    for key, value in theirs.result().items():
        assert ours[key] == value, key
    return ours


def row(
    program: str,
    folder: Path,
    case: str,
    apart: Collection[str] = (),
    ranks: int = 2,
    others: int | None = 1,
    close: float = 1e-5,
) -> None:
    """A program trains as with torch's FSDP, and after it resumed as if it had not stopped, on `others` ranks too.

    A case is its options with hyphens between. There all ranks share one batch, so that their number changes no loss
    but by rounding. What a program exports has the loss of the sharded model.
    """
    options = case.split("-")
    ours = both(program, folder, *options, apart=apart, ranks=ranks)
    if "resumed" in ours:
        assert ours["resumed"] == ours.get("uninterrupted", ours["losses"])
    # The exported model computes in double precision, and the sharded one in 16 bits at times.
    exact = 5e-3 if {"bf16", "scaler"} & set(options) else 1e-5
    _compare_exported(ours, exact)
    if others is not None:
        elsewhere = run(program, folder, *options, "resume", ranks=others)
        assert flat(elsewhere["resumed"]) == pytest.approx(flat(ours["resumed"]), rel=close)
        _compare_exported(elsewhere, exact)


def _compare_exported(found: Result, exact: float) -> None:
    if "exported" in found:
        sharded, exported = found["exported"]
        assert exported == pytest.approx(sharded, rel=exact)


def flat(numbers: list[Any]) -> list[float]:
    """Numbers out of lists of lists."""
    return [each for number in numbers for each in (flat(number) if isinstance(number, list) else [number])]
