"""A plan is data that shards a model as it says, and that is checked when it is read."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from benchmarks.models import Work
from torch import nn

import fullshard
from fullshard.report.plan import Change, Plan, PlannedGroup, shortened
from tests.fully_shard.cases import groups_of
from tests.harness import World, ranks

WORK = Work("planned", blocks=4, width=64, sequence=4, vocabulary=64)
BLOCKS = PlannedGroup(("blocks.0", "blocks.1"), True), PlannedGroup(("blocks.2",), False)
PLAN = Plan(
    model="Transformer",
    ranks=2,
    transport="p2p",
    memory=2**30,
    needed=2**20,
    seconds=0.5,
    zero_stage=3,
    groups=(*BLOCKS, PlannedGroup(("",), False)),
    recomputed=("blocks.0", "blocks.3"),
    prefetch=0,
    changes=(Change("recompute one more block", 2**20, 0.25),),
    notes=("Assumed: much",),
)
#: As JSON: the group of the model itself.
WHOLE = {"modules": [""], "reshards": True}


def changed(**fields: Any) -> str:
    return json.dumps(json.loads(PLAN.to_json()) | fields)


def test_a_plan_survives_json() -> None:
    assert Plan.from_json(PLAN.to_json()) == PLAN


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"zero_stage": 4}, "'zero_stage' must be 1, 2 or 3, got 4"),
        ({"zero_stage": "3"}, "'zero_stage' must be of type int, got '3'"),
        ({"zero_stage": 2}, "'groups' must not reshard in stage 2"),
        ({"prefetch": -1}, "'prefetch' must be 0 or more"),
        ({"memory": 0}, "'memory' must be 1 or more"),
        ({"offloaded_state": 1.5}, "'offloaded_state' must be a share from 0 to 1, got 1.5"),
        ({"offloaded_state": 0.25, "offloaded_parameters": 0.5}, "must be a share from 0 to offloaded_state, got 0.5"),
        ({"staging_bytes": 0}, "'staging_bytes' must be 1 or more"),
        ({"recomputed": [""]}, "'recomputed' must not name the model itself"),
        ({"recomputed": [1]}, "'recomputed' must have strings"),
        ({"recomputed": "blocks.0"}, "'recomputed' must be a list"),
        ({"groups": []}, "'groups' must end with the group of the model itself"),
        (
            {"groups": [{"modules": [], "reshards": True}, {"modules": [""], "reshards": True}]},
            "must each have a module",
        ),
        ({"groups": [{"modules": ["a", "a"], "reshards": True}, WHOLE]}, "twice, as 'a'"),
        ({"groups": [{"modules": [""], "reshards": 1}]}, r"'groups'\[0\]'s 'reshards' must be of type bool, got 1"),
        ({"groups": [{"modules": [""]}]}, r"'groups'\[0\] has no field 'reshards'"),
        ({"groups": [3]}, r"'groups'\[0\] must be an object, got 3"),
        ({"group": []}, "has a field 'group', which is not one of"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.from_json(changed(**fields))


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="plan"):
        Plan.from_json(text)


def test_a_plan_for_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"names the module 'blocks.0', which this Linear does not have"):
        PLAN.apply(nn.Linear(2, 2))


@ranks(2)
def test_a_plan_shards_as_it_says_and_trains_as_without(world: World) -> None:
    torch.manual_seed(0)
    expected = WORK.build()
    torch.manual_seed(0)
    model = WORK.build()
    model.load_state_dict(expected.state_dict())
    keys = [*model.state_dict()]
    PLAN.apply(model)
    assert [*model.state_dict()] == keys
    assert [name.replace("_checkpoint_wrapped_module.", "") for name, _ in model.named_parameters()] == keys
    names = [sorted(param.name for param in group.params) for group in groups_of(model)]
    assert len(names) == 3
    expected(WORK.batch(0, 0)).sum().backward()
    model(WORK.batch(0, 0)).sum().backward()
    for (name, param), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert param.grad is not None, name
        torch.testing.assert_close(param.grad.full_tensor(), other.grad)  # type: ignore[attr-defined]


@ranks(2)
@pytest.mark.parametrize("stage", [1, 2])
def test_a_plan_may_have_a_lower_stage(world: World, stage: int) -> None:
    groups = tuple(replace(group, reshards=False) for group in PLAN.groups)
    model = Plan.from_json(replace(PLAN, zero_stage=stage, groups=groups).to_json()).apply(WORK.build())
    model(WORK.batch(world.rank, 0)).sum().backward()
    assert not any(group.reshards for group in fullshard.explain(model).groups)


@ranks(2)
def test_a_plan_offloads_the_shares_that_it_says(world: World) -> None:
    with tempfile.TemporaryDirectory() as directory:
        shares = {"offloaded_state": 1.0, "offloaded_parameters": 0.5, "offload_directory": directory}
        plan = Plan.from_json(replace(PLAN, **shares, staging_bytes=1 << 20).to_json())
        model = plan.apply(WORK.build())
        for group in groups_of(model):
            large = {at for at, param in enumerate(group.params) if param.shape.numel() >= 1 << 14}
            assert group.offloaded.disk is not None
            assert (group.offloaded.disk.directory, group.offloaded.disk.staging_bytes) == (Path(directory), 1 << 20)
            assert group.offloaded.state == large
            assert group.offloaded.parameters < large or not large
        model(WORK.batch(world.rank, 0)).sum().backward()
        with pytest.raises(ValueError, match="offload_policy is not an option of a plan"):
            plan.apply(WORK.build(), offload_policy=fullshard.OffloadPolicy())


def test_a_plan_says_what_is_offloaded() -> None:
    plan = replace(PLAN, offloaded_state=1.0, offloaded_parameters=0.25)
    assert "optimizer state and 25 % of the parameters on the CPU" in str(plan)
    assert "parameters on a disk, in /scratch" in str(replace(plan, offload_directory="/scratch"))


def test_a_plan_reads_as_tables() -> None:
    text = str(PLAN)
    assert "Transformer on 2 ranks ('p2p') in 1.0 GiB each: needs 1.0 MiB, and 500 ms" in text
    assert "2: blocks.0, blocks.3" in text
    assert "2: blocks.2, (root)" in text
    assert "3 (2 with 1 module, 1 with 2 modules)" in text
    assert text.split("recompute one more block")[1].split()[:5] == ["1.0", "MiB", "250", "ms", "Assumed:"]


def test_changes_of_one_kind_are_one_row() -> None:
    again = [Change("a", 1, 0.5), Change("a", 2, 0.25), Change("b", 1, 0.0), Change("a", 1, 0.0)]
    assert shortened(again) == (Change("a (2 times)", 3, 0.75), Change("b", 1, 0.0), Change("a", 1, 0.0))


@ranks(1)
def test_a_plan_is_refused_where_it_would_not_be_what_it_says(world: World) -> None:
    plan = replace(PLAN, ranks=1, elements=sum(param.numel() for param in WORK.build().parameters()))
    with pytest.raises(ValueError, match="was made for 2 ranks, and this job has 1"):
        PLAN.apply(WORK.build())
    with pytest.raises(ValueError, match=r"with [\d,]+ elements in its parameters, and this Transformer has [\d,]+"):
        replace(plan, elements=plan.elements + 1).apply(WORK.build())
    for name, value in {"zero_stage": 2, "reshard_after_forward": True, "persistence_threshold": 1}.items():
        with pytest.raises(ValueError, match=f"{name} is not an option of a plan"):
            plan.apply(WORK.build(), **{name: value})
    model = plan.apply(WORK.build())
    with pytest.raises(ValueError, match="is sharded already"):
        plan.apply(model)


@ranks(1)
@pytest.mark.parametrize(
    ("plan", "options", "error", "message"),
    [
        ({"recomputed": ("blocks",)}, {}, ValueError, "names the ModuleList 'blocks', which has no forward"),
        ({"groups": (PlannedGroup(("blocks",), True), *PLAN.groups[-1:])}, {}, ValueError, "the ModuleList 'blocks'"),
        ({}, {"mehs": None}, TypeError, "fully_shard has no option 'mehs'"),
        ({}, {"mesh": 3}, Exception, "."),
        ({}, {"zero_stage": 2}, ValueError, "zero_stage is not an option"),
    ],
)
def test_a_plan_that_is_refused_changes_nothing(
    world: World, plan: dict[str, Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = WORK.build()
    modules = dict(model.named_modules())
    with pytest.raises(error, match=message):
        replace(PLAN, ranks=1, **plan).apply(model, **options)
    assert dict(model.named_modules()) == modules


@ranks(1)
def test_the_heap_keeps_nothing_where_a_plan_needs_most_of_the_memory(world: World) -> None:
    for memory, times in ((2**30, 0), (2**26, 1)):
        with mock.patch("fullshard.report.plan.return_at_once") as told:
            replace(PLAN, ranks=1, memory=memory).apply(WORK.build())
        assert told.call_count == times
