"""The states of a unit: which may follow which, and what a backward inside of a forward leaves as it is."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard.schedule.states import IDLE, LEGAL, Backward, Forward, Idle, Recomputation, Use
from fullshard.schedule.unit import sharded_unit, unit_of
from tests.fully_shard.cases import assert_close
from tests.harness import World, fake_world, ranks
from tests.harness.compare import kept


def test_only_legal_transitions_are_made() -> None:
    with fake_world(2):
        unit = sharded_unit(fullshard.fully_shard(nn.Linear(2, 2)))
    states: tuple[Idle, ...] = (IDLE, Forward(Use(), set()), Recomputation(Use(), set()), Backward())
    for before, after in itertools.product(states, states[1:]):
        unit.state = before
        if after.name in LEGAL[before.name]:
            unit._change(after)
            assert unit.state is after
        else:
            with pytest.raises(RuntimeError, match=f"Linear cannot go from its {before.name} to its {after.name}"):
                unit._change(after)


class Seeing(nn.Linear):
    """Notes the states of its unit in forward and, by a hook, in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (unit := unit_of(self)) is None:
            return super().forward(x)
        self.seen = [*getattr(self, "seen", ()), unit.state.name]
        y = super().forward(x)
        y.register_hook(lambda _: self.seen.append(unit.state.name))
        return y


class Two(nn.Module):
    """Two modules that are sharded together. Between their forwards, the backward of the first may run."""

    def __init__(self, recomputes: bool, is_nested: bool) -> None:
        super().__init__()
        self.first, self.second = Seeing(2, 2), Seeing(2, 2)
        self.recomputes, self.is_nested = recomputes, is_nested

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.first, x, use_reentrant=False) if self.recomputes else self.first(x)
        if self.is_nested:
            y.sum().backward()
        z: torch.Tensor = self.second(x if self.is_nested else y)
        return z


@ranks(2)
@pytest.mark.parametrize(
    ("recomputes", "is_nested", "states"),
    [
        (False, False, ["forward", "backward"]),
        (True, False, ["forward", "backward", "backward"]),
        (False, True, ["forward", "forward"]),
    ],
)
def test_a_unit_goes_through_its_states(world: World, recomputes: bool, is_nested: bool, states: list[str]) -> None:
    torch.manual_seed(0)
    model = Two(recomputes, is_nested)
    whole = copy.deepcopy(model)
    fullshard.fully_shard([model.first, model.second])
    fullshard.fully_shard(model)
    for each in (model, whole):
        each(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert model.first.seen == states
    assert sharded_unit(model.first).state is IDLE
    for param, expected in zip(model.parameters(), whole.parameters(), strict=True):
        assert expected.grad is not None
        assert_close(kept(param.grad), expected.grad, "gradient")
