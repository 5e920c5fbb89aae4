"""Explanations as text: groups that differ only in their names share a row, and totals are those of all groups."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from torch import nn

import fullshard
from fullshard.report.explain import Explanation, explain
from fullshard.report.facts import OffloadedFacts
from fullshard.report.meta_step import ExchangeTotal, Phase
from fullshard.report.tables import (
    estimate_text,
    groups_text,
    memory_text,
    name_of_run,
    order_text,
    parameters_text,
    runs,
    settings_text,
    totals_text,
    traffic_text,
)


@cache
def explained() -> Explanation:
    def build() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, 10))
        for layer in model:
            fullshard.fully_shard(layer)
        return fullshard.fully_shard(model)

    return explain(build, ranks=4, rank=1)


def test_groups_that_differ_only_in_their_names_are_a_run() -> None:
    groups = [group for group in explained().groups if group.elements]
    found = runs(groups)
    assert [len(each) for each in found] == [3, 1]
    assert [name_of_run(each) for each in found] == ["0 .. 2 (x3)", "3"]
    blocks = [replace(group, name=f"model.blocks.{number}") for number, group in enumerate(found[0])]
    assert name_of_run(blocks) == "model.blocks.0 .. 2 (x3)"
    apart = [replace(blocks[0], name="a.x"), replace(blocks[1], name="b.y")]
    assert name_of_run(apart) == "a.x .. b.y (x2)"
    other = [groups[0], replace(groups[1], reshards=False), groups[2]]
    assert [len(each) for each in runs(other)] == [1, 1, 1]


def test_totals_are_those_of_all_groups() -> None:
    groups = explained().groups
    elements = 3 * (64 * 64 + 64) + 64 * 10 + 10
    assert f"{elements:,} elements" in totals_text(groups)
    assert f"{len(groups)} groups, " in totals_text(groups)
    assert totals_text([]) == "0 groups, 0 elements, 0 B, padding 0 B (0.00 %)"


def test_a_row_says_what_becomes_of_a_group_after_forward() -> None:
    group = next(group for group in explained().groups if group.elements)
    for change, said in (
        ({"reshards": True}, "freed"),
        ({"reshards": False}, "kept whole"),
        ({"post_forward": 2}, "on 2 ranks"),
    ):
        last = groups_text([replace(group, **change)]).splitlines()[-1]  # type: ignore[arg-type]
        assert last.endswith(said), change


def test_groups_of_the_same_settings_share_a_paragraph() -> None:
    groups = [group for group in explained().groups if group.elements]
    assert settings_text(groups).startswith("All groups: even over 4 ranks; stored float32, computed float32")
    last = groups[-1]
    offloaded = OffloadedFacts("parameters", " on the CPU", last.shard, last.reduced, last.trained)
    two = [*groups[:-1], replace(last, offloaded=offloaded, replicas=2)]
    text = " ".join(settings_text(two).split())
    assert text.startswith("0 .. 2 (x3): even over 4 ranks; ")
    assert "3: even over 4 ranks x 2 replicas; " in text
    assert text.endswith("; parameters on the CPU")


def test_a_parameter_has_the_rows_of_this_rank() -> None:
    lines = [line.split() for line in parameters_text(explained().groups).splitlines()]
    assert ["weight", "64", "x", "64", "dim", "0", "16:32", "1,024"] in lines
    assert ["bias", "10", "dim", "0", "3:6", "3"] in lines


def test_pieces_of_a_phase_are_a_formula() -> None:
    text = memory_text([Phase("at rest", (("shards", 1, 2048),)), Phase("peak", (("slots", 2, 1024), ("slots", 1, 5)))])
    assert text.splitlines() == ["at rest  2.0 KiB  shards 2.0 KiB", "peak     2.0 KiB  slots 2 x 1.0 KiB + 5 B"]


def test_exchanges_are_added_up() -> None:
    assert traffic_text([]) == "A step exchanges nothing."
    lines = traffic_text([ExchangeTotal("gather", 1200, 2048), ExchangeTotal("reduce", 2, 1024)]).splitlines()
    assert [line.split() for line in lines[2:]] == [
        ["gather", "1,200", "2.0", "KiB"],
        ["reduce", "2", "1.0", "KiB"],
        ["in", "all", "3.0", "KiB"],
    ]


def test_the_order_says_whether_a_step_recorded_it() -> None:
    facts = explained().facts
    assert order_text(facts).startswith("Order (of the modules; the first step records its own; 1 gathered ahead): ")
    recorded = replace(facts, order_of="step", prefetch=2)
    assert order_text(recorded).startswith("Order (recorded in a step; 2 gathered ahead): ")


def test_an_estimate_says_what_part_waits_and_what_it_assumes() -> None:
    given = {"bandwidth": 1e6, "peak_flops": 1e9, "latency": 1e-4}
    text = estimate_text(explained().estimate(**given, tokens=1000))
    first, second, *_ = text.splitlines()
    assert first.startswith("A step (forward and backward): ")
    assert first.endswith(" wait for communication")
    assert second == "32,927 tokens/s on all ranks together; each rank computes 77.6 MFLOP: 63.9 % of its peak"
    said = " ".join(text.split())
    assert "each rank processes 1,000 tokens, computes at 100 % of 1 GFLOP/s and sends 1 MB/s" in said
    assert "takes W - 1 steps (ring) of 100 us" in said
    assert ["group", "forward", "backward", "exchanges", "exposed"] in [line.split() for line in text.splitlines()]


def test_settings_say_how_even_ragged_parts_are() -> None:
    def build() -> nn.Module:
        layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 192, bias=False))
        return fullshard.fully_shard(layers, shard_placement_fn=lambda param: fullshard.Ragged(rows=64))

    found = explain(build, ranks=2, rank=1)
    text = " ".join(settings_text(found.groups).split())
    assert "3 ragged parameters: the largest rank has 1.00 times the mean" in text
    shown = {param.name: (param.rows, param.chunk, param.cuts) for param in found.groups[0].parameters}
    rows, chunk, cuts = shown["1.weight"]
    assert cuts in ((0, 64, 192), (0, 128, 192)), "which of equal ranks has more depends on the number of the group"
    assert (rows, chunk) == (cuts[1:], 128 * 64)
    assert f"{rows[0]}:192" in parameters_text(found.groups)
