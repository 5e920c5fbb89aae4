"""What a new process gets (:mod:`fullshard.elastic.state`)."""

from __future__ import annotations

import torch
from torch import nn

from fullshard.elastic.state import load_state, pack_state


def trained(steps: int) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.StepLR]:
    torch.manual_seed(steps)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(steps):
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def test_a_loaded_state_goes_on_with_the_same_bits() -> None:
    model, optimizer, scheduler = trained(3)
    other, other_optimizer, other_scheduler = trained(0)
    data = pack_state(model, optimizer, {"scheduler": scheduler})
    load_state(data, other, other_optimizer, {"scheduler": other_scheduler})
    batch = torch.randn(4, 3)
    for each, its_optimizer, its_scheduler in (
        (model, optimizer, scheduler),
        (other, other_optimizer, other_scheduler),
    ):
        each.zero_grad()
        each(batch).square().mean().backward()
        its_optimizer.step()
        its_scheduler.step()
    for mine, loaded in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(mine, loaded)
    assert other_scheduler.get_last_lr() == scheduler.get_last_lr()
