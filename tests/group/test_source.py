"""Where a gather takes values from; tests/group/test_replica.py has the shard of a replica, tests/disk what is read."""

from __future__ import annotations

import torch
from torch import nn

import fullshard
from fullshard import MixedPrecisionPolicy
from fullshard.group.source import Source, StagedSource
from tests.fully_shard.cases import groups_of
from tests.harness import fake_world


def test_a_copy_is_needed_where_the_computation_has_another_dtype() -> None:
    for dtype in (None, torch.float32, torch.bfloat16):
        with fake_world(2):
            policy = MixedPrecisionPolicy(param_dtype=dtype)
            (group,) = groups_of(fullshard.fully_shard(nn.Linear(4, 4), mp_policy=policy))
            source = group.full.source
            assert type(source) is (StagedSource if dtype is torch.bfloat16 else Source)
            source.start((0, 0))
            source.finish()
            (view,) = source.views
            assert torch.equal(view, group.shard.views[0].to(dtype))
            source.release()
