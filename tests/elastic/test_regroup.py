"""What cannot go on over another process group (:mod:`fullshard.elastic.regroup`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fullshard import DiskOffloadPolicy, WirePolicy, fully_shard
from fullshard.elastic.regroup import problem_of
from fullshard.schedule.unit import groups_in
from tests.harness import World, ranks


@ranks(2)
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, ""),
        ({"zero_stage": 1}, ""),
        ({"zero_stage": 0}, "its parameters are on several ranks"),
        ({"wire_policy": WirePolicy(reduce="int8")}, "its wire_policy encodes messages"),
        ({"offload_policy": DiskOffloadPolicy}, "its parameters are on a disk"),
    ],
)
def test_what_an_elastic_job_cannot_train_is_said(
    world: World, tmp_path: Path, options: dict[str, Any], problem: str
) -> None:
    if options.get("offload_policy") is DiskOffloadPolicy:
        options = {"offload_policy": DiskOffloadPolicy(tmp_path)}
    model = fully_shard(nn.Linear(4, 4), **options)
    (group,) = groups_in(model, recurse=True)
    assert problem_of(group).startswith(problem)
    assert bool(problem_of(group)) == bool(problem)
