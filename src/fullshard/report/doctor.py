"""The doctor: checks a job's environment, its first steps and its end, and says what to correct first.

:func:`doctor` is called inside a program. ``fullshard doctor -- torchrun ...`` starts an unmodified program, whose
ranks write down what they find (:mod:`fullshard.report.rank_observer`). Owns the command, the conclusions from what the
ranks found, and the report.
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
from fullshard.first_values import verify_values
from fullshard.group.mesh import DataMesh
from fullshard.group.parameter import ShardedParameter, local_tensor
from fullshard.meshes import default_mesh
from fullshard.report.environment import Check, check_environment
from fullshard.report.findings import findings
from fullshard.report.rank_observer import FOLDER, STEPS
from fullshard.report.rank_trace import RankTrace, as_rank
from fullshard.schedule.unit import unit_of
from fullshard.strangers import explain_strangers, strangers_in

#: A rank is slow if the others wait for it for more than this part of a step.
_SLOW = 0.1
#: Lines of the job's error output that are kept, lines of it that are shown, and stack frames that are shown.
_LINES, _SHOWN, _FRAMES = 100, 20, 2
#: Seconds that a job has to end after SIGTERM, and seconds between two polls of it.
_GRACE, _POLL = 20.0, 0.2
#: torchrun's line about a process that failed: its exit status, and its pid.
_DIED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)")
#: What gloo says if ranks cannot connect to each other, and what to do: often the name of a host has the address of lo.
_UNCONNECTED = re.compile("connectFullMesh|failed to connect")
_NETWORK = (
    "Set GLOO_SOCKET_IFNAME to the interface that connects the hosts (ip addr), and let firewalls pass all ports."
)
_ORDER = ("error", "warning", "not checked", "ok")


@dataclass(frozen=True)
class Diagnosis:
    """The checks and their results, the worst first. ``print`` it, or use ``as_dict`` for JSON.

    Attributes:
        checks: the checks.

    Ranks: each for itself.
    """

    checks: tuple[Check, ...]

    @property
    def problems(self) -> tuple[Check, ...]:
        """The errors, followed by the warnings."""
        return tuple(check for check in self.checks if check.result in ("error", "warning"))

    def as_dict(self) -> dict[str, Any]:
        """The same as dicts, lists and strings."""
        return {"healthy": not self.problems, "checks": [asdict(check) for check in self.checks]}

    def __str__(self) -> str:
        counts = [sum(check.result == result for check in self.checks) for result in _ORDER[:2]]
        found = " and ".join(f"{n} {name}{'s' * (n > 1)}" for n, name in zip(counts, _ORDER, strict=False) if n)
        lines = [f"fullshard doctor: {found}. What to do first:" if found else "fullshard doctor: nothing found."]
        for number, check in enumerate(self.problems, 1):
            lines += ["", f"{number}. {check.result.upper()}, {check.name}: {check.text}"]
            lines += [f"   -> {check.advice}"] if check.advice else []
        lines += ["", "Checked:"]
        others = [check for check in self.checks if check not in self.problems]
        width = max((len(check.name) for check in others), default=0)
        lines += [f"  {check.result:<11}  {check.name:<{width}}  {check.text}" for check in others]
        return "\n".join(lines)


def diagnosis_of(checks: Sequence[Check]) -> Diagnosis:
    """Sorts checks by their results, and removes duplicates."""
    return Diagnosis(tuple(sorted(dict.fromkeys(checks), key=lambda check: _ORDER.index(check.result))))


def doctor(model: nn.Module | None = None) -> Diagnosis:
    """Checks the job in which it is called.

    It compares versions, devices, threads, memory and settings of all ranks, checks the transport, and measures
    messages between pairs of ranks. If the model is not sharded yet, its values are compared between ranks. All
    parameters are checked for NaN and infinities::

        diagnosis = fullshard.doctor(model)
        if dist.get_rank() == 0:
            print(diagnosis)

    Args:
        model: a model, before or after sharding; ``None`` to check only the ranks.

    Returns:
        the same on all ranks, except for values that are not finite, of which each rank checks its own part.

    Ranks: all alike.
    """
    device_type = default_device_type()
    if model is not None:
        device_type = next((param.device.type for param in model.parameters() if not param.is_meta), device_type)
    if dist.is_initialized() and device_type not in str(dist.get_backend_config()):
        device_type = "cpu"
    if not dist.is_initialized():
        default_mesh()
    assert dist.group.WORLD is not None
    checks = check_environment(dist.group.WORLD, device_type)
    return diagnosis_of([*checks, *(_values(model) if model is not None else ())])


def _values(model: nn.Module) -> Iterator[Check]:
    """Compares the values of an unsharded model between ranks, and checks that all values are finite."""
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
    parser.description = "Starts an unmodified job, checks its first steps, ends it, and says what is wrong with it."
    parser.add_argument("--steps", type=int, default=5, help="training steps to observe (5, at least 2)")
    parser.add_argument("--keep-running", action="store_true", help="let the job continue after these steps")
    parser.add_argument("--json", action="store_true", help="print JSON; what the job prints goes to the error output")
    parser.add_argument(
        "--patience", type=float, default=300.0, metavar="SECONDS", help="end a job that hangs for this long (300)"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the job: torchrun --nproc-per-node 2 file.py")
    parser.epilog = "Exit codes: 0: no problem; 1: warnings or errors; 2: the command cannot be started."
    parser.set_defaults(call=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    """Runs the command: starts a job, checks its first steps, and prints the diagnosis."""
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if command and command[0].endswith(".py") and Path(command[0]).is_file():
        command = [sys.executable, *command]
    if not command or shutil.which(command[0]) is None or options.steps < 2:
        what = f"no command '{command[0]}'" if command and options.steps >= 2 else "give a command, and 2 steps or more"
        print(f"fullshard doctor: {what}: fullshard doctor -- torchrun --nproc-per-node 2 file.py", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="fullshard-doctor-") as folder:
        job = _ObservedJob(command, Path(folder), options)
        job.follow()
        found = job.judge()
    print(json.dumps(found.as_dict(), indent=1) if options.json else f"\n{found}", flush=True)
    return int(bool(found.problems))


@dataclass
class ProcessLog:
    """What one process of the job wrote.

    Args:
        lines: its lines, in order.
        stack: its stack if it crashed.
    """

    lines: list[dict[str, Any]]
    stack: str = ""

    @property
    def rank(self) -> str:
        return str(self.lines[-1]["rank"])

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == kind]

    @property
    def position(self) -> str:
        """The last position that the process reported."""
        positions = self.of("position")
        return positions[-1]["text"] if positions else "before its first module is sharded"


class _ObservedJob:
    """A job that the doctor started."""

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
        """Pass on the job's error output, and keep its last lines."""
        assert self._process.stderr is not None
        with self._process.stderr as errors:
            for line in errors:
                text = line.decode(errors="replace")
                self._errors.append(text)
                if not self.ending:  # once the doctor ends the job, the launcher only complains about that
                    sys.stderr.write(text)
                    sys.stderr.flush()

    def follow(self) -> None:
        """Wait until the job has ended, all ranks have done the steps, or no rank writes anything any more."""
        size, changed, is_over = -1, time.monotonic(), False
        while self._process.poll() is None:
            with suppress(KeyboardInterrupt):
                time.sleep(_POLL)
            files = list(self._folder.glob("*.jsonl"))
            written = sum(file.stat().st_size for file in files)
            if written != size:
                size, changed = written, time.monotonic()
                every = read_logs(self._folder)
                done = sum(bool(each.of("done")) for each in every)
                ranks = max((line["ranks"] for each in every for line in each.of("begin")), default=1)
                if done >= ranks and not self._options.keep_running:
                    self.ending = "done"
                    break
                is_over = done >= ranks
            elif not is_over and time.monotonic() - changed > self._options.patience:
                self.ending = "hung"
                self._abort()
                break
        self._end()

    def _abort(self) -> None:
        """Abort the ranks, so that they write their stacks."""
        for file in self._folder.glob("*.jsonl"):
            with suppress(OSError):  # it has ended
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
        if self.ending == "done" and hasattr(signal, "CTRL_BREAK_EVENT"):
            self._abort()  # on Windows ranks do not end with their launcher
        self._reader.join(1.0)

    def judge(self) -> Diagnosis:
        """The diagnosis that follows from what the ranks wrote."""
        checks = judge(read_logs(self._folder), self._process.returncode, self.ending, "".join(self._errors))
        return diagnosis_of(checks)


