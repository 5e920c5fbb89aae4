"""A rank of a job that the doctor looks at: it tells what it finds, in a file of lines of JSON.

``fullshard doctor`` starts a job with ``FULLSHARD_DOCTOR``, a directory. Each process that imports fullshard then calls
:func:`start`. At its first sharded module it tells what is wrong with its surroundings and with the initial values. In
the first steps it tells where it is, which values are not finite, and a recording. At last it tells how it ended. Owns
the functions that it puts in the places of others meanwhile. The program goes on, whatever is found.
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from fullshard import finite
from fullshard.comm.waits import WAITS, LostRankError
from fullshard.finite import NonFiniteDetector, NonFiniteError
from fullshard.group.mesh import DataMesh
from fullshard.group.parameter import ShardedParameter
from fullshard.group.verify import verify_values
from fullshard.optim import steps
from fullshard.report.environment import Check, check_environment
from fullshard.report.explain import explain
from fullshard.report.record import Recording, record
from fullshard.report.watching import Overrides
from fullshard.schedule import hooks
from fullshard.schedule.schedule import Schedule
from fullshard.schedule.unit import Unit

#: The directory in which ranks tell what they find, and how many steps are looked at.
FOLDER, STEPS = "FULLSHARD_DOCTOR", "FULLSHARD_DOCTOR_STEPS"

_SEED = "Seed all ranks alike before the model is built (torch.manual_seed), or load one state dict on all of them."


class Attendance:
    """What looks on in one process.

    Args:
        folder: where its file is written.
        steps: how many steps are looked at.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self._steps = steps
        self._name = folder / f"{os.getpid()}.jsonl"
        self._stacks = open(folder / f"{os.getpid()}.stack", "w")  # noqa: SIM115  as long as the process runs
        self._overrides = Overrides()
        self._take_over = Schedule.begin_tree
        self._schedule: Schedule | None = None
        self._detector: NonFiniteDetector | None = None
        self._recording: Recording | None = None
        self._has_looked = self._differs = self._compared = False
        self._place = ""
        self._found_at: float | None = None  # the first value that is not finite
        self.rank = os.environ.get("RANK", "0")

    def begin(self) -> None:
        """Look on from now on."""
        if not faulthandler.is_enabled():
            faulthandler.enable(self._stacks)  # tells where it was when it crashes, or is aborted because it hangs
        front_end = importlib.import_module("fullshard.fully_shard")
        self._overrides.around(front_end, "verify_parameters", self._verify)
        self._overrides.around(finite, "_expect_finite", self._expect_finite)
        self._overrides.around(steps, "strangers_of", self._find_strangers)
        hooks.when_sharded(self._sharded)
        begin = self._begin_tree

        def take_over(schedule: Schedule, module: nn.Module) -> None:
            self._take_over(schedule, module)
            begin(schedule, module)

        setattr(Schedule, "begin_tree", take_over)  # noqa: B010
        self.tell("begin", pid=os.getpid(), ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    def end(self) -> None:
        """Put back what stood in the places of others, and tell what was recorded."""
        if self._detector is not None:
            self._detector.remove()
        self._overrides.remove()
        setattr(Schedule, "begin_tree", self._take_over)  # noqa: B010
        with suppress(ValueError):
            hooks._listeners.remove(self._sharded)
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.stop()
            self.tell("recording", ranks=[asdict(rank) for rank in recording.ranks])
            if self._found_at is None:
                text = "All outputs, gradients and reduced gradients of the steps that were looked at are finite."
                self._tell_check(Check("finite values", "ok", text))
            self.tell("done")

    def ended(self, error: BaseException | None = None) -> None:
        """Tell how the program ends."""
        self.end()
        if error is None:
            self.tell("end")
        else:
            doing = WAITS.position().doing
            text, is_first = f"{type(error).__name__}: {error}", not isinstance(error, LostRankError)
            self.tell("error", text=text[:4000], place=doing, is_first=is_first)

    def tell(self, kind: str, **told: Any) -> None:
        """Write a line."""
        with open(self._name, "a") as file:
            file.write(json.dumps({"kind": kind, "rank": self.rank, "time": time.time(), **told}) + "\n")

    def _tell_check(self, check: Check) -> None:
        self.tell("check", check=asdict(check))

    def _verify(
        self, verify: Callable[..., int], params: Sequence[ShardedParameter], data: DataMesh, policy: object
    ) -> int:
        """Compare the values of parameters that are about to be sharded, after their names and shapes."""
        tag = verify(params, data, policy)
        try:
            verify_values(params, data)
            self._compared |= not all(param.local.is_meta for param in params)
        except ValueError as error:
            if not self._differs:  # the first one is enough; ranks compare on, as they did not all see this one
                self._tell_check(Check("initial values", "error", f"The{str(error).rpartition('. ')[0][3:]}.", _SEED))
            self._differs = True
        return tag

    def _sharded(self, unit: Unit) -> None:
        """Look at where the ranks run, when the first module is sharded."""
        if self._has_looked or not unit.groups:
            return
        self._has_looked = True
        self.rank = str(dist.get_rank())
        data = unit.groups[0].data
        group = data.shard_group or data.replicate_group
        process_group = dist.group.WORLD if data.mesh.size() == dist.get_world_size() else group
        assert process_group is not None
        self.tell("place", text="while its first module is sharded")
        for check in check_environment(process_group, unit.device.type):
            self._tell_check(check)

    def _begin_tree(self, schedule: Schedule, module: nn.Module) -> None:
        """Look at the first steps of a tree of modules that is trained."""
        trained = any(param.sharded.requires_grad for group in schedule.groups() for param in group.params)
        if self._schedule is not None or not trained:
            return
        self._schedule = schedule
        if not self._differs:
            text = "All ranks begin with the same." if self._compared else "Parameters were on meta when sharded."
            self._tell_check(Check("initial values", "ok" if self._compared else "not checked", text))
        self._overrides.around(schedule.passes, "begin", self._begin_pass)
        self._detector = NonFiniteDetector(module, schedule)
        with suppress(ValueError, RuntimeError):  # what cannot be explained is not told
            for advice in explain(module).advice:
                self._tell_check(Check("sharding", "ok", str(advice)))
        self._recording = record(module, self._steps)

    def _begin_pass(self, begin: Callable[..., None], kind: str, groups: Any) -> None:
        place = WAITS.position().doing
        if place != self._place:
            self._place = place
            self.tell("place", text=place)
        begin(kind, groups)
        if self._recording is not None and not self._recording.is_running:
            self.end()

    def _find_strangers(self, find: Callable[..., Iterable[tuple[str, str]]], params: Any) -> list[tuple[str, str]]:
        """Tell of trained parameters that are not sharded."""
        found = [*find(params)]
        for problem, advice in found:
            self._tell_check(Check("sharding", "warning", f"{problem}.", f"{advice}."))
        return found

    def _expect_finite(self, expect: Callable[..., None], tensor: torch.Tensor, what: str) -> None:
        """Tell of the first value that is not finite, and go on."""
        try:
            expect(tensor, what)
        except NonFiniteError as error:
            if self._found_at is None:
                self._found_at = time.time()
                is_nan = " is nan " in str(error)
                advice = "Look there: rates that are too high, a division by 0, a low precision, a bad batch."
                if not is_nan:
                    advice = "An infinity on purpose (a mask, a scaled gradient) is none to correct. " + advice
                text = f"{str(error)[:1].upper()}{str(error)[1:]}."
                self._tell_check(Check("finite values", "error" if is_nan else "warning", text, advice))


def start() -> Attendance | None:
    """Look on in this process, if it may become a rank."""
    folder = Path(os.environ[FOLDER])
    if not folder.is_dir():
        return None
    attendance = Attendance(folder, int(os.environ.get(STEPS, "5")))
    attendance.begin()
    process, before, failed = os.getpid(), sys.excepthook, []

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        failed.append(error)
        if os.getpid() == process:
            attendance.ended(error)
        before(kind, error, trace)

    def at_exit() -> None:
        if not failed and os.getpid() == process:
            attendance.ended()

    sys.excepthook = hook
    atexit.register(at_exit)
    return attendance
