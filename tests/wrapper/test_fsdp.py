"""What the methods of wrapped models refuse, and what they say."""

from __future__ import annotations

import pytest
from torch import nn

import fullshard
from tests.harness import World, ranks
from tests.harness.models import MLP, seeded


@ranks(2)
def test_apply_inside_of_summon_full_params_says_where_to_call_it(world: World) -> None:
    model = fullshard.FullyShardedDataParallel(seeded(MLP))
    called: list[nn.Module] = []
    with model.summon_full_params(model), pytest.raises(ValueError, match=r"call it between steps, outside of summon"):
        model.apply(called.append)
    assert not called
    model.apply(called.append)
    assert model in called
