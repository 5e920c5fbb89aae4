"""Runs a program on its ranks, ends what does not end, and judges what came of it."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path

import torch.distributed as dist

from tests.faults.program import HARMLESS, Case, reference, run_rank

#: Seconds after which a rank hangs. The longest that is expected are 8 for a rank that is stopped, and 5 more to raise.
BOUND = 40.0
#: What an error must name, by the fault: the rank, or what ranks do differently.
_NAMES = {
    "raise": r"rank {rank}\b.*a bad batch",
    "kill": r"rank {rank}\b",
    "stop": r"rank {rank}\b|ranks? .*\b{rank}\b",
    "early": r"rank {rank}\b",
}
_DIFFER = (
    r"rank \d+ has .* where rank \d+|rank \d+ reduces .* where rank \d+|left out|of other parameters|rank {rank}\b"
)
#: The collectives of gloo end a process whose sizes differ.
_ENDED_BY_GLOO = "gloo::EnforceNotMet"

_context = multiprocessing.get_context("forkserver")
# What a rank would import at its start, at its first DTensor, and (pytest) because it is the program of its parent.
_context.set_forkserver_preload(["tests.faults.program", "torch._dynamo", "pytest"])


@dataclass
class RankResult:
    """What came of a rank.

    Args:
        ended: ``returned``, ``raised``, ``killed``, ``exited`` or ``hung``.
        losses: of its steps.
        said: its error, or what it printed.
        seconds: until it ended.
        printed: what it printed.
    """

    ended: str
    losses: list[float]
    said: str
    seconds: float
    printed: str = ""


def run(case: Case) -> list[RankResult]:
    """Run the ranks of a case, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        store = None
        if case.store_with_rank_0:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
        else:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = store.port
        processes = [_context.Process(target=run_rank, args=(case, rank, port, folder)) for rank in range(case.world)]
        begin = time.monotonic()
        for process in processes:
            process.start()
        ended: dict[int, float] = {}
        running = {process.sentinel: rank for rank, process in enumerate(processes)}
        # whoever is stopped does not end
        while running and not (case.fault == "stop" and [*running.values()] == [case.rank]):
            ready = connection.wait([*running], begin + BOUND - time.monotonic())
            if not ready:
                break
            ended |= {running.pop(one): time.monotonic() - begin for one in ready}  # type: ignore[call-overload]
        results = []
        for rank, process in enumerate(processes):
            if rank not in ended:
                os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
            results.append(_result(Path(folder), rank, ended.get(rank), process.exitcode or 0))
        return results


def _result(folder: Path, rank: int, seconds: float | None, exit_code: int) -> RankResult:
    printed = (folder / f"{rank}.txt").read_text() if (folder / f"{rank}.txt").exists() else ""
    if seconds is None:
        return RankResult("hung", [], printed, BOUND)
    with_words = folder / f"{rank}.json"
    if with_words.exists():
        said = json.loads(with_words.read_text())
        ended = "raised" if said["error"] else "returned"
        return RankResult(ended, said["losses"], said["error"] or printed, seconds, printed)
    return RankResult("killed" if exit_code == -signal.SIGKILL else "exited", [], printed, seconds)


def judge(case: Case, results: list[RankResult]) -> str:
    """What is wrong with the results; empty if every rank trained right or ended with a clear error."""
    expected = reference(case)
    wrong = []
    is_harmless = case.fault in HARMLESS
    differs = case.fault not in ("raise", "kill", "stop", "early", *HARMLESS)
    for rank, result in enumerate(results):
        is_faulty = rank == case.rank and not is_harmless
        for at, (loss, right) in enumerate(zip(result.losses, expected[rank], strict=False)):
            # what a faulty rank computes itself in the step of its fault is no result that it was told
            is_own = is_faulty and at >= case.step * case.micro_batches
            if abs(loss - right) > 1e-4 * max(1.0, abs(right)) and not is_own:
                wrong.append(f"rank {rank}: loss {at} is {loss}, not {right}")
        if result.ended == "returned":
            if len(result.losses) != len(expected[rank]) and not (is_faulty and case.fault in ("early", "skip")):
                wrong.append(f"rank {rank} made {len(result.losses)} micro-batches of {len(expected[rank])}")
            was_last = case.fault == "more" and case.step == case.steps - 1  # by then the others may have ended
            if not is_harmless and not is_faulty and not was_last:
                wrong.append(f"rank {rank} came to its end")
            if differs and case.step < case.steps - 1:  # later than that nothing can be told
                wrong.append(f"rank {rank} was told nothing")
            continue
        if is_harmless:
            wrong.append(f"rank {rank} {result.ended}: {result.said[-800:]}")
        elif is_faulty and case.fault in ("kill", "stop"):
            continue
        elif result.ended in ("hung", "killed"):
            wrong.append(f"rank {rank} {result.ended} after {result.seconds:.0f} s: {result.said[-300:]}")
        elif is_faulty and case.fault == "raise":
            if "a bad batch" not in result.said:
                wrong.append(f"rank {rank} did not say its own error: {result.said[-300:]}")
        elif case.transport == "collective" and differs and any(_ENDED_BY_GLOO in each.said for each in results):
            continue
        elif result.said.startswith("LostRankError") and "Traceback" in result.printed:
            wrong.append(f"rank {rank} buries the first error: {result.printed[-600:]}")
        elif not re.search(_NAMES.get(case.fault, _DIFFER).format(rank=case.rank), result.said, re.S | re.I):
            wrong.append(f"rank {rank} is not clear: {result.said[-600:]}")
    return "; ".join(wrong)
