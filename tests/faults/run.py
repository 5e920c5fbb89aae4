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
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path

import torch.distributed as dist

from tests.faults.program import HARMLESS, Case, reference, run_rank

#: Seconds after which a rank hangs. The longest that is expected are 8 for a rank that is stopped, and 5 more to raise.
BOUND = 40.0
#: Seconds after the end of a rank within which the others must know.
PROMPT = 5.0
#: What an error must say, by the fault: whose it was or what ranks do differently, and in which step.
_LOST = (
    r"rank \d .*, ((in|between) the .* step ({step}|{next})\b|before its first forward).*Rank {rank} \(process \d+\) "
)
_SAYS = {
    "raise": _LOST + r"has ended in the .* of step {step}\b.*: ValueError: a bad batch",
    "kill": _LOST + r"was killed or has crashed",
    "between": _LOST + r"was killed or has crashed",
    "early": _LOST + r"has ended (between the passes of step {step}\b.*|before its first forward): its program is over",
    "delay": r"Rank \d is .*, where it has waited \d+ s for .*\. .*(Rank|ranks)( \d,)* {rank}[ ,]",
    "stop": r"Nothing arrived in 8 s(: the others wait for rank \d+(, \d+)*|, and the store, at rank {rank}, does not "
    r"answer: look there first)?\..*(Rank|ranks)( \d,)* {rank}(, \d)* "
    r"(has not reported for \d+ s \(the process is stopped\)|has not reported: the store does not answer)",
}
#: The same of a rank that had the store, and told nothing before its end.
_WITH_STORE = (
    r"|rank \d .*[Rr]anks? 0[, \d]* (\(process \d+\) has|may have) ended "
    r"\(the store in which ranks report their end has gone"
)
_DIFFER = (
    r"rank \d+ has .* where (rank \d+ has|it had) "
    r"|rank \d+ (reduces|gathers|waits for) .* where rank \d+ (reduces|gathers|waits for)"
    r"|one of them has left out a (micro-batch or a step|forward or a backward)"
)
#: The same in the last step, where a rank may be through before.
_DIFFER_AT_THE_END = _DIFFER + r"|Rank \d \(process \d+\) has ended .*: its program is over"
#: The collectives of gloo end a process whose sizes differ: it cannot say more than that.
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
        told: seconds until it raised, or was through with its steps; or those until it ended.
        printed: what it printed.
    """

    ended: str
    losses: list[float]
    said: str
    seconds: float
    told: float
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
            results.append(_result(Path(folder), rank, begin, ended.get(rank), process.exitcode or 0))
        return results


def _result(folder: Path, rank: int, begin: float, seconds: float | None, exit_code: int) -> RankResult:
    printed = (folder / f"{rank}.txt").read_text() if (folder / f"{rank}.txt").exists() else ""
    if seconds is None:
        return RankResult("hung", [], printed, BOUND, BOUND)
    with_words = folder / f"{rank}.json"
    if with_words.exists():
        said = json.loads(with_words.read_text())
        ended = "raised" if said["error"] else "returned"
        return RankResult(ended, said["losses"], said["error"] or printed, seconds, said["at"] - begin, printed)
    return RankResult("killed" if exit_code == -signal.SIGKILL else "exited", [], printed, seconds, seconds)


def judge(case: Case, results: list[RankResult]) -> str:
    """What is wrong with the results; empty if every rank trained right or ended with a clear error."""
    expected = reference(case)
    wrong = []
    for rank, result in enumerate(results):
        is_faulty = rank == case.rank and case.fault not in HARMLESS
        for at, (loss, right) in enumerate(zip(result.losses, expected[rank], strict=False)):
            # what a faulty rank computes itself in the step of its fault is no result that it was told
            is_own = is_faulty and at >= case.step * case.micro_batches
            if abs(loss - right) > 1e-4 * max(1.0, abs(right)) and not is_own:
                wrong.append(f"rank {rank}: loss {at} is {loss}, not {right}")
        if case.fault in HARMLESS:
            if case.fault == "delay" and rank != case.rank and not re.search(_says(case), result.printed):
                wrong.append(f"rank {rank} did not say that it waits: {result.printed[-800:]}")
            if result.ended != "returned" or len(result.losses) != len(expected[rank]):
                wrong.append(f"rank {rank} {result.ended} after {len(result.losses)} losses: {result.said[-800:]}")
        elif not (is_faulty and case.fault in ("kill", "between", "stop", "early")):
            wrong += [f"rank {rank} {what}" for what in _faults_of(case, rank, results)]
    return "; ".join(wrong)


def _faults_of(case: Case, rank: int, results: list[RankResult]) -> Iterator[str]:
    """What is wrong with how a rank ended that had to be told of a fault, or to tell its own."""
    result, first = results[rank], results[case.rank]
    differs = case.fault not in _SAYS
    if differs and len(result.losses) > _told_after(case):
        yield f"was told after {len(result.losses)} micro-batches"
    if result.ended == "returned":
        # what differs in the last step of one rank may have no other to tell
        if not (case.step == case.steps - 1 and (case.fault == "more" or (case.fault == "skip" and rank == case.rank))):
            yield "came to its end"
    elif result.ended in ("hung", "killed"):
        yield f"{result.ended} after {result.seconds:.0f} s: {result.said[-300:]}"
    elif rank == case.rank and case.fault == "raise":
        if "a bad batch" not in result.said:
            yield f"did not say its own error: {result.said[-300:]}"
    elif case.transport == "collective" and differs and result.ended == "exited" and _ENDED_BY_GLOO in result.said:
        return
    elif result.said.startswith("PeerFailureError") and "Traceback" in result.printed:
        yield f"buries the first error: {result.printed[-600:]}"
    elif not re.search(_says(case, _ENDED_BY_GLOO in results[0].said), result.said, re.S):
        yield f"is not clear: {result.said[-600:]}"
    elif case.fault != "stop" and result.told - first.told > PROMPT:
        yield f"was told {result.told - first.told:.1f} s late: {result.said[-300:]}"


def _says(case: Case, first_was_ended: bool = False) -> str:
    """What errors must say, as a regular expression; ``first_was_ended``: whether gloo has ended rank 0."""
    differ = _DIFFER_AT_THE_END if case.fault in ("skip", "more") and case.step == case.steps - 1 else _DIFFER
    says = _SAYS.get(case.fault, differ)
    ends_with_store = (case.rank == 0 and case.fault in ("kill", "between", "early")) or differ is _DIFFER_AT_THE_END
    ends_with_store = ends_with_store or first_was_ended
    if case.store_with_rank_0 and ends_with_store:
        says += _WITH_STORE
    for name, value in (("rank", case.rank), ("step", case.step + 1), ("next", case.step + 2)):
        says = says.replace(f"{{{name}}}", str(value))
    return says


def _told_after(case: Case) -> int:
    """The most losses that a rank may have had when it is told that ranks differ."""
    before = case.step * case.micro_batches
    return {"skip": before + case.micro_batches - 1, "more": before + case.micro_batches}.get(case.fault, before)
