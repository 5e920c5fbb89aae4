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


def model_with(value: float) -> nn.Linear:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    return model


def save(directory: Path, step: int, replicas: Path | None = None) -> None:
    checkpoint.save(directory, model_with(step), step=step, replicas=replicas)


def test_a_replica_is_found_and_read(tmp_path: Path) -> None:
    save(tmp_path / "disk", 1)
    save(tmp_path / "disk", 2, tmp_path / "memory")
    (found,) = find_replicas(tmp_path / "memory", tmp_path / "disk", Ranks(None))
    assert (found.step, found.refused, found.has_others, found.source) == (2, "", False, 0)
    assert set(found.holders.values().__iter__().__next__()[0]) == {0}
    with found.served(), found.open() as opened:
        assert torch.equal(opened.tensor("model.weight"), torch.full((2, 3), 2.0))
        assert list(opened.verify()) == []


def test_without_replicas_there_are_none(tmp_path: Path) -> None:
    assert find_replicas(tmp_path / "memory", tmp_path / "disk", Ranks(None)) == []


def test_a_replica_of_another_training_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "disk", 1)
    save(tmp_path / "disk", 2, tmp_path / "memory")
    save(tmp_path / "other", 1)
    (found,) = find_replicas(tmp_path / "memory", tmp_path / "other", Ranks(None))
    assert found.refused == f"it belongs to a different training run than {tmp_path / 'other'}"


def test_a_replica_is_refused_once_its_step_is_on_the_disk(tmp_path: Path) -> None:
    save(tmp_path / "disk", 1)
    save(tmp_path / "disk", 2, tmp_path / "memory")
    save(tmp_path / "disk", 2)
    (found,) = find_replicas(tmp_path / "memory", tmp_path / "disk", Ranks(None))
    assert found.refused.endswith("was saved after it")


def test_a_replica_whose_checkpoint_is_gone_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "disk", 1)
    save(tmp_path / "disk", 2, tmp_path / "memory")
    (before,) = checkpoint.list_checkpoints(tmp_path / "disk")
    before.rename(tmp_path / "gone")
    (found,) = find_replicas(tmp_path / "memory", tmp_path / "disk", Ranks(None))
    assert found.refused == f"it was saved after {before.name}, which is no longer in {tmp_path / 'disk'}"


def test_a_file_that_no_host_has_any_more_is_named(tmp_path: Path) -> None:
    save(tmp_path / "disk", 1)
    save(tmp_path / "disk", 2, tmp_path / "memory")
    file = next((tmp_path / "memory").glob("step-*/*.distcp"))
    file.unlink()
    (found,) = find_replicas(tmp_path / "memory", tmp_path / "disk", Ranks(None))
    assert found.refused == f"no host has ['{file.name}'] any more"


def test_a_replica_without_its_manifest_is_passed_over_with_a_warning(tmp_path: Path) -> None:
    save(tmp_path / "disk", 1)
    save(tmp_path / "disk", 2, tmp_path / "memory")
    path = next((tmp_path / "memory").glob(f"step-*/{MANIFEST}"))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.warns(UserWarning, match="in-memory replica .* is skipped, because it is not whole"):
        assert find_replicas(tmp_path / "memory", tmp_path / "disk", Ranks(None)) == []


def test_a_flipped_bit_is_an_error_where_no_other_host_has_the_block(tmp_path: Path) -> None:
    save(tmp_path / "disk", 1)
    save(tmp_path / "disk", 2, tmp_path / "memory")
    file = next((tmp_path / "memory").glob("step-*/*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    (found,) = find_replicas(tmp_path / "memory", tmp_path / "disk", Ranks(None))
    with (
        found.served(),
        found.open() as opened,
        pytest.raises(CorruptCheckpointError, match=rf"{file.name}: .* not what was written"),
    ):
        list(map(opened.tensor, opened.tensors))
