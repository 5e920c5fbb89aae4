"""What a new process gets (:mod:`fullshard.elastic.state`)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from fullshard.elastic.state import load_state, pack_state
from fullshard.tree import tensors


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


class Kept:
    """A user's own state, which keeps what it loads."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


def test_a_state_of_the_user_holds_any_tensors() -> None:
    """What is loaded is a copy: a process may load a packed state twice, and train in between."""
    mine = {
        "strided": torch.arange(12.0).view(3, 4).t(),
        "none": torch.empty(0, 3),
        "number": torch.tensor(7),
        "of a kind": [torch.tensor([True, False]), torch.ones(3, dtype=torch.bfloat16), torch.tensor([1j]).conj()],
        "elsewhere": torch.ones(2, device="meta"),
        "to learn": nn.Parameter(torch.ones(2)),
        "other": OrderedDict(sparse=torch.eye(2).to_sparse(), words=("a", 1, None)),
    }
    model, optimizer, _ = trained(0)
    packed = pack_state(model, optimizer, {"kept": Kept(**mine)})
    for _ in range(2):
        load_state(packed, model, optimizer, {"kept": (loaded := Kept())})
        assert loaded.values.keys() == mine.keys()
        for name, value in mine.items():
            for one, other in zip(tensors(value), tensors(loaded.values[name]), strict=True):
                assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
                assert one.is_meta or torch.equal(one.to_dense(), other.to_dense())
        assert loaded.values["other"]["words"] == ("a", 1, None)
        loaded.values["strided"].zero_()
