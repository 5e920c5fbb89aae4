"""Two new layouts, by the steps of *Add a layout* in CONTRIBUTING: training with them is training of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch

from fullshard.buffer.plan import LAYOUTS, BufferPlan, Cut, Share, pack
from fullshard.group.parameter import ShardedParameter
from fullshard.policies import Placed, RowPlacement
from fullshard.ragged import RaggedShard
from tests.fully_shard.cases import environment, inputs, local, shard_mlp
from tests.harness import World, ranks
from tests.harness.compare import Training, adamw, compare, each_block
from tests.harness.models import MLP, random_batch, seeded


@dataclass(frozen=True)
class Growing(RowPlacement):
    """Rank r has a part of the rows in proportion to r + 1."""

    @staticmethod
    def cut(params: Sequence[Placed], ranks: int, turn: int) -> list[tuple[int, ...]]:
        sums = [rank * (rank + 1) // 2 for rank in range(ranks + 1)]
        return [tuple(each.shape[0] * number // sums[-1] for number in sums) for each in params]

    def placement(self, cuts: tuple[int, ...], name: str) -> RaggedShard:
        return RaggedShard(0, cuts, name)


def mirrored(plan: BufferPlan) -> BufferPlan:
    """The last rank has the first chunk of each parameter, and the first rank the last."""
    cuts = list[Cut]()
    for param, start in zip(plan.params, plan.full_offsets, strict=True):
        cut = param.cut(plan.world_size, start)
        if param.dim is not None:
            parts = [cut.chunk(plan.world_size - 1 - rank) for rank in range(plan.world_size)]
            shares = [Share(range(rank, rank + 1), first, stop - first) for rank, (first, stop) in enumerate(parts)]
            cut = replace(cut, shares=tuple(shares), is_uniform=False)
        cuts.append(cut)
    return pack(replace(plan, cuts=tuple(cuts)))


@ranks(2)
@pytest.mark.parametrize("transport", ["p2p", "shm"])
def test_a_placement_says_which_rows_each_rank_has(world: World, transport: str) -> None:
    options = {"shard_placement_fn": lambda param: Growing()}
    batch, shard = random_batch(4, 6), each_block(**options)
    with environment(FULLSHARD_TRANSPORT=transport):
        training = Training(build=lambda: seeded(MLP), shard=shard, batch=batch, optimizer=adamw)
        compare(world, training, with_torch=False)
        assert local(shard_mlp(**options).scale).shape == (1 + world.rank,)


@ranks(2)
@pytest.mark.parametrize("transport", ["p2p", "shm"])
def test_a_layout_is_a_function(world: World, transport: str) -> None:
    new = patch.dict(LAYOUTS, mirrored=mirrored), patch.object(ShardedParameter, "layout", ("mirrored", 16))
    with new[0], new[1], environment(FULLSHARD_TRANSPORT=transport):
        model, plain = shard_mlp(), seeded(MLP)
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, plain)]
        for step in range(3):
            model(inputs(2 * step + world.rank)).sum().backward()
            sum(plain(inputs(2 * step + rank)).sum() / 2 for rank in range(2)).backward()  # type: ignore[union-attr]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for sharded, whole in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(local(sharded), whole.detach().chunk(2)[1 - world.rank])
