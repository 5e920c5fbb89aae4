"""The doctor names what is wrong with a job: by what its ranks tell, and by how it ended."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard import cli
from fullshard.report.doctor import ProcessLog, diagnosis_of, judge, read_logs
from fullshard.report.environment import _CHECKS, Check, Facts, _rounds
from fullshard.report.rank_observer import RankObserver
from tests.fully_shard.cases import inputs
from tests.harness import World, ranks
from tests.harness.models import MLP
from tests.report.cases import trained


def attended(world: World, folder: Path, fault: str) -> dict[str, Any]:
    """Train on both ranks, of which rank 1 has a fault; what is found, by name."""
    observer = RankObserver(folder, steps=4)
    observer.begin()
    torch.manual_seed(world.rank if fault == "seed" else 0)
    model = MLP()
    for block in model.blocks:
        fullshard.fully_shard(block)
    train = trained(model if fault == "root" else fullshard.fully_shard(model))
    for step in range(5):
        if fault == "slow" and world.rank == 1:
            time.sleep(0.05)
        if fault == "nan" and world.rank == 1 and step == 2:
            with torch.no_grad():
                next(model.parameters()).to_local().fill_(torch.nan)  # type: ignore[union-attr]
        train(step)
    observer.report_end()
    dist.barrier()
    return {check.name: check for check in diagnosis_of(judge(read_logs(folder), 0)).checks}


@ranks(2)
@pytest.mark.parametrize("fault", ["none", "slow", "seed", "nan", "root"])
def test_what_is_wrong_is_named(world: World, tmp_path: Path, fault: str) -> None:
    found = attended(world, tmp_path, fault)
    bad = {"seed": "initial values", "nan": "finite values"}.get(fault)
    for name in ("job", "versions", "process group", "network", "initial values", "finite values"):
        assert found[name].result == ("error" if name == bad else "ok"), found[name]
    if fault == "root":
        assert found["sharding"].result == "warning"
        assert found["sharding"].text.startswith("parameters of the MLP are trained and not sharded: ['scale'].")
        assert "fully_shard(model)" in found["sharding"].advice
    else:
        assert "blocks.0" in found["sharding"].text  # what explain() advises: the groups are small
    if fault == "none":  # a rank reports each pass before it waits for the others there
        positions = [line["text"] for each in read_logs(tmp_path) for line in each.of("position")]
        for during in ("forward", "backward"):
            assert sum(text.startswith(f"in the {during} of step 1 ") for text in positions) == world.size
    if fault == "slow":
        assert found["slow rank"].result == "warning"
        assert "Rank 1 is slow" in found["slow rank"].text
    if fault == "seed":
        assert "rank 0 has '0.weight' with values" in found["initial values"].text
        assert "where rank 1 has" in found["initial values"].text
        assert "torch.manual_seed" in found["initial values"].advice
    if fault == "nan":
        assert "is nan at index" in found["finite values"].text


def problems_of(model: Any) -> list[Any]:
    """What is wrong with a model, whatever else runs on this machine."""
    return [each for each in fullshard.doctor(model).problems if each.name != "other programs"]


@ranks(2)
def test_a_program_asks_for_itself(world: World) -> None:
    torch.manual_seed(world.rank)
    model = nn.Linear(3, 3)
    found = {check.name: check for check in fullshard.doctor(model).checks}
    assert found["initial values"].result == "error"
    assert found["finite values"].result == "ok"
    torch.manual_seed(0)
    model.reset_parameters()
    fullshard.fully_shard(model)
    with torch.no_grad():
        model.weight.to_local()[0] = torch.inf  # type: ignore[operator]
    sharded = fullshard.doctor(model)
    assert "values that are not finite in 'weight'" in str(sharded)
    assert sharded.problems
    assert "initial values: " not in str(sharded).partition("\nChecked:")[0]
    model(inputs(width=3))


@ranks(2)
def test_a_program_that_forgot_the_root_is_told(world: World) -> None:
    model = MLP()
    for block in model.blocks:
        fullshard.fully_shard(block)
    (problem,) = problems_of(model)
    assert "['scale']" in problem.text
    assert "fully_shard(model)" in problem.advice
    fullshard.fully_shard(model)
    assert not problems_of(model)


def told(rank: int, *lines: dict[str, Any]) -> ProcessLog:
    known = [{"kind": "begin", "pid": rank, "ranks": 2}, {"kind": "position", "text": "in the forward of step 3"}]
    return ProcessLog([{"rank": str(rank), "time": 1.0 + rank, **line} for line in (*known, *lines)])


def test_of_ranks_that_cannot_connect_the_interface_is_to_be_named() -> None:
    """As gloo takes the address of a host's own name, which may be that of lo."""
    text = "RuntimeError: Gloo connectFullMesh failed with timed out connecting: remote=[127.0.1.1]:35244"
    line = {"kind": "error", "is_first": True, "position": "before its first module", "text": text}
    for logs, errors in (([told(0, line)], ""), ([], text)):
        (check, *_) = [each for each in judge(logs, 1, errors=errors) if each.name == "job"]
        assert "connectFullMesh" in check.text
        assert check.advice.startswith("Set GLOO_SOCKET_IFNAME to the interface that connects the hosts")