def read_logs(folder: Path) -> list[ProcessLog]:
    """Reads what each process wrote, the lowest rank first."""
    found = []
    for file in folder.glob("*.jsonl"):
        lines = []
        for line in file.read_text(encoding="utf-8").splitlines():
            with suppress(json.JSONDecodeError):  # the line is being written
                lines.append(json.loads(line))
        if lines:
            stack = file.with_suffix(".stack")
            text = stack.read_text(encoding="utf-8", errors="replace") if stack.exists() else ""
            found.append(ProcessLog(lines, text))
    return sorted(found, key=lambda log: (len(log.rank), log.rank))


def judge(every: Sequence[ProcessLog], status: int, ending: str = "", errors: str = "") -> list[Check]:
    """What is wrong with a job.

    Args:
        every: what its processes wrote.
        status: its exit status.
        ending: ``done`` if it was ended after its steps, ``hung`` if it was ended because its ranks wrote nothing more.
        errors: the end of its error output.
    """
    rank_logs = [each for each in every if each.of("position")]
    checks = list(_end_of(rank_logs or every, status, ending, errors))  # launchers and workers are not ranks
    if not rank_logs and not (status and not ending):
        text = "No rank sharded a model with fullshard."
        advice = "For a program that uses torch's FSDP, run: fullshard doctor -- fullshard run torchrun ..."
        checks.append(Check("job", "error", text, advice))
    problems = [line for each in rank_logs for line in each.of("check") if not _is_fine(line)]
    problems.sort(key=lambda line: float(line["time"]))
    spread = [line for line in problems if line["check"]["name"] == "finite values"][1:]  # follow from the first
    checks += [Check(**line["check"]) for line in problems if line not in spread]
    bad = {check.name for check in checks}
    passed = [Check(**line["check"]) for each in rank_logs for line in each.of("check") if _is_fine(line)]
    checks += [check for check in passed if check.name not in bad]
    return [*checks, *_steps_of(rank_logs)]


