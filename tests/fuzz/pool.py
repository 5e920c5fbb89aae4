"""Running programs on ranks: many in one job of the pool, and what became of each.

Ranks run programs of one world size one after another in one process group, and tell at the end of each whether all of
them found the same. A program that raises, dies or hangs ends its job; the pool then begins with fresh ranks, and the
rest of the programs follow in the next job.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from tests.fuzz import planted, sharding
from tests.fuzz.programs import Program
from tests.fuzz.refusals import refusal_of
from tests.fuzz.run import InvalidProgram, Run, surroundings
from tests.harness import RankPool, World, failure_report

SECONDS_OF_A_JOB = 15.0
PATIENCE = 45.0


@dataclass(frozen=True)
class Result:
    """What became of a program: `right`, `refused`, `invalid`, `differs`, or `failed` (raised, died, hung)."""

    program: Program
    kind: str
    text: str = ""
    seconds: float = 0.0

    @property
    def is_finding(self) -> bool:
        return self.kind in ("differs", "failed")


Row = tuple[str, str, float]
"""What a rank says of a program: kind, text and seconds."""


def run_programs(world: World, programs: Sequence[Program], folder: str, plant: str) -> None:
    """The main function of a job: run programs until the time is up, and write what became of each to a file."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sharding.forget_meshes()
    began = time.monotonic()
    rows: list[Row] = []
    with planted.planted(plant):
        for number, program in enumerate(programs):
            start = time.monotonic()
            kind, text = _run_one(world, program)
            if number % 8 == 7:
                gc.collect()
            late = time.monotonic() - began > SECONDS_OF_A_JOB
            kinds = _agree(world, kind, late)
            if set(kinds) - {"late"} != {kind} and kind == "right":
                kind, text = "differs", f"another rank says: {sorted(set(kinds) - {'late'})}"
            if kind in ("refused", "invalid") and set(kinds) - {"late", kind}:
                kind, text = "failed", f"this rank was {kind}, others: {kinds}: {text}"
            rows.append((kind, text, time.monotonic() - start))
            _file_of(folder, world.rank).write_text(json.dumps(rows))
            if "late" in kinds:
                break


def _file_of(folder: str, rank: int) -> Path:
    return Path(folder) / f"{rank}.json"


def _rows(folder: str, size: int) -> list[Row]:
    """What became of the programs that all ranks have ended: the worst that a rank says."""
    files = [_file_of(folder, rank) for rank in range(size)]
    told = [json.loads(file.read_text()) if file.exists() else [] for file in files]
    return [max(map(tuple, rows), key=_severity) for rows in zip(*told, strict=False)]


_KINDS = ("right", "refused", "invalid", "differs")


def _agree(world: World, kind: str, late: bool) -> list[str]:
    """What all ranks say of a program."""
    mine = torch.tensor([_KINDS.index(kind), int(late)])
    all_of_them = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(all_of_them, mine)
    found = [_KINDS[int(each[0])] for each in all_of_them]
    return found + ["late"] * any(bool(each[1]) for each in all_of_them)


def _run_one(world: World, program: Program) -> tuple[str, str]:
    try:
        with surroundings(program):
            run = Run(world, program)
            notes = run.go()
        return ("differs", "\n".join(notes)) if notes else ("right", "")
    except InvalidProgram as error:
        return "invalid", str(error)
    except Exception as error:
        refusal = refusal_of(program, error)
        if refusal is None:
            where = run._where if "run" in locals() else "when sharding"
            raise RuntimeError(f"program {program.seed}, {where}: {type(error).__name__}: {error}") from error
        return "refused", f"{refusal.name}: {traceback.format_exception_only(error)[-1].strip()}"


class Fuzzer:
    """A pool of ranks that runs programs."""

    def __init__(self, pool: RankPool, plant: str = "") -> None:
        self.pool, self.plant = pool, plant

    def results(self, programs: Iterable[Program]) -> Iterator[Result]:
        """Run programs, those of one world size together; results come in the order in which they are ready."""
        waiting: dict[int, list[Program]] = {}
        for program in programs:
            waiting.setdefault(program.world, []).append(program)
        for size, todo in sorted(waiting.items()):
            while todo:
                done = self._job(size, todo)
                yield from done
                del todo[: len(done)]

    def run(self, program: Program) -> Result:
        """Run one program."""
        return self._job(program.world, [program])[0]

    def _job(self, size: int, programs: list[Program]) -> list[Result]:
        """Run as many programs as a job does, at least one."""
        with tempfile.TemporaryDirectory() as folder:
            timeout = SECONDS_OF_A_JOB + PATIENCE
            outcomes = self.pool.run(run_programs, size, programs[:100], folder, self.plant, timeout=timeout)
            rows = _rows(folder, size)
        results = [Result(program, *row) for program, row in zip(programs, rows, strict=False)]
        if any(outcome.kind != "returned" for outcome in outcomes):
            results.append(Result(programs[len(rows)], "failed", failure_report(outcomes)))
        return results


def _severity(row: Row) -> tuple[int, int]:
    return ("right", "refused", "invalid", "differs", "failed").index(row[0]), len(row[1])
