"""Runs programs on ranks: imports each once, and forks its ranks for every run, which begin as new processes do.

``python -m tests.frameworks.launcher`` reads jobs from its standard input, a line of JSON each, and answers each with a
line of JSON: the exit status of every rank, or the traceback of the import. A rank calls ``run_case(folder, options)``
of the program; what it returns on the first rank goes to ``result.json`` in the folder, what ranks print to ``rank<n>``
there. Ranks find themselves in the environment that torchrun gives them.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from tests.frameworks import library

Job = dict[str, Any]
#: Seconds that the other ranks have when one has failed.
_GRACE = 5.0


def main() -> None:
    """Answer jobs until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what programs print while they are imported is no answer
    if os.environ["FULLSHARD_PATCH"] == "0":
        library.put_torchs_on_cpu()
    for line in sys.stdin:
        job = json.loads(line)
        try:
            program = importlib.import_module(f"tests.frameworks.{job['program']}_program")
            gc.collect()
            gc.freeze()
            answer: Job = {"ended": _run(program, job)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


def _run(program: Any, job: Job) -> list[int]:
    """The exit status of each rank."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    ranks = {}
    for rank in range(job["ranks"]):
        pid = os.fork()
        if pid == 0:
            _be_a_rank(program, job, rank, port)
        ranks[pid] = rank
    ended: dict[int, int] = {}
    end = time.monotonic() + job["timeout"]
    while len(ended) < len(ranks):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            ended[pid] = os.waitstatus_to_exitcode(status)
            if ended[pid]:
                end = min(end, time.monotonic() + _GRACE)
        elif time.monotonic() > end:
            for each in ranks.keys() - ended.keys():
                os.kill(each, signal.SIGKILL)
            end = float("inf")
        else:
            time.sleep(0.01)
    return [ended[pid] for pid in ranks]


def _be_a_rank(program: Any, job: Job, rank: int, port: int) -> NoReturn:
    status = 1
    try:
        folder = Path(job["folder"])
        log = os.open(folder / f"rank{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["ranks"], "LOCAL_WORLD_SIZE": job["ranks"]}
        place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": 0}
        os.environ.update({name: str(value) for name, value in place.items()} | job["environment"])
        found = program.run_case(folder, job["options"])
        if rank == 0:
            (folder / "result.json").write_text(json.dumps(found))
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # what the launcher has to do at its end is none of a rank's business


if __name__ == "__main__":
    main()
