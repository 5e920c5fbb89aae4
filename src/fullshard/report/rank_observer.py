"""The doctor's observer in each rank of a job. It writes what it finds into a file of JSON lines.

``fullshard doctor`` starts a job with ``FULLSHARD_DOCTOR`` set to a directory. Each process that imports fullshard then
calls :func:`start`. When its first module is sharded, the observer checks the environment and the initial values. In
the first steps it reports the position of the rank and values that are not finite, and takes a trace. At the end it
reports how the program ended. Whatever is found, the program continues. Owns the functions that it replaces for this.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from fullshard import finite
from fullshard.comm.waits import WAITS, PeerFailureError
from fullshard.finite import NanDetector, NanError
from fullshard.first_values import verify_values
from fullshard.group.mesh import DataMesh
from fullshard.group.parameter import ShardedParameter
from fullshard.group.step import Action
from fullshard.optim import steps
from fullshard.report.environment import Check, check_environment
from fullshard.report.explain import explain
from fullshard.report.profile import Trace, profile
from fullshard.schedule import hooks
from fullshard.schedule.schedule import Schedule, Scheduled, first_checks
from fullshard.schedule.unit import Unit

#: Environment variables: the directory for the ranks' files, and how many steps are observed.
FOLDER, STEPS = "FULLSHARD_DOCTOR", "FULLSHARD_DOCTOR_STEPS"

_SEED = "Seed all ranks alike before the model is built (torch.manual_seed), or load one state dict on all of them."


class RankObserver:
    """Observes one process.

    Args:
        folder: where its file is written.
        steps: how many steps are observed.
    """

    def __init__(self, directory: Path, steps: int) -> None:
        self._steps = steps
        self._name = directory / f"{os.getpid()}.jsonl"
        self._stacks = open(directory / f"{os.getpid()}.stack", "w", encoding="utf-8")  # noqa: SIM115  as long as the process runs
        self._replaced: list[tuple[Any, str, Any]] = []  # functions: module, name, and what it was before
        self._schedule: Schedule | None = None
        self._is_stopped = False
        self._detector: NanDetector | None = None
        self._trace: Trace | None = None
        self._has_checked_environment = self._differs = self._compared = False
        self._position = ""
        self._found_at: float | None = None  # time at which the first value that is not finite was found
        self.rank = os.environ.get("RANK", "0")

    def begin(self) -> None:
        """Begin to observe."""
        if not faulthandler.is_enabled():
            faulthandler.enable(self._stacks)  # writes the stack if the process crashes or is aborted
        front_end = importlib.import_module("fullshard.fully_shard")
        self._replace(front_end, "verify_parameters", self._verify)
        self._replace(finite, "_expect_finite", self._expect_finite)
        self._replace(steps, "strangers_of", self._find_strangers)
        hooks.when_sharded(self._sharded)
        first_checks.append(self._begin_forward)
        self.report("begin", pid=os.getpid(), ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    def _replace(self, module: ModuleType, name: str, function: Callable[..., Any]) -> None:
        """Replace a function of a module by ``function``, which is called with it first."""
        self._replaced.append((module, name, before := getattr(module, name)))
        setattr(module, name, partial(function, before))

    def stop(self) -> None:
        """Remove what was replaced, and report the trace."""
        self._is_stopped = True  # trees that have not run yet will call it
        if self._detector is not None:
            self._detector.remove()
        while self._replaced:
            setattr(*self._replaced.pop())
        listening: list[tuple[list[Any], Any]] = [
            (hooks._listeners, self._sharded),
            (first_checks, self._begin_forward),
        ]
        if self._schedule is not None:
            listening.append((self._schedule.log.listeners, self._logged))
        for listeners, listener in listening:
            with suppress(ValueError):
                listeners.remove(listener)
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.stop()
            self.report("trace", ranks=[asdict(rank) for rank in trace.ranks])
            if self._found_at is None:
                text = "All outputs, gradients and reduced gradients of the observed steps are finite."
                self._report_check(Check("finite values", "ok", text))
            self.report("done")

    def report_end(self, error: BaseException | None = None) -> None:
        """Report how the program ends."""
        self.stop()
        if error is None:
            self.report("end")
        else:
            doing = WAITS.position().doing
            text, is_first = f"{type(error).__name__}: {error}", not isinstance(error, PeerFailureError)
            self.report("error", text=text[:4000], position=doing, is_first=is_first)

    def report(self, kind: str, **fields: Any) -> None:
        """Write a line of this kind."""
        with open(self._name, "a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "rank": self.rank, "time": time.time(), **fields}) + "\n")

    def _report_check(self, check: Check) -> None:
        self.report("check", check=asdict(check))

    def _verify(
        self, verify: Callable[..., int], params: Sequence[ShardedParameter], data: DataMesh, policy: object
    ) -> int:
        """Verify parameters that are about to be sharded, and then compare their values between ranks."""
        tag = verify(params, data, policy)
        try:
            verify_values(params, data)
            self._compared |= not all(param.local.is_meta for param in params)
        except ValueError as error:
            if not self._differs:  # report only the first; go on comparing, because other ranks may not see this one
                self._report_check(Check("initial values", "error", f"The{str(error).rpartition('. ')[0][3:]}.", _SEED))
            self._differs = True
        return tag

    def _sharded(self, unit: Unit) -> None:
        """Check the environment when the first module is sharded. Values were compared by :meth:`_verify`."""
        for each in unit.groups:
            each.first_values = None
        if self._has_checked_environment or not unit.groups:
            return
        self._has_checked_environment = True
        self.rank = str(dist.get_rank())
        data = unit.groups[0].data
        group = data.shard_group or data.replicate_group
        process_group = dist.group.WORLD if data.mesh.size() == dist.get_world_size() else group
        assert process_group is not None
        self.report("position", text="while its first module is sharded")
        for check in check_environment(process_group, unit.device.type):
            self._report_check(check)

    def _begin_forward(self, schedule: Schedule, unit: Scheduled) -> None:
        """Begin to observe the steps of the first tree of modules that is trained."""
        trained = any(param.sharded.requires_grad for group in schedule.groups for param in group.params)
        if self._is_stopped or self._schedule is not None or not trained:
            return
        self._schedule, (module, *_) = schedule, schedule.root.modules
        if not self._differs:
            text = "All ranks begin with the same." if self._compared else "Parameters were on meta when sharded."
            self._report_check(Check("initial values", "ok" if self._compared else "not checked", text))
        schedule.log.listeners.append(self._logged)
        self._detector = NanDetector(module, schedule)
        with suppress(ValueError, RuntimeError):  # no advice if the model cannot be explained
            for advice in explain(module).advice:
                self._report_check(Check("sharding", "ok", str(advice)))
        self._trace = profile(module, self._steps)

    def _logged(self, action: Action, subject: object, flag: bool) -> None:
        """Report the position where a pass begins, before ranks wait for each other."""
        if action != "begin":
            return
        position = WAITS.position().doing
        if position != self._position:
            self._position = position
            self.report("position", text=position)
        if self._trace is not None and not self._trace.is_running:
            self.stop()

    def _find_strangers(self, find: Callable[..., Iterable[tuple[str, str]]], params: Any) -> list[tuple[str, str]]:
        """Report trained parameters that are not sharded."""
        found = [*find(params)]
        for problem, advice in found:
            self._report_check(Check("sharding", "warning", f"{problem}.", f"{advice}."))
        return found

    def _expect_finite(self, expect: Callable[..., None], tensor: torch.Tensor, what: str) -> None:
        """Report the first value that is not finite, and continue."""
        try:
            expect(tensor, what)
        except NanError as error:
            if self._found_at is None:
                self._found_at = time.time()
                is_nan = " is nan " in str(error)
                advice = "Possible causes: a learning rate that is too high, a division by 0, low precision, bad data."
                if not is_nan:
                    advice = "An intended infinity (a mask, a scaled gradient) needs no correction. " + advice
                text = f"{str(error)[:1].upper()}{str(error)[1:]}."
                self._report_check(Check("finite values", "error" if is_nan else "warning", text, advice))


def start() -> RankObserver | None:
    """Begin to observe this process, if it may become a rank."""
    directory = Path(os.environ[FOLDER])
    if not directory.is_dir():
        return None
    observer = RankObserver(directory, int(os.environ.get(STEPS, "5")))
    observer.begin()
    process, before, failed = os.getpid(), sys.excepthook, []

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        failed.append(error)
        if os.getpid() == process:
            observer.report_end(error)
        before(kind, error, trace)

    def at_exit() -> None:
        if not failed and os.getpid() == process:
            observer.report_end()

    sys.excepthook = hook
    atexit.register(at_exit)
    return observer
