"""The recipes of docs/how-to/recipes.md train like the same programs without sharding.

The code of a section runs twice on each rank: once as it is, and once with functions that shard nothing and with the
whole batch. Then every model and every average of the first run has the values of the second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import fullshard
from tests.harness import World, ranks
from tests.test_docs import code_of, sections_of

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "recipes.md"
RECIPES = sections_of(PAGE)
#: Each rank normalizes by its own batch, so that the whole batch gives different weights.
NOT_COMPARABLE = {"BatchNorm"}


def models_of(code: str) -> dict[str, nn.Module]:
    """Run the code of a recipe, and find its models."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PAGE.parents[1])  # it imports its model from tiny_model
        exec(compile(code, str(PAGE), "exec"), names)
    return {name: each for name, each in names.items() if isinstance(each, nn.Module)}


def whole_values(model: nn.Module) -> dict[str, torch.Tensor]:
    for module in model.modules():
        if isinstance(module, fullshard.FSDPModule):
            module.reshard()
    values = model.state_dict()
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in values.items()}


@ranks(2)
@pytest.mark.parametrize("recipe", sorted(RECIPES.keys() - NOT_COMPARABLE))
def test_a_recipe_trains_like_unsharded(world: World, recipe: str) -> None:
    code = code_of(RECIPES[recipe])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "is_available", lambda: False)
        patch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor)  # Muon's rounding would hide what differs
        patch.setattr(torch, "bfloat16", torch.float32)  # which it names so from torch 2.15 on
        models = models_of(code)
        for name in ("fully_shard", "fully_shard_blocks"):
            patch.setattr(fullshard, name, lambda model: model)
        patch.setattr(dist, "get_world_size", lambda *group: 1)
        patch.setattr(dist, "get_rank", lambda *group: 0)
        patch.setattr(dist, "all_reduce", lambda *arguments, **options: None)
        plain = models_of(code)
    assert models.keys() - {"alone", "layer"} == plain.keys() - {"alone", "layer"}
    assert any(isinstance(model, fullshard.FSDPModule) for model in models.values())
    for name, model in models.items():
        found, expected = whole_values(model), whole_values(plain[name])
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, msg=lambda text, name=key: f"{name}: {text}")


@ranks(2)
def test_the_statistics_of_batch_norms_are_equal_in_the_end(world: World) -> None:
    (model,) = models_of(code_of(RECIPES["BatchNorm"])).values()
    mine = list(model.buffers())
    for buffer in mine:
        theirs = buffer.clone()
        dist.broadcast(theirs, 0)
        assert torch.equal(buffer, theirs)
    assert mine[0].any()
