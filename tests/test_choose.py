"""The page on options names exactly the pairs that are refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fullshard import (
    CPUOffloadPolicy,
    DiskOffloadPolicy,
    MixedPrecisionPolicy,
    Ragged,
    WirePolicy,
    fully_shard,
)

PAGE = Path(__file__).parent.parent / "docs/how-to/choose.md"


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    hybrid, int8 = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard")), WirePolicy("int8", "int8")
    outer = {"mesh": hybrid, "outer_zero_stage": 1}
    yield {
        **{f"zero_stage={stage}": {"zero_stage": stage} for stage in range(4)},
        "reshard_after_forward=4": {"reshard_after_forward": 4},
        "persistence_threshold": {"persistence_threshold": 100},
        "a 2-D mesh": {"mesh": hybrid},
        "outer_zero_stage=1": outer,
        "wire_policy": {"wire_policy": int8},
        "outer_wire_policy": {**outer, "outer_wire_policy": int8},
        "CPUOffloadPolicy": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "DiskOffloadPolicy": {"offload_policy": DiskOffloadPolicy(str(tmp_path_factory.mktemp("disk")))},
        "MixedPrecisionPolicy": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        "Ragged()": {"shard_placement_fn": lambda param: Ragged()},
    }
    dist.destroy_process_group()


def is_refused(given: dict[str, Any]) -> bool:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    try:
        for module in (*model, model):
            fully_shard(module, **given)
    except ValueError:
        return True
    return False


def test_each_option_is_accepted_alone(options: dict[str, dict[str, Any]]) -> None:
    assert [name for name, given in options.items() if is_refused(given)] == []


def test_the_page_has_each_pair_that_is_refused(options: dict[str, dict[str, Any]]) -> None:
    refused = set[frozenset[str]]()
    for one, other in combinations(options, 2):
        given = options[one] | options[other]
        is_pair = all(given[name] is value for each in (one, other) for name, value in options[each].items())
        if is_pair and "outer_wire_policy" not in (one, other) and is_refused(given):  # that is an outer_zero_stage too
            refused.add(frozenset((one, other)))
    rows = re.findall(r"^\| `([^`]+)` \| (`.*`) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    told = {frozenset((name, other)) for name, others in rows for other in re.findall("`([^`]+)`", others)}
    assert told == refused


def test_an_outer_wire_needs_an_outer_stage(options: dict[str, dict[str, Any]]) -> None:
    without = {name: value for name, value in options["outer_wire_policy"].items() if name != "outer_zero_stage"}
    assert is_refused(without)