def _is_fine(line: dict[str, Any]) -> bool:
    return bool(line["check"]["result"] == "ok")


def _steps_of(rank_logs: Sequence[ProcessLog]) -> Iterator[Check]:
    """Checks of the recorded steps: whether a rank is slow."""
    ranks = [_warm(as_rank(rank)) for each in rank_logs for line in each.of("trace") for rank in line["ranks"]]
    ranks = [rank for rank in ranks if rank.steps() and rank.host == ranks[0].host]  # ranks of a host have one clock
    if not ranks:
        yield Check("steps", "not checked", "No step after the first one was recorded completely.")
        return
    for finding in findings(ranks):
        is_slow = finding.kind == "slow rank" and finding.share >= _SLOW
        result = "warning" if is_slow else "ok"
        yield Check(finding.kind, result, finding.text, finding.advice)  # type: ignore[arg-type]


def _warm(rank: RankTrace) -> RankTrace:
    """The trace without the first step, in which much is prepared."""
    rank.spans = [span for span in rank.spans if span.step > 0]
    return rank


def _end_of(every: Sequence[ProcessLog], status: int, ending: str, errors: str) -> Iterator[Check]:
    """Checks how the job ended: which rank failed first, which was killed, where ranks hang."""
    raised = sorted((line for each in every for line in each.of("error")), key=lambda line: line["time"])
    own = [line for line in raised if line["is_first"]]
    if ending == "hung":
        where = (
            "; ".join(f"rank {each.rank} {_describe_position(each)}" for each in every)
            or "no process of it imported fullshard"
        )
        advice = "Find out what the rank that is behind does there, or increase --patience."
        yield Check("job", "error", f"The job reported nothing for a long time and was ended: {where}.", advice)
    elif raised or (status and ending != "done"):
        silent = [each for each in every if each.of("position") and not (each.of("error") or each.of("end"))]
        if own:
            first = own[0]
            text = f"Rank {first['rank']} failed first, {first['position']}: {first['text']}"
            advice = "Correct this first: the errors of other ranks follow from it."
            yield Check("job", "error", text, _NETWORK if _UNCONNECTED.search(text) else advice)
        elif silent:
            died = {pid: status for status, pid in _DIED.findall(errors)}  # the others were ended because of them
            here = [each for each in silent if str(each.lines[0].get("pid")) in died]
            for each in here:
                status = int(died[str(each.lines[0]["pid"])])
            silent = here or silent
            where = "; ".join(f"rank {each.rank} {_describe_position(each)}" for each in silent)
            what = f"was ended by signal {-status}" if here and status < 0 else "was killed or has crashed"
            advice = f"It {what}. Check for a lack of memory (dmesg), for whatever ended it, and native code."
            yield Check("job", "error", f"The job failed, and a rank ended without a message: {where}.", advice)
        else:
            before = errors.partition("failed (exitcode: ")[0].rpartition("\n")[0]  # torchrun's lines follow from it
            last = raised[0]["text"] if raised else "\n".join((before or errors).strip().splitlines()[-_SHOWN:])
            text = f"The job failed (exit status {status}): {last}"
            yield Check("job", "error", text, _NETWORK if _UNCONNECTED.search(errors) else "See its output above.")
    elif not status or ending == "done":
        yield Check("job", "ok", "It ran." if ending != "done" else "It ran, and was ended after its steps.")


def _describe_position(log: ProcessLog) -> str:
    """Where a process was last, with the end of its stack."""
    main = log.stack.partition("Current thread")[2] or log.stack.rpartition("Thread ")[2]
    frames = [line.strip() for line in main.splitlines() if line.lstrip().startswith("File ")]
    user_frames = [frame for frame in frames if "/fullshard/" not in frame and "/torch/" not in frame]
    stack = " and ".join((user_frames or frames)[:_FRAMES])
    return f"was last {log.position}{f', {stack}' if stack else ''}"
