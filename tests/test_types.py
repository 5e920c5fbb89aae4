"""What type checkers and editors know of a sharded module: `make types` reads this file, and pytest runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_type

import torch
import torch.nn as nn

import fullshard
from tests.harness import World, ranks

if TYPE_CHECKING:
    from fullshard.module import ShardedModule  # noqa: F401  (named in strings)


@ranks(1)
def test_a_sharded_module_has_the_methods_of_both_classes(world: World) -> None:
    model = fullshard.fully_shard(nn.Linear(2, 2), reshard_after_forward=True)
    assert_type(model, "ShardedModule")
    assert_type(model.unshard(), fullshard.UnshardHandle | None)
    model.reshard()
    model.set_requires_gradient_sync(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


@ranks(1)
def test_a_list_and_blocks_have_them_too(world: World) -> None:
    members = fullshard.fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)])
    assert_type(members, "list[ShardedModule]")
    model = fullshard.fully_shard_blocks(nn.Sequential(nn.Linear(2, 2)), mp_policy=fullshard.MixedPrecisionPolicy())
    assert_type(model, "ShardedModule")
    model.reshard()
    assert_type(model.state_dict(), dict[str, Any])


@ranks(1)
def test_a_wrapper_is_a_module_with_its_own_methods(world: World) -> None:
    model = fullshard.FullyShardedDataParallel(nn.Linear(2, 2))
    assert_type(model, fullshard.FullyShardedDataParallel)
    assert_type(model.module, nn.Module)
    model(torch.ones(1, 2)).sum().backward()
    assert_type(model.clip_grad_norm_(1.0), torch.Tensor)


def test_options_of_a_wrong_name_or_type_are_found() -> None:
    """An unused `type: ignore` would be an error of the type checker."""

    def wrong(module: nn.Module) -> None:
        fullshard.fully_shard(module, reshard_after_foreward=True)  # type: ignore[call-overload]
        fullshard.fully_shard(module, mp_policy=torch.bfloat16)  # type: ignore[call-overload]
        fullshard.fully_shard_blocks(module, mesh="cpu")  # type: ignore[arg-type]

    assert callable(wrong)
