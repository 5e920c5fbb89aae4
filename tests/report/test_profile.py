"""Traces of ranks that train."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import fullshard
from fullshard.comm.waits import WAITS
from fullshard.disk.file import DiskWork
from fullshard.report.rank_trace import Span, shares
from fullshard.report.recorder import RUNNING
from fullshard.schedule.unit import unit_of
from tests.fully_shard.cases import groups_of, inputs
from tests.harness import World, ranks
from tests.report.cases import WAYS_TO_STEP, recorded, sharded, trained, trained_by


def of(spans: list[Span], lane: str, what: str) -> list[Span]:
    return [span for span in spans if (span.lane, span.what) == (lane, what)]


@ranks(2)
@pytest.mark.parametrize("transport", ["shm", "p2p", "collective"])
def test_each_rank_tells_what_it_did(world: World, transport: str) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = transport
    trace = recorded(world, sharded())
    assert [rank.rank for rank in trace.ranks] == ([0, 1] if world.rank == 0 else [1])
    for rank in trace.ranks:
        assert list(rank.steps()) == [0, 1]
        groups = {"root", *(f"blocks.{number}" for number in range(4))}
        assert set(rank.groups) == groups
        for what in ("forward", "backward"):
            assert len(of(rank.spans, "pass", what)) == 2
            assert {span.group for span in of(rank.spans, "computation", what)} == groups
        assert len(of(rank.spans, "pass", "optimizer")) == 2
        reduced = of(rank.spans, "reduce", "reduce")
        assert {span.group for span in reduced} == groups
        received = sum(span.nbytes for span in reduced) / sum(rank.groups.values())  # half of it, in two steps
        assert received == 1 if transport == "shm" else 1 <= received < 1.25  # messages have padding
        gathered = of(rank.spans, "gather", "gather")
        assert {span.group for span in gathered} == (set() if transport == "shm" else groups)
        assert all(span.end >= span.start for span in rank.spans)
        assert all(held > 0 for _, held in rank.memory)
        for span in gathered:  # what was gathered is there before it is used
            uses = of(rank.spans, "computation", span.during)
            assert any(use.group == span.group and use.start >= span.end for use in uses)


@ranks(2)
@pytest.mark.parametrize("way", WAYS_TO_STEP)
def test_a_trace_has_so_many_steps_of_training_by_the_numbers_of_the_user(world: World, way: str) -> None:
    model = sharded()
    train = trained_by(model, way)
    train(0)
    trace = fullshard.profile(model, steps=2, first_step=100)
    for seed in range(3):
        assert trace.is_running == (seed < 2 or way == "some")  # which ends with the next forward
        train(seed)
    assert not trace.is_running
    (rank,) = trace.ranks
    assert list(rank.steps()) == [100, 101]
    stepped = {"one": 1, "two": 2, "some": 1, "in backward": len(list(model.parameters()))}[way]
    assert len(of(rank.spans, "pass", "optimizer")) == 2 * stepped
    assert len(of(rank.spans, "pass", "backward")) == (2 if way == "in backward" else 4)
    last = max(span.end for span in rank.of("pass"))
    assert rank.steps()[101][1] == last
    of_all = shares(rank)
    assert of_all.optimizer > 0
    parts = of_all.computing + of_all.copying + of_all.waiting + of_all.optimizer + of_all.outside
    assert parts == pytest.approx(of_all.step, rel=0.01)


@ranks(2)
def test_nothing_is_left_of_a_trace(world: World) -> None:
    model = sharded()
    train = trained(model)
    train(0)
    schedule = unit_of(model).schedule  # type: ignore[union-attr]
    looked_at = [schedule, schedule.passes, schedule.comm, *schedule.units, *schedule.groups]
    looked_at += [vars(group.transport).get("local_ranks", group) for group in schedule.groups]
    lanes = schedule.comm.lanes
    looked_at += [lanes.gather, lanes.reduce, lanes.all_reduce]
    before = [dict(vars(each)) for each in looked_at]
    hooks = [len(module._forward_hooks) for module in model.modules()]
    with fullshard.profile(model, steps=5) as trace:
        train(1)
        assert len(WAITS.listeners) == len(DiskWork.listeners) == len(lanes.gather.observers) == 1
        assert schedule in RUNNING
    assert not trace.is_running
    trace.stop()
    assert [set(vars(each)) for each in looked_at] == [set(each) for each in before]
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert not any((schedule.log.listeners, WAITS.listeners, DiskWork.listeners, lanes.gather.observers))
    assert schedule not in RUNNING
    assert list(trace.ranks[0].steps()) == [0]


@ranks(2)
def test_recorded_training_is_as_without(world: World) -> None:
    models = sharded(), sharded()
    trace = fullshard.profile(models[0], steps=3)
    for model in models:
        train = trained(model)
        for seed in range(3):
            train(seed + 10 * world.rank)
    assert not trace.is_running
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one.to_local(), other.to_local())


@ranks(2)
@pytest.mark.parametrize("transport", ["shm", pytest.param("p2p", marks=pytest.mark.slow)])
def test_the_findings_name_a_rank_that_sleeps_and_where(world: World, transport: str) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = transport
    model = sharded()
    if world.rank == 1:
        model.blocks[1].register_forward_pre_hook(lambda *_: time.sleep(0.25))
    trace = recorded(world, model)
    if world.rank == 0:
        found = {finding.kind: finding for finding in trace.findings()}
        assert found["slow rank"].rank == 1
        assert found["slow rank"].group == "blocks.1"


@ranks(2)
def test_a_trace_is_saved_and_read_again(world: World, tmp_path: Path) -> None:
    trace = recorded(world, sharded(), steps=1)
    trace.save(tmp_path)
    dist.barrier()
    read = fullshard.Trace.load(tmp_path)
    assert {"findings.txt", "trace.json"} == {file.name for file in tmp_path.iterdir()}
    assert [rank.rank for rank in read.ranks] == [0, 1]
    text = " ".join((tmp_path / "findings.txt").read_text().split())
    assert all(finding.text in text for finding in read.findings())
    if world.rank == 0:
        first = min(rank.spans[0].start for rank in trace.ranks)
        assert read.ranks == [rank.shifted(first) for rank in trace.ranks]
        assert [finding.kind for finding in read.findings()] == [finding.kind for finding in trace.findings()]


@pytest.mark.parametrize("text", ["[]", "{}", '{"fullshard": {"version": 99}}', "no JSON"])
def test_a_file_that_is_no_trace_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(ValueError, match=r"trace\.json cannot be read"):
        fullshard.Trace.load(tmp_path)


@ranks(2)
def test_a_wrapped_model_that_recomputes_is_recorded(world: World) -> None:
    class Recomputing(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Any) -> Any:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    blocks = [fullshard.FullyShardedDataParallel(nn.Linear(6, 6), use_orig_params=True) for _ in range(3)]
    model = fullshard.FullyShardedDataParallel(
        nn.Sequential(*map(Recomputing, blocks), nn.Linear(6, 6)), use_orig_params=True
    )
    trace = recorded(world, model, steps=1)
    spans = trace.ranks[0].spans
    again = of(spans, "computation", "recomputation")
    assert len({span.group for span in again}) == 3
    (backward,) = of(spans, "pass", "backward")
    assert all(backward.start <= span.start <= span.end <= backward.end for span in again)


@ranks(2)
@pytest.mark.parametrize("front_end", ["fully_shard", pytest.param("wrapper", marks=pytest.mark.slow)])
def test_compiled_blocks_are_recorded(world: World, front_end: str) -> None:
    """The hooks of a compiled module call the methods of its own unit, whatever its class or who looks on."""
    if front_end == "wrapper":
        blocks = [fullshard.FullyShardedDataParallel(nn.Linear(6, 6), use_orig_params=True) for _ in range(2)]
        model: Any = fullshard.FullyShardedDataParallel(nn.Sequential(*blocks, nn.Linear(6, 6)), use_orig_params=True)
    else:
        model = sharded()
        blocks = list(model.blocks)
    for block in blocks:
        block.compile(backend="eager")
    spans = recorded(world, model, steps=1).ranks[0].spans
    assert len({span.group for span in of(spans, "computation", "forward")}) == len(blocks) + 1


@ranks(2)
def test_what_cannot_be_recorded_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match="sharded or wrapped, got Linear"):
        fullshard.profile(nn.Linear(2, 2))
    model = sharded()
    with pytest.raises(ValueError, match="at least 1 step, got 0"):
        fullshard.profile(model, steps=0)
    with fullshard.profile(model), pytest.raises(RuntimeError, match="is being recorded"):
        fullshard.profile(model)
    fullshard.profile(model).stop()
    assert groups_of(model)


@ranks(1)
def test_two_traces_end_in_one_step(world: World) -> None:
    """torch goes through the hooks after a step, and raises if one of them is removed before another meanwhile."""
    one, other = sharded(), sharded()
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
    traces = [fullshard.profile(one, steps=1), fullshard.profile(other, steps=1)]
    later = register_optimizer_step_post_hook(lambda *args: None)
    (one(inputs()).sum() + other(inputs()).sum()).backward()
    optimizer.step()
    later.remove()
    assert not any(trace.is_running for trace in traces)
