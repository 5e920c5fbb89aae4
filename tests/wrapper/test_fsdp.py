"""What the methods of wrapped models refuse, and what they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from tests.fully_shard.cases import groups_of, inputs
from tests.harness import World, ranks
from tests.harness.compare import whole_gradients
from tests.harness.models import MLP, seeded
from tests.harness.wrapper import ORIGINAL, wrap_blocks


@ranks(2)
def test_apply_inside_of_summon_full_params_says_where_to_call_it(world: World) -> None:
    model = fullshard.FullyShardedDataParallel(seeded(MLP))
    called: list[nn.Module] = []
    with model.summon_full_params(model), pytest.raises(ValueError, match=r"call it between steps, outside of summon"):
        model.apply(called.append)
    assert not called
    model.apply(called.append)
    assert model in called


@ranks(2)
@ORIGINAL
def test_an_error_that_is_over_costs_no_later_gradients(world: World, original: bool) -> None:
    """An instance that failed inside the root, and runs alone later, is no reason to begin a step anew."""
    model = wrap_blocks(original=original)(fullshard, seeded(MLP))
    block = model.blocks[1]
    failing = block.module.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(inputs())
    failing.remove()
    model(inputs())
    with model.no_sync():
        model(inputs()).sum().backward()
    with torch.no_grad():
        block(inputs(width=7))
    model(inputs()).sum().backward()
    reference = seeded(MLP)
    (2 * reference(inputs()).sum()).backward()
    for name, gradient in whole_gradients(fullshard, model).items():
        assert gradient is not None
        assert torch.allclose(gradient, torch.as_tensor(reference.get_parameter(name).grad), rtol=1e-5, atol=1e-6)


@ranks(2)
def test_no_sync_leaves_alone_what_becomes_of_parameters_meanwhile(world: World) -> None:
    """A root that is wrapped once more inside of it is resharded after forward, as any other instance."""
    model: Any = fullshard.FullyShardedDataParallel(seeded(MLP), use_orig_params=True)
    model(inputs())
    with model.no_sync():
        outer = fullshard.FullyShardedDataParallel(nn.Sequential(model), use_orig_params=True)
        outer(inputs())
    outer(inputs())
    assert {group.full.state.name for group in groups_of(model)} == {"SHARDED"}
