"""A predicted step: its exchanges in their order, and the memory at each peak.

`test_explain` compares predictions with real steps.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from torch import nn

import fullshard
from fullshard.buffer import slots
from fullshard.report.explain import explain
from fullshard.report.facts import ModelFacts
from fullshard.report.replay import Phase, Replay


@cache
def facts(ranks: int = 4, layers: int = 3, **options: Any) -> ModelFacts:
    def build() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))
        for layer in model:
            fullshard.fully_shard(layer, **options)
        return fullshard.fully_shard(model)

    return explain(build, ranks=ranks).facts


def actions(replay: Replay, *wanted: str, during: str = "") -> list[tuple[str, int]]:
    return [
        (each.action, each.group) for each in replay.events if each.action in wanted and during in ("", each.during)
    ]


def test_forward_gathers_ahead_and_backward_reduces_from_the_last_to_the_first() -> None:
    found = Replay(facts())
    order = [group for _, group in actions(found, "compute", during="forward")]
    assert [group for _, group in actions(found, "gather", during="forward")] == order
    assert [group for _, group in actions(found, "reduce")] == order[::-1]
    first = [each.action for each in found.events[:4]]
    assert first == ["gather", "wait", "gather", "compute"]  # the second layer is gathered while the first computes


def test_every_wait_is_for_what_was_started_before() -> None:
    under_way = Counter[tuple[str, int]]()
    for each in Replay(facts()).events:
        kind = {"wait": "gather", "wait-reduce": "reduce"}.get(each.action, each.action)
        under_way[kind, each.group] += 1 if kind == each.action else -1
        assert under_way[kind, each.group] >= 0
    assert not any(count for (kind, _), count in under_way.items() if kind != "compute")


def test_without_resharding_backward_gathers_nothing() -> None:
    found = Replay(facts(reshard_after_forward=False))
    assert actions(found, "gather", during="backward") == []
    assert {each.kind: each.count for each in found.exchanged()} == {"gather in forward": 3, "reduce": 3}


def test_bytes_of_a_kind_are_added_up() -> None:
    given = facts()
    for each in Replay(given).exchanged():
        if each.kind == "gather in forward":
            assert each.nbytes == sum(group.gather.sent for group in given.groups)
        elif each.kind == "reduce":
            assert each.nbytes == sum(group.reduction.sent for group in given.groups)


def test_one_rank_alone_exchanges_nothing() -> None:
    found = Replay(facts(ranks=1))
    assert found.exchanged() == ()
    assert actions(found, "wait", "reduce", "all-reduce") == []


def test_slots_are_shared_by_groups_that_take_turns() -> None:
    given = facts(layers=8)
    layer = max(group.whole for group in given.groups)
    found = {what: (count, size) for what, count, size in Replay(given).peaks["forward"]}
    assert found["full buffers"] == (2, layer)
    deeper = replace(given, prefetch=3)
    assert {what: count for what, count, _ in Replay(deeper).peaks["forward"]}["full buffers"] == 4


def test_a_device_gives_large_memory_back_when_a_forward_or_a_step_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    given = facts()
    monkeypatch.setattr(slots, "LARGE", given.groups[0].whole)
    device = replace(given, groups=tuple(replace(group, is_host=False) for group in given.groups))
    found, host = Replay(device), Replay(given)
    assert "full buffers" in {what for what, *_ in host.kept}
    assert "full buffers" not in {what for what, *_ in found.kept}
    assert found.peaks["forward"] == host.peaks["forward"]
    assert "full buffers" not in {what for what, *_ in found.memory_at(("forward", -1, 2))}
    gathers = [len(actions(each, "gather", during="backward")) for each in (host, found)]
    assert gathers[0] < gathers[1] == len(given.groups), "the values are gone"


def test_what_is_kept_for_the_next_step_is_at_most_the_peak() -> None:
    found = Replay(facts())
    total = {name: Phase(name, parts).nbytes for name, parts in {**found.peaks, "kept": found.kept}.items()}
    assert 0 < total["kept"] <= max(total["forward"], total["backward"])
    assert "gradients" not in {what for what, *_ in found.kept}


@pytest.mark.parametrize(("parts", "nbytes"), [((), 0), ((("a", 2, 5), ("b", 1, 3)), 13)])
def test_the_memory_of_a_phase_is_the_sum_of_its_parts(parts: Any, nbytes: int) -> None:
    assert Phase("forward", parts).nbytes == nbytes


def test_groups_whose_end_nothing_tells_are_reduced_when_the_backward_of_the_model_ends() -> None:
    given = facts()
    found, plain = Replay(given, (0, 1, 2)), Replay(given)
    assert [what for what, _ in actions(found, "compute", "reduce", during="backward")] == ["compute"] * 3 + [
        "reduce"
    ] * 3
    assert Phase("", found.peaks["backward"]).nbytes > Phase("", plain.peaks["backward"]).nbytes
