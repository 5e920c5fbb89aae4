"""What a recorder notes of one rank, and that it leaves nothing behind."""

from __future__ import annotations

import pytest

from fullshard.report.recorder import Recorder
from fullshard.schedule.unit import schedule_of
from tests.fully_shard.cases import inputs
from tests.harness import World, ranks
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
