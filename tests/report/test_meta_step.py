"""A predicted step: its exchanges in their order, and the memory at each peak.

`test_explain` compares predictions with real steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from fullshard.buffer import slots
from fullshard.report.explain import explain
from fullshard.report.facts import ModelFacts, facts_of
from fullshard.report.meta_step import MetaStep, Phase, PredictedStep
from fullshard.schedule.unit import units_in
from fullshard.torch_private import simulated_world


def built(layers: int = 3, width: int = 64, **options: Any) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    for layer in model:
        fullshard.fully_shard(layer, **options)
    return fullshard.fully_shard(model)


def found(ranks: int = 4, device: str = "cpu", **options: Any) -> PredictedStep:
    return explain(lambda: built(**options), ranks=ranks, device=device).step


@contextmanager
def steps(**options: Any) -> Iterator[tuple[MetaStep, ModelFacts]]:
    """The steps of a model, and its facts, for those who change them."""
    with simulated_world(4, 0), torch.device("meta"):
        model = built(**options)
        facts = facts_of(model)
        yield MetaStep(units_in(model), facts), facts


def actions(step: PredictedStep, *wanted: str, during: str = "") -> list[tuple[str, int]]:
    return [(each.action, each.group) for each in step.events if each.action in wanted and during in ("", each.during)]


def test_forward_gathers_ahead_and_backward_reduces_from_the_last_to_the_first() -> None:
    step = found()
    order = [group for _, group in actions(step, "compute", during="forward")]
    assert [group for _, group in actions(step, "gather", during="forward")] == order
    assert [group for _, group in actions(step, "reduce")] == order[::-1]
    first = [each.action for each in step.events[:4]]
    assert first == ["gather", "wait", "gather", "compute"]  # the second layer is gathered while the first computes


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_wait_is_for_what_was_started_before(device: str) -> None:
    under_way = Counter[tuple[str, int]]()
    for each in found(device=device).events:
        kind = {"wait": "gather", "wait-reduce": "reduce"}.get(each.action, each.action)
        under_way[kind, each.group] += 1 if kind == each.action else -1
        assert under_way[kind, each.group] >= 0
    assert not any(count for (kind, _), count in under_way.items() if kind != "compute")


def test_without_resharding_backward_gathers_nothing() -> None:
    step = found(reshard_after_forward=False)
    assert actions(step, "gather", during="backward") == []
    assert {each.kind: each.count for each in step.exchanged()} == {"gather in forward": 3, "reduce": 3}


def test_bytes_of_a_kind_are_added_up() -> None:
    explained = explain(built, ranks=4)
    told = {each.kind: each.nbytes for each in explained.traffic}
    assert told["gather in forward"] == sum(3 * group.shard for group in explained.groups)
    assert told["reduce"] == sum(3 * group.gradient // 4 for group in explained.groups)


def test_one_rank_alone_exchanges_nothing() -> None:
    step = found(ranks=1)
    assert step.exchanged() == ()
    assert actions(step, "wait", "reduce", "all-reduce") == []


@pytest.mark.parametrize(("ranks", "zero_stage"), [(1, 3), (2, 0)])
def test_gradients_that_stay_where_autograd_made_them_count_once(ranks: int, zero_stage: int) -> None:
    explained = explain(lambda: built(width=512, zero_stage=zero_stage), ranks=ranks)
    peak = [part for part in explained.step.peaks["backward"] if part[0] != "gradient buffers"]  # of biases
    assert Phase("", tuple(peak)).nbytes == sum(group.reduced for group in explained.groups)


def test_slots_are_shared_by_groups_that_take_turns() -> None:
    with steps(layers=8) as (given, facts):
        layer = max(group.whole for group in facts.groups)
        plain, deeper = (given.run(each).peaks["forward"] for each in (facts, replace(facts, prefetch=3)))
    assert {what: (count, size) for what, count, size in plain}["full buffers"] == (2, layer)
    assert {what: count for what, count, _ in deeper}["full buffers"] == 4


def test_other_facts_of_the_groups_count_as_if_the_model_were_built_with_them() -> None:
    expected = found(reshard_after_forward=False)
    with steps() as (given, facts):
        plain = given.run(facts)
        kept = replace(facts, groups=tuple(replace(group, reshards=False) for group in facts.groups))
        assert given.run(kept) == expected
        assert given.run(facts) == plain


def test_a_device_gives_large_memory_back_when_a_forward_or_a_step_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    host = found()
    monkeypatch.setattr(slots, "LARGE", 4 * 64 * 65)
    monkeypatch.setattr("fullshard.group.comm_context.LARGE", 4 * 64 * 65)
    step = found(device="cuda")
    assert "full buffers" in {what for what, *_ in host.kept}
    assert "full buffers" not in {what for what, *_ in step.kept}
    assert step.peaks["forward"] == host.peaks["forward"]
    assert "full buffers" not in {what for what, *_ in step.memory_at(("forward", -1, 2))}
    gathers = [len(actions(each, "gather", during="backward")) for each in (host, step)]
    assert gathers[0] < gathers[1] == 3, "the values are gone"


def test_what_is_kept_for_the_next_step_is_at_most_the_peak() -> None:
    step = found()
    total = {name: Phase(name, parts).nbytes for name, parts in {**step.peaks, "kept": step.kept}.items()}
    assert 0 < total["kept"] <= max(total["forward"], total["backward"])
    assert "gradients" not in {what for what, *_ in step.kept}


@pytest.mark.parametrize(("parts", "nbytes"), [((), 0), ((("a", 2, 5), ("b", 1, 3)), 13)])
def test_the_memory_of_a_phase_is_the_sum_of_its_parts(parts: Any, nbytes: int) -> None:
    assert Phase("forward", parts).nbytes == nbytes


def test_groups_whose_end_nothing_tells_are_reduced_when_the_backward_of_the_model_ends() -> None:
    with steps() as (given, facts):
        plain, late = given.run(facts), given.run(facts, (0, 1, 2))
    done = [what for what, _ in actions(late, "compute", "reduce", during="backward")]
    assert done == ["compute"] * 3 + ["reduce"] * 3
    assert Phase("", late.peaks["backward"]).nbytes > Phase("", plain.peaks["backward"]).nbytes
