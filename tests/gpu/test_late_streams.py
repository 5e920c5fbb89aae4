"""How long the network takes does not change a bit of a parameter: no stream relies on another being early.

The model is "many" of `benchmarks.gpu_steps`, as one rank of eight over a simulated network; a small one without a GPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

#: Seconds of a collective, bytes of it in a second, and how many groups are gathered ahead.
TIMINGS = [(0.0, 1e15, 1), (0.0, 5e9, 1), *((latency, 300e9, depth) for latency in (0.0, 1e-3) for depth in (0, 1, 3))]
STEPS = 4
ROOT = Path(__file__).parents[2]


def train(device_type: str) -> None:
    """Print a digest of all parameters for each timing, and at last that of torch's FSDP2."""
    # Not in the process of the tests, whose torch.distributed the network would replace.
    from benchmarks.gpu_steps import LIBRARIES, MODELS, TINY, Setting, Trained

    from fullshard.rehearsal.network import connect

    torch.use_deterministic_algorithms(True, warn_only=True)
    network = connect(0, 8, 0.0, 1e15, in_python=True)
    torch.distributed.init_process_group("nccl")
    on_cpu, device = device_type == "cpu", torch.device(device_type)
    for library, latency, rate, depth in [*(("fullshard", *each) for each in TIMINGS), ("torch FSDP2", *TIMINGS[0])]:
        network.native.connect(latency, rate)
        trained = Trained(LIBRARIES[library], Setting("many"), TINY if on_cpu else MODELS["many"], device)
        if library == "fullshard":
            trained.model.set_prefetch_limit(depth)
        for _ in range(STEPS):
            trained.step()
        digest = hashlib.sha256()
        for name, param in trained.model.named_parameters():
            digest.update(name.encode() + param.to_local().detach().cpu().view(torch.uint8).numpy().tobytes())
        assert network.totals()["all-gather"].count > 0
        print(json.dumps([library, latency, rate, depth, digest.hexdigest()]), flush=True)


def test_bits_of_parameters_depend_on_no_timing_and_are_those_of_torch() -> None:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    command = [sys.executable, "-c", f"from {__name__} import train; train({device_type!r})"]
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("[")]
    assert len(found) == len(TIMINGS) + 1
    assert len({digest for *_, digest in found}) == 1, found
