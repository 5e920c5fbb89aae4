"""Units of the wrapper whose parameters have several dtypes, against unsharded training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fullshard
from tests.harness import World, ranks
from tests.harness.compare import deviation, whole_parameters
from tests.harness.models import seeded
from tests.harness.wrapper import ORIGINAL, wrap

WIDTH = 6


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, 5, dtype=torch.float64)
        self.narrow = nn.Linear(5, 7, dtype=torch.float32)
        self.turn = nn.Parameter(torch.randn(4, 7, dtype=torch.float64).mT / 3)
        self.factor = nn.Parameter(torch.tensor(0.8))
        self.after = nn.Linear(4, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.narrow(self.before(x).float()) * self.factor)
        return x + self.after(y.double() @ self.turn)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Mixed(), Mixed()])
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float32))
        self.shift = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale + self.shift


def batch(seed: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@ranks(2, 3)
@ORIGINAL
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_parameters_of_several_dtypes_are_trained(world: World, original: bool, strategy: str) -> None:
    reference, model = seeded(Model), seeded(Model)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = wrap(fullshard, block, original=original, strategy=strategy)
    model = wrap(fullshard, model, original=original, strategy=strategy)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.02, momentum=0.9) for each in (model, reference)]
    for step in range(3):
        batches = [[batch(10 * step + 5 * micro + rank) for rank in range(world.size)] for micro in range(2)]
        for of_all in batches:
            expected = [reference(x).square().mean() for x in of_all]
            found = model(of_all[world.rank]).square().mean()
            assert deviation(found.detach(), expected[world.rank].detach()) < 1e-6
            found.backward()
            (sum(expected) / world.size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, value in whole_parameters(fullshard, model).items():
            wanted = reference.get_parameter(name).detach()
            assert value.dtype == wanted.dtype
            assert deviation(value, wanted) < 1e-6, f"{name} after step {step}"
