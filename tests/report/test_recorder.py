"""What a recorder notes of one rank, and that it leaves nothing behind."""

from __future__ import annotations

import os

import pytest

from fullshard import WirePolicy
from fullshard.figures import listeners_of
from fullshard.report.recorder import Recorder
from fullshard.schedule.unit import schedule_of
from tests.fully_shard.cases import inputs
from tests.harness import HOSTS, World, pretended_hosts, ranks
from tests.report.cases import sharded, trained


@ranks(2, transport="p2p")
def test_spans_are_those_of_the_steps_that_were_asked_for(world: World) -> None:
    model = sharded()
    train = trained(model)
    train(0)
    recorder = Recorder(schedule_of(model, "a test"), model, steps=2, first_step=7)
    for seed in range(4):
        train(seed)
    assert not recorder.is_running
    trace = recorder.finish()
    assert trace.rank == world.rank
    assert sorted({span.step for span in trace.spans}) == [7, 8]
    assert list(trace.steps()) == [7, 8]
    names = set(trace.groups)
    for lane in ("gather", "reduce"):
        spans = list(trace.of(lane, 8))  # type: ignore[arg-type]
        assert {span.group for span in spans} == names, lane
        assert all(span.nbytes > 0 for span in spans)
    assert {span.what for span in trace.of("pass", 7)} == {"forward", "backward", "optimizer"}
    assert {span.group for span in trace.of("computation", 7)} >= {"blocks.0", "blocks.3"}
    assert [span.start for span in trace.spans] == sorted(span.start for span in trace.spans)
    assert trace.memory


@ranks(1)
def test_a_change_of_an_elastic_job_has_a_lane_with_its_parts_one_after_another(world: World) -> None:
    model = sharded()
    train = trained(model)
    recorder = Recorder(schedule_of(model, "a test"), model, steps=2, first_step=0)
    train(0)
    for tell in listeners_of(model):
        tell({"save_bytes": 1.0})
        tell({"change_agreed_seconds": 0.1, "change_joined_seconds": 0.2, "change_trained_seconds": 0.3})
    train(1)
    spans = list(recorder.finish().of("change"))
    assert [(span.what, span.length) for span in spans] == [
        ("agree", 100_000_000),
        ("form rows", 200_000_000),
        ("train", 300_000_000),
    ]
    assert [span.end for span in spans[:2]] == [span.start for span in spans[1:]]
    assert {span.step for span in spans} == {0}  # although that step has ended


@ranks(4)
@pytest.mark.parametrize("wire", [None, WirePolicy("int8", "int8", min_numel=1)])
def test_messages_between_hosts_have_a_lane_of_their_own(world: World, wire: WirePolicy | None) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = "hosts"
    with pretended_hosts(HOSTS):
        model = sharded(**({} if wire is None else {"wire_policy": wire}))
    train = trained(model)
    train(0)
    recorder = Recorder(schedule_of(model, "a test"), model, steps=1, first_step=0)
    train(1)
    trace = recorder.finish()
    names = set(trace.groups)
    for lane in ("gather", "reduce"):
        messages = [span for span in trace.of("network") if span.what == lane]
        assert {span.group for span in messages} == names
        exchanges = {(each.group, each.number): each for each in trace.of(lane)}  # type: ignore[arg-type]
        for each in messages:
            assert each.start < each.end
            around = exchanges[each.group, each.number]
            assert around.start <= each.start
            assert each.end <= around.end
        assert len(messages) == len(exchanges)
        whole = sum(trace.groups.values())
        received = sum(each.nbytes for each in exchanges.values()) / whole
        assert received == pytest.approx(len(exchanges) / len(names) / 4, rel=0.15), "of one peer, a quarter each"
    waits = [span for span in trace.of("wait") if span.what == "gather"]
    assert {span.group for span in waits} == names


@ranks(2, transport="p2p")
def test_a_unit_that_runs_twice_has_numbers(world: World) -> None:
    model = sharded()
    recorder = Recorder(schedule_of(model, "a test"), model, steps=1, first_step=0)
    (model(inputs(0)) + model(inputs(1))).sum().backward()
    recorder.stop()
    trace = recorder.finish()
    forwards = [span for span in trace.of("computation") if (span.what, span.group) == ("forward", "blocks.0")]
    assert [span.number for span in forwards] == [0, 1]


@ranks(2, transport="p2p")
def test_an_error_in_a_step_leaves_the_recording_usable(world: World) -> None:
    model = sharded()
    train = trained(model)
    recorder = Recorder(schedule_of(model, "a test"), model, steps=1, first_step=0)
    with pytest.raises(RuntimeError):
        model(inputs(0, width=99))
    model.reset_iter_state()
    train(0)
    assert not recorder.is_running
    assert list(recorder.finish().steps()) == [0]
