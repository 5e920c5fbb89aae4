"""What a save and a load take: memory beside the shards, and bytes that are read."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor import Shard

import fullshard
from fullshard import checkpoint
from fullshard.checkpoint.blocks import _AHEAD, BLOCK, BlockReader, BlockWriter
from tests.checkpoint.test_save import run, sharded
from tests.harness import RankPool, World
from tests.harness.models import seeded
from tests.harness.slow import slow

MIB = 1 << 20
LAYERS, WIDTH = 8, 1024
LARGEST = 4 * WIDTH * WIDTH
#: Pages of code and objects of Python beside the tensors, on 32 MiB of parameters.
SLACK = 4 * MIB


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))


def built(cut: str) -> Any:
    if cut != "columns":
        return sharded("fully_shard" if cut == "rows" else cut, Wide)
    model = seeded(Wide)
    fullshard.fully_shard(model, shard_placement_fn=lambda param: Shard(1))
    return model


def memory(which: str) -> int:
    """Of this process, the peak (VmHWM) or now (VmRSS), in bytes."""
    found = re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def peak_of(call: Any) -> int:
    """How far the memory of this process rises above what it has, the second time: the first imports."""
    call()
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    call()
    return memory("VmHWM") - before


def peaks(world: World, folder: Path, cut: str, save: bool) -> int:
    model = built(cut)
    return peak_of(partial(checkpoint.save if save else checkpoint.load, folder, model))


@pytest.mark.parametrize("cut", ["rows", *slow("columns", "fragments")])
def test_memory_rises_by_no_more_than_the_largest_tensor(rank_pool: RankPool, tmp_path: Path, cut: str) -> None:
    saved = run(rank_pool, peaks, 2, tmp_path, "rows", True)
    assert max(saved) < LARGEST + SLACK
    for size in (2, 3, 1):
        found = run(rank_pool, peaks, size, tmp_path, cut, False)
        assert max(found) < LARGEST + SLACK, f"{[peak // MIB for peak in found]} MiB on {size} ranks"


def test_the_disk_begins_before_a_file_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []

    def begin(file: int, start: Any, nbytes: Any, how: int) -> None:
        told.append((start.value, nbytes.value))

    monkeypatch.setattr("fullshard.checkpoint.blocks._start_writeback", begin)
    writer = BlockWriter(tmp_path / "file")
    writer.write(bytes(100))
    writer.write(bytes(2 * _AHEAD))
    assert told == [(0, _AHEAD), (_AHEAD, _AHEAD)]
    writer.close()
    assert list(BlockReader(tmp_path / "file", 2 * _AHEAD + 100, writer.checksums).check()) == []


def reads(world: World, folder: Path, cut: str) -> tuple[list[tuple[str, int]], int, int]:
    """Which blocks a load reads, how many bytes these are, and how many it needs."""
    model = built(cut)
    blocks: list[tuple[str, int]] = []
    lengths: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        before = BlockReader._read

        def count(self: Any, number: int, block: memoryview) -> None:
            if self.path.name != ".metadata":
                blocks.append((self.path.name, number))
                lengths.append(len(block))
            before(self, number, block)

        patch.setattr(BlockReader, "_read", count)
        checkpoint.load(folder, model)
    held = [param.to_local() if hasattr(param, "to_local") else param for param in model.parameters()]
    return blocks, sum(lengths), sum(each.nbytes for each in held)


@pytest.mark.parametrize("cut", ["rows", *slow("fragments", "flat")])
def test_a_rank_reads_what_it_needs_once(rank_pool: RankPool, tmp_path: Path, cut: str) -> None:
    run(rank_pool, save_rows, 2, tmp_path)
    for size in (2, 3, 1):
        for rank, (blocks, read, needed) in enumerate(run(rank_pool, reads, size, tmp_path, cut)):
            assert len(blocks) == len(set(blocks))
            assert read <= needed + 2 * BLOCK * LAYERS, f"{read} bytes for {needed} on {size} ranks"
            if size == 2 and cut == "rows":
                assert {name for name, _ in blocks} == {f"__{rank}_0.distcp"}
                assert read <= needed + BLOCK


def save_rows(world: World, folder: Path) -> None:
    checkpoint.save(folder, built("rows"))
