"""What is wrong with a job: checks of where it runs, of its first steps, and of how it ended, and what to do first.

:func:`doctor` looks from inside a program. ``fullshard doctor -- torchrun ...`` starts an unmodified one, whose ranks
tell what they find (:mod:`fullshard.report.attending`). Owns the command, what follows from what ranks told, and the
report.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn as nn

from fullshard.device import default_device_type
from fullshard.group.mesh import DataMesh, default_mesh
from fullshard.group.parameter import ShardedParameter, local_tensor
from fullshard.group.verify import verify_values
from fullshard.report.attending import FOLDER, STEPS
from fullshard.report.environment import Check, check_environment
from fullshard.report.findings import findings
from fullshard.report.recording import RankRecording, as_rank
from fullshard.schedule.unit import unit_of
from fullshard.strangers import explain_strangers, strangers_in

#: The part of a step that others wait for a rank which is worth a warning.
_SLOW = 0.1
#: Lines of the job's error output that are kept and that are shown, and lines of stacks that are shown.
_LINES, _SHOWN, _FRAMES = 100, 20, 2
#: Seconds for which a job that is ended gets to end by itself, and between two looks at it.
_GRACE, _LOOK = 20.0, 0.2
#: How torchrun tells of the first process that failed: its exit status, and its number.
_DIED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)")
_ORDER = ("error", "warning", "not checked", "ok")


@dataclass(frozen=True)
class Diagnosis:
    """What was looked at, what is worst first. ``print`` it, or take ``as_dict`` for JSON.

    Args:
        checks: what was found.
    """

    checks: tuple[Check, ...]

    @property
    def problems(self) -> tuple[Check, ...]:
        """The errors, and then the warnings."""
        return tuple(check for check in self.checks if check.result in ("error", "warning"))

    def as_dict(self) -> dict[str, Any]:
        """The same in lists, dicts and texts."""
        return {"healthy": not self.problems, "checks": [asdict(check) for check in self.checks]}

    def __str__(self) -> str:
        counts = [sum(check.result == result for check in self.checks) for result in _ORDER[:2]]
        found = " and ".join(f"{n} {name}{'s' * (n > 1)}" for n, name in zip(counts, _ORDER, strict=False) if n)
        lines = [f"fullshard doctor: {found}. What to do first:" if found else "fullshard doctor: nothing found."]
        for number, check in enumerate(self.problems, 1):
            lines += ["", f"{number}. {check.result.upper()}, {check.name}: {check.text}"]
            lines += [f"   -> {check.advice}"] if check.advice else []
        lines += ["", "Looked at:"]
        rest = [check for check in self.checks if check not in self.problems]
        lines += [f"  {check.result:<11}  {check.name:<14}  {check.text}" for check in rest]
        return "\n".join(lines)


def diagnosis_of(checks: Sequence[Check]) -> Diagnosis:
    """The checks in order, equal ones once."""
    return Diagnosis(tuple(sorted(dict.fromkeys(checks), key=lambda check: _ORDER.index(check.result))))


def doctor(model: nn.Module | None = None) -> Diagnosis:
    """What is wrong with the job in which this runs, as far as it can be seen now. Every rank must call it.

    It looks at versions, devices, threads, memory and settings of all ranks, at the transport, and sends messages
    between pairs of ranks. Before a model is sharded, its values are compared between the ranks. All values that are
    there are looked at for NaN and infinities::

        diagnosis = fullshard.doctor(model)
        if dist.get_rank() == 0:
            print(diagnosis)

    Args:
        model: sharded, or about to be; ``None`` to look at the ranks alone.

    Returns:
        the same on all ranks, but for values that are not finite, which a rank finds in its own part.
    """
    device_type = default_device_type()
    if model is not None:
        device_type = next((param.device.type for param in model.parameters() if not param.is_meta), device_type)
    if dist.is_initialized() and dist.get_world_size() and not _serves(device_type):
        device_type = "cpu"
    if not dist.is_initialized():
        default_mesh()
    assert dist.group.WORLD is not None
    checks = check_environment(dist.group.WORLD, device_type)
    return diagnosis_of([*checks, *(_values(model) if model is not None else ())])


def _serves(device_type: str) -> bool:
    return device_type in str(dist.get_backend_config())


def _values(model: nn.Module) -> Iterator[Check]:
    """Compares the values of a model that is not sharded yet, and looks for those that are not finite."""
    named = {name: local_tensor(param).detach() for name, param in model.named_parameters()}
    is_sharded = any(unit_of(module) is not None for module in model.modules())
    if is_sharded or any(each.is_meta for each in named.values()):
        why = "The model is sharded: each rank has a part." if is_sharded else "Parameters are on the meta device."
        yield Check("initial values", "not checked", why)
        if strangers := [*strangers_in(model)]:
            problem, advice = explain_strangers(model, strangers)
            yield Check("sharding", "warning", f"{problem}.", f"{advice}.")
    else:
        params = [SimpleNamespace(name=name, local=value) for name, value in named.items()]
        try:
            verify_values(
                cast("list[ShardedParameter]", params),
                cast(DataMesh, SimpleNamespace(replicate_group=None, shard_group=dist.group.WORLD)),
            )
            yield Check("initial values", "ok", "All ranks have the same.")
        except ValueError as error:
            text, _, advice = str(error).rpartition(". ")
            yield Check("initial values", "error", f"{text}.", f"{advice}.")
    floating = {k: v for k, v in named.items() if v.is_floating_point() and not v.is_meta}
    bad = [name for name, value in floating.items() if not torch.isfinite(value).all()]
    if bad:
        text = f"Rank {dist.get_rank()} has values that are not finite in {', '.join(map(repr, bad[:3]))}."
        yield Check("finite values", "error", text, "Look at how they were initialized or loaded.")
    else:
        yield Check("finite values", "ok", "All parameters are finite.")


# The command


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fullshard doctor``."""
    parser.description = "Starts a job, unmodified, looks at its first steps, ends it, and says what is wrong with it."
    parser.add_argument("--steps", type=int, default=5, help="steps of training to look at (5, at least 2)")
    parser.add_argument("--keep-running", action="store_true", help="let the job go on after these steps")
    parser.add_argument("--json", action="store_true", help="print JSON; what the job prints goes to the error output")
    parser.add_argument(
        "--patience", type=float, default=300.0, metavar="SECONDS", help="a job that hangs for so long is ended (300)"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the job: torchrun --nproc-per-node 2 file.py")
    parser.epilog = "Exit codes: 0: no problem; 1: warnings or errors; 2: the command cannot be started."
    parser.set_defaults(call=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    """Starts a job, looks at its first steps, and says what is wrong with it and what to do first."""
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if command and command[0].endswith(".py") and Path(command[0]).is_file():
        command = [sys.executable, *command]
    if not command or shutil.which(command[0]) is None or options.steps < 2:
        what = f"no command '{command[0]}'" if command and options.steps >= 2 else "give a command, and 2 steps or more"
        print(f"fullshard doctor: {what}: fullshard doctor -- torchrun --nproc-per-node 2 file.py", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="fullshard-doctor-") as folder:
        job = _Job(command, Path(folder), options)
        job.follow()
        found = job.judge()
    print(json.dumps(found.as_dict(), indent=1) if options.json else f"\n{found}", flush=True)
    return int(bool(found.problems))


@dataclass
class Told:
    """What one process of the job told.

    Args:
        lines: by their kinds, in order.
        stack: where it was when it crashed.
    """

    lines: list[dict[str, Any]]
    stack: str = ""

    @property
    def rank(self) -> str:
        return str(self.lines[-1]["rank"])

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == kind]

    @property
    def place(self) -> str:
        """Where it was last."""
        places = self.of("place")
        return places[-1]["text"] if places else "before its first module is sharded"


class _Job:
    """A job that is looked at."""

    def __init__(self, command: Sequence[str], folder: Path, options: argparse.Namespace) -> None:
        self._folder, self._options = folder, options
        environment = {**os.environ, FOLDER: str(folder), STEPS: str(options.steps)}
        self._errors: deque[str] = deque(maxlen=_LINES)
        self._process = subprocess.Popen(
            command, env=environment, stdout=sys.stderr.fileno() if options.json else None, stderr=subprocess.PIPE
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.ending = ""

    def _read(self) -> None:
        """Show the error output, and keep its end."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            text = line.decode(errors="replace")
            self._errors.append(text)
            if not self.ending:  # then the launcher complains of its end
                sys.stderr.write(text)
                sys.stderr.flush()

    def follow(self) -> None:
        """Wait until the job has ended, all its ranks have done the steps, or none tells anything any more."""
        size, news, is_over = -1, time.monotonic(), False
        while self._process.poll() is None:
            with suppress(KeyboardInterrupt):
                time.sleep(_LOOK)
            files = list(self._folder.glob("*.jsonl"))
            told = sum(file.stat().st_size for file in files)
            if told != size:
                size, news = told, time.monotonic()
                every = told_in(self._folder)
                done = sum(bool(each.of("done")) for each in every)
                ranks = max((line["ranks"] for each in every for line in each.of("begin")), default=1)
                if done >= ranks and not self._options.keep_running:
                    self.ending = "done"
                    break
                is_over = done >= ranks
            elif not is_over and time.monotonic() - news > self._options.patience:
                self.ending = "hung"
                self._abort()
                break
        self._end()

    def _abort(self) -> None:
        """Let the ranks tell where they are, and end."""
        for file in self._folder.glob("*.jsonl"):
            with suppress(ProcessLookupError):
                os.kill(int(file.stem), signal.SIGABRT)
        time.sleep(1.0)

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        self._reader.join(1.0)

    def judge(self) -> Diagnosis:
        """What follows from what the ranks told."""
        checks = judge(told_in(self._folder), self._process.returncode, self.ending, "".join(self._errors))
        return diagnosis_of(checks)


def told_in(folder: Path) -> list[Told]:
    """What each process has told, that of the lowest rank first."""
    found = []
    for file in folder.glob("*.jsonl"):
        lines = []
        for line in file.read_text().splitlines():
            with suppress(json.JSONDecodeError):  # it is being written
                lines.append(json.loads(line))
        if lines:
            stack = file.with_suffix(".stack")
            found.append(Told(lines, stack.read_text(errors="replace") if stack.exists() else ""))
    return sorted(found, key=lambda told: (len(told.rank), told.rank))


def judge(every: Sequence[Told], status: int, ending: str = "", errors: str = "") -> list[Check]:
    """What is wrong with a job.

    Args:
        every: what its processes told.
        status: its exit status.
        ending: ``done`` if it was ended after its steps, ``hung`` if it was ended because it told nothing any more.
        errors: the end of its error output.
    """
    looked = [each for each in every if each.of("place")]
    checks = list(_end_of(looked or every, status, ending, errors))  # launchers and workers are no ranks
    if not looked and not (status and not ending):
        text = "No rank sharded a model with fullshard."
        advice = "For a program of torch's FSDP start: fullshard doctor -- fullshard run torchrun ..."
        checks.append(Check("job", "error", text, advice))
    told = [line for each in looked for line in each.of("check") if not _is_fine(line)]
    told.sort(key=lambda line: float(line["time"]))
    spread = [line for line in told if line["check"]["name"] == "finite values"][1:]  # from the first one
    checks += [Check(**line["check"]) for line in told if line not in spread]
    bad = {check.name for check in checks}
    fine = [Check(**line["check"]) for each in looked for line in each.of("check") if _is_fine(line)]
    checks += [check for check in fine if check.name not in bad]
    return [*checks, *_steps_of(looked)]


def _is_fine(line: dict[str, Any]) -> bool:
    return bool(line["check"]["result"] == "ok")


def _steps_of(looked: Sequence[Told]) -> Iterator[Check]:
    """What the recordings show: which rank is slow."""
    ranks = [_warm(as_rank(rank)) for each in looked for line in each.of("recording") for rank in line["ranks"]]
    ranks = [rank for rank in ranks if rank.steps() and rank.host == ranks[0].host]  # they have one clock
    if not ranks:
        yield Check("steps", "not checked", "No steps were recorded whole after the first one.")
        return
    for finding in findings(ranks):
        is_slow = finding.kind == "slow rank" and finding.share >= _SLOW
        result = "warning" if is_slow else "ok"
        yield Check(finding.kind, result, finding.text, finding.advice)  # type: ignore[arg-type]


def _warm(rank: RankRecording) -> RankRecording:
    """Without the first step, which prepares much."""
    rank.spans = [span for span in rank.spans if span.step > 0]
    return rank


def _end_of(every: Sequence[Told], status: int, ending: str, errors: str) -> Iterator[Check]:
    """How the job ended: whose error was the first, who was killed, where ranks hang."""
    raised = sorted((line for each in every for line in each.of("error")), key=lambda line: line["time"])
    own = [line for line in raised if line["is_first"]]
    if ending == "hung":
        where = "; ".join(f"rank {each.rank} {_at(each)}" for each in every) or "no process of it imported fullshard"
        advice = "Look at what the rank that is behind does there, or give more --patience."
        yield Check("job", "error", f"The job told nothing for long and was ended: {where}.", advice)
    elif raised or (status and ending != "done"):
        silent = [each for each in every if each.of("place") and not (each.of("error") or each.of("end"))]
        if own:
            first = own[0]
            text = f"Rank {first['rank']} failed first, {first['place']}: {first['text']}"
            yield Check("job", "error", text, "Correct this first: what other ranks say follows from it.")
        elif silent:
            died = {pid: status for status, pid in _DIED.findall(errors)}  # others were ended because of them
            here = [each for each in silent if str(each.lines[0].get("pid")) in died]
            for each in here:
                status = int(died[str(each.lines[0]["pid"])])
            silent = here or silent
            where = "; ".join(f"rank {each.rank} {_at(each)}" for each in silent)
            what = f"was ended by signal {-status}" if here and status < 0 else "was killed or has crashed"
            advice = f"It {what}. Look for a lack of memory (dmesg), for who ended it, and at native code."
            yield Check("job", "error", f"The job failed, and a rank ended without a word: {where}.", advice)
        else:
            before = errors.partition("failed (exitcode: ")[0].rpartition("\n")[0]  # what torchrun says follows from it
            last = raised[0]["text"] if raised else "\n".join((before or errors).strip().splitlines()[-_SHOWN:])
            text = f"The job failed (exit status {status}): {last}"
            yield Check("job", "error", text, "Look at its output above.")
    elif not status or ending == "done":
        yield Check("job", "ok", "It ran." if ending != "done" else "It ran, and was ended after its steps.")


def _at(told: Told) -> str:
    """Where a process was, with the end of its stack."""
    main = told.stack.partition("Current thread")[2] or told.stack.rpartition("Thread ")[2]
    frames = [line.strip() for line in main.splitlines() if line.lstrip().startswith("File ")]
    theirs = [frame for frame in frames if "/fullshard/" not in frame and "/torch/" not in frame]
    stack = " and ".join((theirs or frames)[:_FRAMES])
    return f"was last {told.place}{f', {stack}' if stack else ''}"
