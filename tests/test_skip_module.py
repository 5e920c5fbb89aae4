"""A module that some ranks leave out takes part in their gathers and reductions, with gradients of zeros."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from tests.fully_shard.cases import environment
from tests.harness import World, ranks
from tests.harness.models import seeded, shard_each


class Tower(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width if i == 0 else 8, 8) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class TwoTowers(nn.Module):
    """Embeds what a batch has: text, images, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.vision, self.head = Tower(5), Tower(7), nn.Linear(8, 3)

    def forward(self, text: Tensor | None, image: Tensor | None, leaves_out: bool = True) -> Tensor:
        start = torch.zeros(4, 8)
        if text is not None:
            start = start + self.text(text)
        elif leaves_out:
            start = fullshard.skip_module(self.text, start)
        if image is not None:
            start = start + self.vision(image)
        elif leaves_out:
            start = fullshard.skip_module(self.vision, start)
        return self.head(start)


def batch(step: int, rank: int) -> tuple[Tensor | None, Tensor | None]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    text, image = torch.randn(4, 5, generator=generator), torch.randn(4, 7, generator=generator)
    return [(text, None), (None, image), (text, image), (None, None)][(step + rank) % 4]


def sharded(front_end: str) -> Any:
    model = seeded(TwoTowers)
    if front_end == "fully_shard":
        for tower in (model.text, model.vision):
            shard_each(*tower.layers, tower)
        return fullshard.fully_shard(model)
    for tower in (model.text, model.vision):
        for index, layer in enumerate(tower.layers):
            tower.layers[index] = fullshard.FullyShardedDataParallel(layer, use_orig_params=front_end == "original")
    return fullshard.FullyShardedDataParallel(model, use_orig_params=front_end == "original")


@ranks(2, 3)
@pytest.mark.parametrize("front_end", ["fully_shard", "original", "flat"])
@pytest.mark.parametrize("transport", ["shm", "p2p", "collective"])
def test_towers_that_some_ranks_leave_out_train_as_unsharded(world: World, front_end: str, transport: str) -> None:
    with environment(FULLSHARD_TRANSPORT=transport):
        model = sharded(front_end)
    plain = seeded(TwoTowers)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain)]
    for step in range(6):
        optimizers[0].zero_grad()
        for parameter in plain.parameters():  # where no rank runs a tower too: a gradient of zeros is not None
            parameter.grad = torch.zeros_like(parameter)
        model(*batch(step, world.rank)).square().mean().backward()
        losses = [plain(*batch(step, rank), leaves_out=False).square().mean() for rank in range(world.size)]
        torch.stack(losses).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    with torch.no_grad():
        expected = plain(*batch(6, world.rank), leaves_out=False)
        torch.testing.assert_close(model(*batch(6, world.rank)), expected)


class Experts(nn.Module):
    """Two towers on hidden states, of which a rank runs one, and changes its result in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
        self.experts = nn.ModuleList(Tower(8) for _ in range(2))

    def forward(self, x: Tensor, which: int, leaves_out: bool = True) -> Tensor:
        hidden = self.first(x)
        x = hidden.clone()
        for index, expert in enumerate(self.experts):
            if index == which:
                x = x + expert(hidden)
            elif leaves_out:
                x = fullshard.skip_module(expert, x, input_has_gradient=True)
            x *= 0.5
        return self.head(x)


@ranks(2)
@pytest.mark.parametrize("transport", ["shm", "p2p", "collective"])
@pytest.mark.parametrize("dtype", [None, torch.float64], ids=["as they are", "cast"])
def test_experts_on_hidden_states_train_as_unsharded(world: World, dtype: torch.dtype | None, transport: str) -> None:
    plain, model = seeded(Experts), seeded(Experts)
    with environment(FULLSHARD_TRANSPORT=transport):
        policy = fullshard.MixedPrecisionPolicy(param_dtype=dtype)
        for expert in model.experts:
            shard_each(*expert.layers, expert, mp_policy=policy)
        fullshard.fully_shard(model, mp_policy=policy)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for step in range(3):
        batches = [torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in range(2)]
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(batches[world.rank], (step + world.rank) % 2).square().mean().backward()
        losses = [plain(batches[rank], (step + rank) % 2, leaves_out=False).square().mean() for rank in range(2)]
        torch.stack(losses).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        found = parameter.full_tensor()
        torch.testing.assert_close(found, expected, msg=lambda said, name=name: f"{name}: {said}")
