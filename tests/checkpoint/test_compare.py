"""The differences between two checkpoints, the largest first."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fullshard import checkpoint
from fullshard.checkpoint import Checkpoint
from fullshard.checkpoint.compare import compare

comparison: Any = importlib.import_module("fullshard.checkpoint.compare")


def saved(path: Path, state: dict[str, Any] | None = None, **tensors: torch.Tensor) -> Checkpoint:
    """A checkpoint of a model with these buffers."""
    model = nn.Module()
    for name, tensor in tensors.items():
        model.register_buffer(name, tensor)
    checkpoint.save(path, model, step=1, state=state)
    return Checkpoint(checkpoint.list_checkpoints(path)[0])


def differing(tmp_path: Path, one: torch.Tensor, other: torch.Tensor) -> list[tuple[float, float]]:
    """The largest and the mean difference of two tensors; nothing if they are equal."""
    found = compare(saved(tmp_path / "a", x=one), saved(tmp_path / "b", x=other))
    return [(each["max"], each["mean"]) for each in found["differing"]]


def test_what_only_one_has_and_what_has_another_shape_is_listed(tmp_path: Path) -> None:
    zeros = torch.zeros
    a = saved(tmp_path / "a", {"n": 1, "only": 2}, same=zeros(3), left=zeros(1), shape=zeros(2, 3), value=zeros(2))
    b = saved(tmp_path / "b", {"n": 5}, same=zeros(3), right=zeros(1), shape=zeros(3, 2), value=torch.tensor([0.0, 3]))
    compared = list[int]()
    found = compare(a, b, compared.append)
    assert found["only_in_a"] == ["model.left", "state.only.0"]
    assert found["only_in_b"] == ["model.right"]
    assert found["other_shape"] == [{"name": "model.shape", "a": (2, 3), "b": (3, 2)}]
    assert found["differing"] == [{"name": "model.value", "dtypes": ["float32"] * 2, "max": 3.0, "mean": 1.5}]
    assert found["values"] == [{"name": "state.n.0", "a": 1, "b": 5}]
    assert found["equal"] == 1
    assert sorted(compared) == [8, 12, 24]


def test_the_differences_of_pairs_of_tensors(tmp_path: Path) -> None:
    pairs = [
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]), []),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]), [(math.inf, math.inf)]),
        (torch.tensor([math.inf]), torch.tensor([math.inf]), []),
        (torch.tensor([math.inf]), torch.tensor([-math.inf]), [(math.inf, math.inf)]),
        (torch.tensor([math.inf, 0]), torch.tensor([1.0, 0]), [(math.inf, math.inf)]),
        (torch.tensor([2**60]), torch.tensor([2**60 + 1]), [(1.0, 1.0)]),  # equal as floating point
        (torch.tensor([True, False]), torch.tensor([True, True]), [(1.0, 0.5)]),
        (torch.tensor([1 + 1j]), torch.tensor([1 - 1j]), [(2.0, 2.0)]),
        (torch.tensor([0.5]), torch.tensor([0.5], dtype=torch.bfloat16), [(0.0, 0.0)]),  # another dtype differs too
        (torch.zeros(0), torch.zeros(0), []),
        (torch.tensor([0.0]), torch.tensor([-0.0]), []),
    ]
    for number, (one, other, difference) in enumerate(pairs):
        assert differing(tmp_path / str(number), one, other) == difference, (one, other)


def test_runs_of_a_tensor_are_compared_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "_RUN", 4)
    for at in (0, 5, 9):
        other = torch.zeros(10)
        other[at] = -5
        assert differing(tmp_path / str(at), torch.zeros(10), other) == [(5.0, 0.5)]


def test_bits_that_are_no_numbers_are_equal_or_not(tmp_path: Path) -> None:
    bits = torch.tensor([1, 2], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    other = torch.tensor([1, 3], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert comparison._difference(bits, bits.clone()) == (0, 0)
    assert comparison._difference(bits, other) == (math.inf, math.inf)
