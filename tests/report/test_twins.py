"""Twins of units and groups: they train as the originals do, and have no memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from fullshard.buffer import heap
from fullshard.comm.waits import WAITS
from fullshard.report.explain import explain
from fullshard.report.facts import facts_of
from fullshard.report.meta_step import MetaStep
from fullshard.report.twins import Twins
from fullshard.schedule.unit import units_in
from tests.harness import HOSTS, World, pretended_hosts, ranks


class Tied(nn.Module):
    """An embedding and a head that share a weight, which has a group of its own, and a branch that needs no input."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(64, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.middle(self.embedding(tokens)))


def tied() -> nn.Module:
    model = Tied()
    for layer in (model.embedding, model.middle, model.head):
        fullshard.fully_shard(layer)
    return fullshard.fully_shard(model)


@ranks(2, 3)
@pytest.mark.parametrize("transport", ["shm", "hosts", "p2p", "collective"])
def test_a_step_starts_what_its_twin_started(world: World, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLSHARD_TRANSPORT", transport)
    with pretended_hosts(HOSTS if transport == "hosts" else ""):
        model: Any = tied()
    tokens = torch.arange(8) + world.rank
    for _ in range(2):
        model(tokens).sum().backward()
    names = [group.name for group in (group for unit in units_in(model) for group in unit.groups)]
    step = explain(model, batch=tokens).step
    predicted = [(each.action, names[each.group]) for each in step.events if each.action in ("gather", "reduce")]
    model.free_buffers()
    found: list[tuple[str, str]] = []
    model.add_observer(lambda event: found.append((event.action, event.group)) if event.moves else None)
    model(tokens).sum().backward()
    assert [each for each in found if each[0] in ("gather", "reduce")] == predicted


@ranks(2)
def test_a_prediction_leaves_the_process_as_it_was(world: World) -> None:
    model: Any = tied()
    model(torch.arange(8)).sum().backward()
    before = WAITS.position, heap.kept, [param.grad for param in model.parameters()]
    explain(model)
    after = WAITS.position, heap.kept, [param.grad for param in model.parameters()]
    assert all(one is other for one, other in zip(before[2], after[2], strict=True))
    assert before[:2] == after[:2]


@ranks(2)
def test_twins_have_no_memory_and_are_nested_as_the_originals(world: World) -> None:
    model: Any = tied()
    twins: Twins = MetaStep(units_in(model), facts_of(model)).twins
    assert all(param.sharded.is_meta for group in twins.groups for param in group.params)
    assert [len(group.params) for group in twins.groups] == [1, 2]
    root, *others = twins.units
    assert [list(twins.outside(each)) for each in others] == [[root]] * 3
    head = others[-1]
    assert (head.groups, head.borrowed) == ([], [twins.groups[0]]), "its weight is the embedding's"
