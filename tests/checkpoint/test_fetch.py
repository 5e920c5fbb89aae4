"""In-memory replicas on one host: which are found, and from which of them training may go on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fullshard import checkpoint
from fullshard.checkpoint.blocks import CorruptCheckpointError
from fullshard.checkpoint.fetch import find_replicas
from fullshard.checkpoint.manifest import MANIFEST
from fullshard.checkpoint.ranks import Ranks


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """Step 1 is in ``disk``, and step 2 in memory."""
    save(tmp_path / "disk", 1)
    save(tmp_path / "disk", 2, tmp_path / "memory")
    return tmp_path / "memory"


def save(directory: Path, step: int, replicas: Path | None = None) -> None:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, step)
    checkpoint.save(directory, model, step=step, replicas=replicas)


def refused(memory: Path, disk: str = "disk") -> str:
    """Why training may not go on from the replica."""
    (found,) = find_replicas(memory, memory.parent / disk, Ranks(None))
    return found.refused


def test_a_replica_is_found_and_read(memory: Path, tmp_path: Path) -> None:
    assert find_replicas(tmp_path / "none", tmp_path / "disk", Ranks(None)) == []
    (found,) = find_replicas(memory, tmp_path / "disk", Ranks(None))
    assert (found.step, found.refused, found.has_others, found.source) == (2, "", False, 0)
    assert {*next(iter(found.holders.values()))[0]} == {0}
    with found.served(), found.open() as opened:
        assert torch.equal(opened.tensor("model.weight"), torch.full((2, 3), 2.0))
        assert list(opened.verify()) == []


def test_what_is_not_whole_and_no_other_host_has_is_named(memory: Path, tmp_path: Path) -> None:
    file = next(memory.glob("step-*/*.distcp"))
    data = file.read_bytes()
    middle = len(data) // 2
    file.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    (found,) = find_replicas(memory, tmp_path / "disk", Ranks(None))
    says = rf"{file.name}: .* not what was written"
    with found.served(), found.open() as opened, pytest.raises(CorruptCheckpointError, match=says):
        list(map(opened.tensor, opened.tensors))
    file.unlink()
    assert refused(memory) == f"no host has ['{file.name}'] any more"
    path = next(memory.glob(f"step-*/{MANIFEST}"))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.warns(UserWarning, match="in-memory replica .* is skipped, because it is not whole"):
        assert find_replicas(memory, tmp_path / "disk", Ranks(None)) == []