def test_of_errors_the_first_that_is_its_own_is_named() -> None:
    own = {"kind": "error", "text": "ValueError: bad batch", "position": "in the forward of step 3", "is_first": True}
    lost = {"kind": "error", "text": "PeerFailureError: rank 0 lost rank 1", "position": "there", "is_first": False}
    (job,) = [check for check in judge([told(0, lost), told(1, own)], 1) if check.name == "job"]
    assert job.text == "Rank 1 failed first, in the forward of step 3: ValueError: bad batch"
    (job,) = [check for check in judge([told(0, lost), told(1)], 1) if check.name == "job"]
    assert "ended without a message: rank 1 was last in the forward of step 3" in job.text
    launcher = ProcessLog([{"kind": "begin", "rank": "0", "pid": 7, "ranks": 1}, {**own, "rank": "0", "time": 0.0}])
    (job,) = [check for check in judge([launcher, told(0), told(1)], 1) if check.name == "job"]
    assert "ended without a message" in job.text
    torchrun = "api.py:1024] failed (exitcode: -9) local_rank: 1 (pid: 1) of binary: python"
    (job,) = [check for check in judge([told(0), told(1)], 1, errors=torchrun) if check.name == "job"]
    assert "rank 0" not in job.text
    assert "ended by signal 9" in job.advice
    torchrun = f"train.py: error: unrecognized arguments: --modle\nE1123 {torchrun}\nTraceback (most recent call last):"
    (job,) = [check for check in judge([], 1, errors=torchrun) if check.name == "job"]
    assert job.text.endswith("(exit status 1): train.py: error: unrecognized arguments: --modle")
    (job,) = [check for check in judge([told(0), told(1)], -6, "hung") if check.name == "job"]
    assert "rank 0 was last in the forward of step 3; rank 1 was last" in job.text


def test_a_job_that_shards_nothing_is_told_how_to_be_looked_at() -> None:
    (job,) = [check for check in judge([], 0) if check.result == "error"]
    assert "fullshard doctor -- fullshard run torchrun" in job.advice


def test_each_pair_of_ranks_meets_in_one_round() -> None:
    for size in (2, 5, 8):
        paired = [pair for pairs in _rounds(size) for pair in pairs]
        assert sorted(paired) == [(a, b) for a in range(size) for b in range(a + 1, size)]


def facts(rank: int, host: str = "a", **known: Any) -> Facts:
    return Facts(**{"rank": rank, "host": host, "cores": [0], "crowded": 0.0, "threads": 1, "environment": {}, **known})


def looked_at(*every: Facts) -> dict[str, Check]:
    return {check.name: check for run in _CHECKS for check in run(every)}


def test_the_cores_of_ranks_are_counted_together() -> None:
    apart = [facts(rank, threads=8, cores=[*range(8 * rank, 8 * rank + 8)]) for rank in (0, 1)]
    assert looked_at(*apart)["threads"].text == "2 ranks of a compute with 16 threads, on 16 cores."
    assert looked_at(*apart)["threads"].result == "ok"
    together = looked_at(*(facts(rank, threads=8, cores=[*range(8)]) for rank in (0, 1)))["threads"]
    assert (together.result, together.advice) == ("warning", "Set OMP_NUM_THREADS=4.")


