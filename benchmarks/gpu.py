"""fullshard beside torch's FSDP2 on one GPU, in at most nine minutes: `make gpu`.

Runs parts in the order of what matters, each in a process of its own with a time limit: the tests in tests/gpu, memory
and time of steps as one rank of eight over a simulated network, and what `fullshard.explain` predicts beside it. What a
part has found goes into results.json as it comes, so a run that is cut off keeps what it had; a part that fails does
not stop the others. It needs nothing but torch and the tree::

    PYTHONPATH=src python3 -m benchmarks.gpu --output runs/gpu
    python3 -m benchmarks.gpu --read runs/gpu/results.json --docs docs/explanation/gpu.md
    torchrun --nproc-per-node=8 -m benchmarks.gpu --part "1 B, one rank"     several GPUs, a real network

`--tiny` runs tiny sizes on the CPU instead, where figures mean nothing, and leaves tests/gpu out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from benchmarks import page
from benchmarks.gpu_steps import LIBRARIES, Setting, compare, predict
from fullshard.rehearsal.network import connect

_SECONDS = 535.0
_ALL = tuple(LIBRARIES)
_TESTS, _NETWORK, _PREDICTIONS = "tests", "network", "predictions"
#: The settings, in the order in which they run, and the seconds that each may take.
SETTINGS = {
    "7 B": (Setting("7 B", libraries=_ALL), 110),
    "many": (Setting("many", libraries=_ALL), 60),
    "7 B, recompute": (Setting("7 B", recompute=True), 70),
    "1 B": (Setting("1 B", libraries=_ALL), 60),
    "7 B, 45 GB/s": (Setting("7 B", rate=45e9), 80),
    "1 B, 45 GB/s, int8": (Setting("1 B", rate=45e9, wire="int8", libraries=("fullshard",)), 60),
    "1 B, 45 GB/s": (Setting("1 B", rate=45e9), 50),
    "1 B, one rank": (Setting("1 B", ranks=1, libraries=_ALL), 60),
    "1 B, compiled blocks": (Setting("1 B", compile=True), 80),
    "1 B, 4 batches a step": (Setting("1 B", accumulate=4), 60),
    "many, in a CUDA graph": (Setting("many", graph=True, libraries=("fullshard", "torch FSDP2")), 60),
    "1 B, offload": (Setting("1 B", offload=True), 60),
    "7 B, 45 GB/s, int8": (Setting("7 B", rate=45e9, wire="int8", libraries=("fullshard",)), 90),
}
#: Predictions take no GPU, and are compared with these settings.
PREDICTED = ("7 B", "7 B, recompute", "1 B", "many", "1 B, one rank", "1 B, offload")
LIMITS = {
    _TESTS: 170,  # most with both libraries
    _NETWORK: 120,  # compiled once
    **{name: limit for name, (_, limit) in SETTINGS.items()},
    _PREDICTIONS: 60,
}


@dataclass
class Run:
    """Runs parts, and keeps in a folder what they have found."""

    folder: Path
    is_tiny: bool
    begun: float = field(default_factory=time.monotonic)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def run(self, name: str) -> None:
        """Runs one part in a process group of its own, which is killed at the part's limit or at that of the run."""
        part = self.parts[name] = {"status": "running", "found": {}}
        limit = LIMITS[name] if self.is_tiny else min(LIMITS[name], _SECONDS - (time.monotonic() - self.begun))
        if limit < 5:
            part["status"] = "not run: no time was left"
            return self._save()
        print(f"{name} ...", flush=True)
        lines, log, begun = self.folder / "part.jsonl", self.folder / "part.log", time.monotonic()
        lines.write_text("")
        command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, "--output", str(lines)]
        if name == _TESTS:
            options = ["-v", "-p", "no:cacheprovider", "--all", "tests/gpu", "tests/test_fused.py"]
            command = [sys.executable, "-m", "pytest", *options]
        with log.open("wb") as output:
            child = subprocess.Popen(
                [*command, *(["--tiny"] if self.is_tiny else [])], stdout=output, stderr=output, start_new_session=True
            )
        code = None
        try:
            while code is None and time.monotonic() - begun < limit:
                try:
                    code = child.wait(1)
                except subprocess.TimeoutExpired:
                    self._collect(part, lines)
        finally:
            for kind in (
                signal.SIGINT,
                signal.SIGKILL,
            ):  # a compiler that is only killed leaves a lock to its successor
                if child.poll() is None:
                    os.killpg(child.pid, kind)
                    with suppress(subprocess.TimeoutExpired):
                        child.wait(4)
        said = log.read_text(errors="replace")
        errors = [f"{library}: {each['error']}" for library, each in self._collect(part, lines) if "error" in each]
        part["status"] = "; ".join(errors) or ("ok" if code == 0 else f"ended with {code}")
        if code is None:
            part["status"] = f"stopped after {limit:.0f} s"
        if name == _TESTS:
            cases = dict(re.findall(r"^(tests/.+) (PASSED|SKIPPED|FAILED|ERROR)", said, re.MULTILINE))
            part["found"] = {"tests": {"summary": said.strip().rpartition("\n")[2], "cases": cases}}
        part |= {"seconds": round(time.monotonic() - begun, 1)} | (
            {} if part["status"] == "ok" else {"log": said[-6000:]}
        )
        print(f"  {part['status'][:300]}, {part['seconds']} s", flush=True)
        self._save()

    def _collect(self, part: dict[str, Any], lines: Path) -> list[tuple[str, Any]]:
        """Takes over what the process of a part has found so far; the last line may not be whole yet."""
        whole = lines.read_text().rpartition("\n")[0]
        if len(found := dict(json.loads(line) for line in whole.splitlines())) != len(part["found"]):
            part["found"] = found
            self._save()
        return list(found.items())

    def _save(self) -> None:
        (new := self.folder / "results.json.new").write_text(json.dumps(self.parts, indent=1))
        new.replace(self.folder / "results.json")


