"""The scripts in docs/how-to/several-hosts.md: bash reads them, Slurm's runs, and the objects of Kubernetes fit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.hosts.hosts import ROOT
from tests.hosts.test_hosts import CUT, KILLED

PAGE = (ROOT / "docs" / "how-to" / "several-hosts.md").read_text()


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert found
    return found


@pytest.mark.parametrize("script", blocks("bash"))
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash reads the scripts, and is not installed")
def test_bash_reads_the_script(script: str) -> None:
    read = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert (read.returncode, read.stderr) == (0, "")


@pytest.mark.slow
def test_the_script_of_slurm_starts_the_ranks(tmp_path: Path) -> None:
    """With commands that do what those of Slurm do on one node."""
    for name, does in {"scontrol": "echo localhost; echo elsewhere", "srun": 'exec "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "torchrun").write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    program = 'import os; os.write(1, f\'rank {os.environ["RANK"]} {os.environ["WORLD_SIZE"]}\\n\'.encode())'
    (tmp_path / "train.py").write_text(program)
    (script,) = [each for each in blocks("bash") if "#SBATCH" in each]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_NNODES": "1"}
    ran = subprocess.run(
        ["bash", "-eu", "-c", script],
        cwd=tmp_path,
        env={**environment, "SLURM_JOB_NODELIST": "node[1-2]"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.split("\n"))[-4:] == [f"rank {rank} 4" for rank in range(4)]


def test_the_objects_of_kubernetes_fit_each_other() -> None:
    service, job = yaml.safe_load_all(blocks("yaml")[0])
    assert (service["apiVersion"], service["kind"], job["apiVersion"], job["kind"]) == (
        "v1",
        "Service",
        "batch/v1",
        "Job",
    )
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert spec["completionMode"] == "Indexed"
    (container,) = pod["containers"]
    command = container["command"]
    assert command[0] == "torchrun"
    assert f"--nnodes={spec['completions']}" in command
    assert spec["parallelism"] == spec["completions"]
    assert f"--rdzv-endpoint={job['metadata']['name']}-0.{pod['subdomain']}:29400" in command
    assert [each["name"] for each in container["volumeMounts"]] == [each["name"] for each in pod["volumes"]]
    assert all(isinstance(each["value"], str) for each in container["env"])


def test_the_times_that_are_promised_are_those_that_are_tested() -> None:
    assert f"| a rank is killed, or all of a host | {KILLED:.0f} s |" in PAGE
    assert f"| a host loses power, or the network is cut | {CUT:.0f} s (up to 64 ranks) |" in PAGE
