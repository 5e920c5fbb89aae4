"""Runs a program on ranks with one of both libraries, and compares what two runs found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import fullshard

FOLDER = Path(__file__).parent
SOURCE = Path(fullshard.__file__).parent.parent
Result = dict[str, Any]


def run(program: str, folder: Path, *options: str, library: str = "fullshard", ranks: int = 2) -> Result:
    """What `<program>_program.py` writes to `result.json` in `folder`, which stays, so that a later run can resume."""
    folder.mkdir(parents=True, exist_ok=True)
    search = os.pathsep.join([str(SOURCE), str(FOLDER.parent.parent), os.environ.get("PYTHONPATH", "")])
    patch = "1" if library == "fullshard" else "0"
    settings = {"FULLSHARD_PATCH": patch, "OMP_NUM_THREADS": "1", "PYTHONPATH": search, "HF_HUB_OFFLINE": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launch, str(FOLDER / f"{program}_program.py"), str(folder), *options]
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=300)
    # Seen with either library: a thread of gloo's ends so when all is done, and what was found is written.
    ended = result.exists() and (done.returncode == 0 or "terminate called without an active exception" in done.stderr)
    if not ended:
        pytest.fail(f"{program} {' '.join(options)} on {library} failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    found: Result = json.loads(result.read_text())
    for case in [found] if "sharded by" in found else found.values():
        assert case.pop("sharded by") == library, "the program ran on the other library"
    return found


def compare(ours: Result, theirs: Result, tolerance: float = 0.0) -> None:
    """What torch's run found, ours found too: numbers up to a relative `tolerance`."""
    for key, value in theirs.items():
        if tolerance:
            torch.testing.assert_close(torch.tensor(ours[key]), torch.tensor(value), rtol=tolerance, atol=0.0)
        else:
            assert ours[key] == value, key


@cache
def reference(program: str, *options: str) -> Result:
    """What a program finds with torch's FSDP, once in a session. It only trains: parts of the rest fail there."""
    with tempfile.TemporaryDirectory() as folder:
        return run(program, Path(folder), *options, "train-only", library="torch")


def row(program: str, folder: Path, *options: str, apart: Collection[str] = (), tolerance: float = 0.0) -> None:
    """A program trains as with torch's FSDP, and after it resumed as if it had not stopped.

    torch's runs without the options in `apart`, which change no number, or which it has not.
    """
    theirs = reference(program, *(each for each in options if each not in apart))
    ours = run(program, folder, *options)
    compare(ours, theirs, tolerance)
    assert ours["resumed"] == ours["uninterrupted"]


def cases(program: str, folder: Path, names: list[str], apart: Collection[str] = (), tolerance: float = 0.0) -> None:
    """The same for a program that runs several cases, each named by its options with hyphens between.

    What it exports has the loss of the sharded model: it was computed in double precision, and the other in bf16 at
    times.
    """
    plain = {name: "-".join(each for each in name.split("-") if each not in apart) for name in names}
    theirs = reference(program, *dict.fromkeys(plain.values()))
    ours = run(program, folder, *names)
    for name in names:
        compare(ours[name], theirs[plain[name]], tolerance)
        if "resumed" in ours[name]:
            assert ours[name]["resumed"] == ours[name].get("uninterrupted", ours[name]["losses"])
            sharded, exported = ours[name]["exported"]
            assert exported == pytest.approx(sharded, rel=5e-3 if "bf16" in name else 1e-5), name
