"""Programs that run on while their workers are started again (:mod:`fullshard.elastic.keep`)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fullshard.elastic import keep
from tests.elastic.__main__ import undisturbed
from tests.elastic.jobs import _free_port, _lines

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
import os, pathlib, signal, sys, time
directory = pathlib.Path(sys.argv[1])

def leave(*_):
    (directory / "left").touch()
    sys.exit(0)

signal.signal(signal.SIGTERM, leave)
(directory / f"began-{os.getpid()}").touch()
while not (directory / "stop").exists():
    time.sleep(0.05)
sys.exit(7)
"""


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 30
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_a_program_outlives_its_worker_and_not_its_agent(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", keep.__name__, str(tmp_path / "program.py"), str(tmp_path)]
    environment = {**os.environ, "LOCAL_RANK": str(tmp_path).replace("/", "-")}  # not that of another test

    def worker() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=environment)

    def began(number: int) -> list[int]:
        found = [int(each.name[6:]) for each in tmp_path.glob("began-*")]
        return found if len(found) == number else []

    first = worker()
    (program,) = wait_for(lambda: began(1))
    first.terminate()
    assert first.wait() == 1
    second = worker()
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(5)
    assert began(1) == [program]
    os.kill(program, signal.SIGKILL)
    assert second.wait() == 1
    third = worker()
    wait_for(lambda: began(2))
    (tmp_path / "stop").touch()
    assert third.wait() == 7
    (tmp_path / "stop").unlink()
    agent = subprocess.Popen(["sh", "-c", '"$@" & wait', "agent", *command], env=environment)
    wait_for(lambda: began(3))
    assert not (tmp_path / "left").exists()
    agent.kill()
    agent.wait()
    wait_for((tmp_path / "left").exists)


@pytest.mark.slow
def test_torchrun_restarts_workers_of_all_nodes_and_only_the_dead_process_is_new(tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{_free_port()}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--rdzv-id=job"]
    torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--max-restarts=3", "--monitor-interval=0.3"]
    plan = {"steps": 100, "replicas": 2, "directory": str(tmp_path / "members"), "pause": 0.5, "micro_batches": 2}
    plan |= {"groups": "blocks", "host": "a", "processes": 2}
    agents = []
    for number, faults in enumerate(([], [(5, "forward 0", "SIGKILL")])):
        program = ["-m", keep.__name__, str(ROOT / "tests/elastic/program.py")]
        command = [*torchrun, *program, json.dumps({**plan, "faults": faults})]
        with open(tmp_path / f"{number}.out", "wb") as output:
            agents.append(subprocess.Popen(command, stdout=output, env={**os.environ, "PYTHONPATH": str(ROOT)}))
    assert [agent.wait(170) for agent in agents] == [0, 0]
    lives, dies = (_lines(str(tmp_path / f"{number}.out")) for number in (0, 1))
    assert [each["begun"] for each in (*lives, *dies) if "begun" in each].count(2) == 1, "one is new"
    assert len([each for each in lives if "begun" in each]) == 1
    assert [each["step"] for each in lives if "step" in each and "ended" not in each] == [*range(100)]
    ends = {each["digest"] for each in (*lives, *dies) if "ended" in each}
    assert ends == undisturbed(1, 2, 100).digests(100)[0]
    assert len([each for each in dies if "ended" in each]) == 1
