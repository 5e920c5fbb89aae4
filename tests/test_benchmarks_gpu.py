"""The benchmark for machines with a GPU: its parts run on the CPU, where figures mean nothing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from benchmarks import gpu
from benchmarks.models import TINY

from fullshard.device import CPU
from tests.harness import World, ranks

pytestmark = pytest.mark.slow


@ranks(2)
def test_both_libraries_are_measured_beside_a_model_that_is_not_sharded(world: World) -> None:
    found = gpu.compare(TINY, CPU, steps=2, lengths=3, traces=None)
    assert list(found) == ["fullshard", "torch FSDP2", "not sharded"]
    for figures in found.values():
        assert figures["seconds"] > 0
        assert figures["matrix products, s"] > 0
        assert all(math.isfinite(value) for value in figures.values())
    assert "part of the peak" in gpu.table(found, 1e12)


def test_a_step_leaves_a_trace(tmp_path: Path) -> None:
    times = gpu.kernels(lambda: torch.ones(64, 64) @ torch.ones(64, 64), CPU, tmp_path / "trace.json")
    assert times["matrix products"] > 0
    assert (tmp_path / "trace.json").stat().st_size > 0


def test_operations_are_six_for_each_parameter_and_token_and_those_of_attention() -> None:
    assert gpu.operations(TINY) == 4 * (6 * (2 * 12 * 64**2 + 2048 * 64) + 6 * 2 * 4 * 64)


def test_groups_have_256_mib() -> None:
    assert gpu.GROUPS.block_bytes == pytest.approx(256 * 2**20, rel=0.01)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says that there is no GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 0
    assert "there is none" in capsys.readouterr().out