def test_interfaces_of_hosts_may_differ_and_other_settings_are_named() -> None:
    here = {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_HCA": "mlx5_0", "NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"}
    there = {**here, "NCCL_SOCKET_IFNAME": "ens3", "NCCL_IB_HCA": "mlx5_1"}
    assert looked_at(facts(0, environment=here), facts(1, "b", environment=there))["settings"].result == "ok"
    del there["NCCL_PROTO"]
    found = looked_at(facts(0, environment=here), facts(1, "b", environment=there))["settings"]
    assert found.result == "error"
    assert found.text == "NCCL_PROTO is LL on rank 0 (a), and not set on rank 1 (b)."


def test_a_rank_that_waits_for_a_core_is_told_of_other_programs() -> None:
    assert looked_at(facts(0), facts(1))["other programs"].result == "ok"
    found = looked_at(facts(0), facts(1, crowded=0.4))["other programs"]
    assert found.result == "warning"
    assert "rank 1 (a) has waited for a free core for 40 %" in found.text
    assert looked_at(facts(0, crowded=-1.0))["other programs"].result == "not checked"
    assert -1 <= Facts(rank=0).crowded < 1


PROGRAM = """
import torch, torch.distributed as dist, fullshard
dist.init_process_group("gloo", init_method="file://{store}", rank=0, world_size=1)
model = fullshard.fully_shard(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
raise ValueError("bad batch")
"""


@pytest.mark.filterwarnings("error::ResourceWarning", "error::pytest.PytestUnraisableExceptionWarning")
def test_a_job_that_crashes_is_reported_as_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.format(store=tmp_path / "store"))
    assert cli.main(["doctor", "--json", "--", str(script)]) == 1
    found = json.loads(capfd.readouterr().out)
    assert not found["healthy"]
    assert found["checks"][0]["name"] == "job"
    assert "Rank 0 failed first" in found["checks"][0]["text"]
    assert "ValueError: bad batch" in found["checks"][0]["text"]
    assert cli.main(["doctor", "--", "no-such-command"]) == 2
    assert "no command 'no-such-command'" in capfd.readouterr().err


TRAINED = """
import os, signal, time
import torch, torch.distributed as dist, fullshard
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank if {fault!r} == "seed" else 0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
for layer in model:
    fullshard.fully_shard(layer)
fullshard.fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    if rank == 1 and step == 3:
        if {fault!r} == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if {fault!r} == "error":
            raise ValueError("bad batch")
        if {fault!r} == "hang":
            time.sleep(600)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

#: What a fault makes the doctor say, by the name of the check.
SAID = {
    "none": {},
    "seed": {"initial values": "The ranks begin with different values"},
    "error": {"job": "Rank 1 failed first, between the passes of step 4"},
    "killed": {"job": "a rank ended without a message: rank 1"},
    "hang": {"job": "was ended: rank 0 was last"},
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", SAID)
def test_an_unmodified_job_of_torchrun_is_looked_at(
    fault: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }.items():
        monkeypatch.setenv(name, value)
    script = tmp_path / "script.py"
    script.write_text(TRAINED.format(fault=fault))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    status = cli.main(["doctor", "--json", "--steps=5", "--patience=30", "--", *torchrun])
    checks = json.loads(capfd.readouterr().out)["checks"]
    bad = {check["name"]: check["text"] for check in reversed(checks) if check["result"] == "error"}
    assert bad.keys() == SAID[fault].keys(), bad
    assert all(said in bad[name] for name, said in SAID[fault].items()), bad
    assert status == int(any(check["result"] in ("error", "warning") for check in checks))
    assert "network" in {check["name"] for check in checks}


def test_a_job_that_ran_is_told_whether_it_was_ended() -> None:
    for ending, text in (("", "It ran."), ("done", "It ran, and was ended after its steps.")):
        (job,) = [check for check in judge([told(0), told(1)], 0, ending) if check.name == "job"]
        assert (job.result, job.text) == ("ok", text)


@ranks(2)
def test_values_that_are_not_there_yet_are_not_compared(world: World) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    found = {check.name: check for check in fullshard.doctor(model).checks}
    assert found["initial values"].result == "not checked"
    assert found["initial values"].text == "Parameters are on the meta device."
