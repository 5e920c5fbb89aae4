"""Traces and metrics on devices with streams, here simulated ones: no step waits for the device."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import fullshard
from fullshard.report.watching import Clock
from tests.harness import World, ranks
from tests.report.cases import sharded, trained
from tests.simulated import simulated


@dataclass
class TimedEvent:
    """An event of a simulated stream, with the time at which it was recorded."""

    event: Any
    at: int

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: TimedEvent) -> float:
        return (other.at - self.at) / 1e6


def timed(clock: Clock) -> TimedEvent:
    assert clock.streams is not None
    return TimedEvent(clock.streams.current(clock._device).record_event(), time.monotonic_ns())


@ranks(2)
@pytest.mark.parametrize("look", ["profile", "log_metrics"])
def test_no_step_waits_for_the_device(world: World, look: str, tmp_path: Path) -> None:
    with (
        simulated("checked") as streams,
        mock.patch.object(Clock, "_record", timed),
        mock.patch("torch.accelerator.memory_allocated", return_value=1),
        mock.patch("torch.accelerator.max_memory_allocated", return_value=1),
    ):
        model = sharded()
        train = trained(model)
        for seed in range(2):
            train(seed)
        before = streams.synchronizations
        train(2)
        plain, before = streams.synchronizations - before, streams.synchronizations
        looking = (
            fullshard.profile(model, steps=2) if look == "profile" else fullshard.log_metrics(model, tmp_path / "file")
        )
        assert streams.synchronizations == before + 1  # once, when it begins
        for seed in range(2):
            train(seed)
        assert streams.synchronizations == before + 1 + 2 * plain
        looking.stop()
        if look == "log_metrics":
            return
        (rank,) = looking.ranks
    groups = set(rank.groups)
    for lane, what in (("gather", "gather"), ("reduce", "reduce"), ("wait", "gather"), ("wait", "reduce")):
        assert {span.group for span in rank.spans if (span.lane, span.what) == (lane, what)} == groups
    assert list(rank.steps()) == [0, 1]
    assert not any(span.lane == "host" for span in rank.spans)
    gathers = {(span.step, span.group, span.number): span for span in rank.spans if span.lane == "gather"}
    waits = [span for span in rank.spans if (span.lane, span.what) == ("wait", "gather")]
    assert all((wait.step, wait.group, wait.number) in gathers for wait in waits)