def measure_part(name: str, is_tiny: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """What a part finds: a library or a prediction, and its figures."""
    if name == _PREDICTIONS:
        for each in PREDICTED:
            try:
                yield each, predict(SETTINGS[each][0], is_tiny, "cpu" if is_tiny else "cuda")
            except Exception as error:  # as in compare()
                yield each, {"error": f"{type(error).__name__}: {error}"[:2000]}
        return
    device = torch.device("cpu")
    if not is_tiny:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
    if name == _NETWORK:
        yield name, {"network in Python": connect(0, 8, 0.0, 300e9).why}
        return
    yield from compare(SETTINGS[name][0], device, 2 if is_tiny else 12, is_tiny)


def tables(parts: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The parts of the page, as Markdown."""
    steps = {name: parts[name]["found"] for name in SETTINGS if name in parts}
    ours, theirs, alone = "fullshard", "torch FSDP2", "not sharded"

    def text(name: str, library: str, what: str, scale: float = 1.0, digits: int = 2) -> str:
        value = steps.get(name, {}).get(library, {}).get(what)
        return "" if value is None else f"{value * scale:.{digits}f}"

    def ratio(name: str, library: str, what: str) -> str:
        over, under = (steps[name].get(each, {}).get(what) for each in (ours, library))
        return f"{over / under:.2f}" if over and under else ""

    times = [
        [
            name,
            *(text(name, library, "seconds", 1e3, 1) for library in (alone, theirs, ours)),
            *(ratio(name, theirs, "seconds"), text(name, ours, "host seconds", 1e3, 1)),
            *(text(name, ours, "bytes", 1e-9), text(name, ours, "synchronizations", 1, 0)),
        ]
        for name in steps
    ]
    kinds = ("rest GiB", "peak GiB", "reserved GiB")
    gib = [[name, *(text(name, library, kind) for library in (theirs, ours) for kind in kinds)] for name in steps]
    streams = [
        [name, library, lane["stream"], lane["kernels"]]
        + [f"{lane[f'{what}, seconds'] * 1e3:.1f}" for what in ("busy", "network", "waits")]
        + [", ".join(f"{gap['seconds'] * 1e3:.1f} before `{gap['before'][:40]}`" for gap in lane["longest waits"][:2])]
        for name in steps
        for library, found in steps[name].items()
        for lane in found.get("streams", ())
    ]
    predicted = parts.get(_PREDICTIONS, {"found": {}})["found"]
    peaks = [
        [name, *(f"{each[kind]:.2f}" if kind in each else "" for kind in kinds[:2])]
        + [text(name, ours, kind) for kind in kinds[:2]]
        for name, each in predicted.items()
    ]
    machines = {f"{each['device']}, torch {each['torch']}" for found in steps.values() for each in found.values()}
    notes = {each["network in Python"] for found in steps.values() for each in found.values()} - {""}
    notes = {f"Simulated in Python: {note}" for note in notes} | {
        f"{name}, {library}: {each['graph']}"
        for name, found in steps.items()
        for library, each in found.items()
        if each.get("graph", "captured") != "captured"
    }
    run = [f"Measured by `make gpu` on: {'; '.join(sorted(machines))}.", *(f"{note}." for note in sorted(notes))]
    run += [f"`tests/gpu`: {parts[_TESTS]['found']['tests']['summary'].strip('= ')}."] if _TESTS in parts else []
    failed = [f"- {name}: {part['status'][:300]}" for name, part in parts.items() if part["status"] != "ok"]
    memory_of = [f"{library}, {kind[:-4]}" for library in (theirs, ours) for kind in kinds]
    return {
        "run": "\n".join([*run, *(["\nWhat did not end well:\n", *failed] if failed else [])]),
        "time": _table(["ms a step", alone, theirs, ours, "ratio", "host", "GB sent", "host waits"], times),
        "memory": _table(["GiB", *memory_of], gib),
        "streams": _table(["", "", "stream", "kernels", "busy", "network", "waits", "longest waits, ms"], streams),
        "predictions": _table(["GiB", "rest, predicted", "peak, predicted", "rest", "peak"], peaks),
    }


def _table(headers: list[str], rows: list[list[Any]]) -> str:
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT", "runs/gpu")), help="a folder")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--part", choices=LIMITS, help="measure one part in this process, and print what it finds")
    parser.add_argument("--read", type=Path, help="read these results, and measure nothing")
    parser.add_argument("--docs", type=Path, help="the page whose tables to replace")
    options = parser.parse_args(arguments)
    if options.read:
        parts = tables(json.loads(options.read.read_text()))
        if options.docs:
            page.update([options.docs], parts)
        else:
            print("\n\n".join(parts.values()))
        return 0
    if not (options.tiny or options.part == _PREDICTIONS or torch.cuda.is_available()):
        print("benchmarks.gpu needs a GPU that torch.cuda sees, and there is none: nothing was measured")
        return 0
    if options.part:
        for found in measure_part(options.part, options.tiny):
            if options.output.is_file():
                with options.output.open("a") as lines:
                    lines.write(json.dumps(found) + "\n")
            else:
                print(json.dumps(found), flush=True)
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    run = Run(options.output, options.tiny)
    for name in LIMITS:
        if name != _TESTS or not options.tiny:
            run.run(name)
    (options.output / "page.md").write_text("\n\n".join(tables(run.parts).values()) + "\n")
    return 0 if all(part["status"] == "ok" for part in run.parts.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
