"""Fragments and flat parameters: which run of elements a rank has, and what is said of values that are not there."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fullshard import FullyShardedDataParallel
from fullshard.wrapper.flat import FLAT_NAME, FlatParameter, Fragment, Hidden, ShardMetadata, flat_name
from tests.fully_shard.cases import groups_of
from tests.harness import fake_world


def test_the_runs_of_all_ranks_are_each_parameter() -> None:
    runs = []
    for each in range(3):
        with fake_world(3, each):
            model = FullyShardedDataParallel(nn.Linear(5, 3), use_orig_params=True)
            (group,) = groups_of(model)
            assert all(isinstance(param, Fragment) for param in group.params)
            runs.append([param.run for param in group.params])
            assert [param.numel() for param in model.parameters()] == [stop - start for start, stop in runs[-1]]
    for index, numel in enumerate((15, 3)):
        found = [number for each in runs for number in range(*each[index])]
        assert found == list(range(numel))


@pytest.mark.parametrize(
    ("rank", "offsets"), [(0, {"weight": (0, 8)}), (1, {"weight": (9, 14), "bias": (0, 2)})], ids=["first", "second"]
)
def test_a_flat_parameter_says_what_it_holds(rank: int, offsets: dict[str, tuple[int, int]]) -> None:
    with fake_world(2, rank):
        ((name, flat),) = FullyShardedDataParallel(nn.Linear(5, 3)).named_parameters()
    assert name.endswith(f".{FLAT_NAME}")
    assert isinstance(flat, FlatParameter)
    assert flat._fqns == ("weight", "bias")
    assert flat._numels == (15, 3)
    assert isinstance(flat.shard_metadata, ShardMetadata)
    found = zip(flat.shard_metadata.param_names, flat.shard_metadata.param_offsets, strict=True)
    assert dict(found) == offsets


def test_values_that_are_not_there_are_refused_by_name() -> None:
    inner = nn.Linear(5, 3)
    with fake_world(2):
        FullyShardedDataParallel(inner)
    assert isinstance(inner.weight, Hidden)
    assert (inner.weight.shape, inner.weight.dtype, len(inner.weight)) == ((3, 5), torch.float32, 3)
    assert copy.deepcopy(inner.weight) is inner.weight
    with pytest.raises(RuntimeError, match=r"the values of parameter 'weight' exist only while .* \(add\)"):
        inner.weight + 1
    assert torch.zeros(2, dtype=torch.float64).type_as(inner.weight).dtype == torch.float32


def test_names_of_flat_parameters_are_counted_from_the_second() -> None:
    assert [flat_name(number) for number in range(3)] == ["_flat_param", "_flat_param_1", "_flat_param_2"]


def test_a_flat_parameter_is_known_as_one_and_no_other_tensor_is() -> None:
    assert isinstance(FlatParameter(torch.zeros(2)), FlatParameter)
    assert type(FlatParameter()) is nn.Parameter
    assert not isinstance(nn.Parameter(torch.zeros(2)), FlatParameter)
    assert not isinstance(5, FlatParameter)
