"""What is combined from two traces of blocks is what a trace of the plan itself finds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from benchmarks.models import Work

from fullshard.comm.select import NAMES, select_transport
from fullshard.policies import MixedPrecisionPolicy
from fullshard.report.explain import ADAM
from fullshard.report.predicted import _EXCHANGES
from fullshard.report.search import Search, _Choice
from fullshard.report.simulated import simulated_job

WORK = Work("combined", blocks=4, width=128, sequence=256, vocabulary=64)


@pytest.fixture(params=[*(pytest.param(name, marks=pytest.mark.slow) for name in ("shm", "collective")), "p2p"])
def search(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Search]:
    monkeypatch.setenv("FULLSHARD_TRANSPORT", request.param)
    with simulated_job(2, 0, 1):
        yield Search(WORK.build(), WORK.batch(0, 0), ADAM, None, None, MixedPrecisionPolicy(), {})


def test_a_combination_of_traces_is_a_trace(search: Search) -> None:
    for choice in (
        _Choice(1),
        _Choice(1, recomputed=2),
        _Choice(1, resharded=5, recomputed=4, prefetch=0),
        _Choice(2, resharded=1),
    ):
        combined, checked = search.need(choice), search.checked(search._planned(choice, 1, []))
        assert combined.most == pytest.approx(checked.most, rel=0.03), choice
        assert combined.seconds == pytest.approx(checked.seconds, rel=0.03), choice
    need = search.need(_Choice(1))
    assert need.above(need.most) == 0
    assert need.above(need.most - 1) >= 1
    phase, part = need.why.split(", of which ")
    assert phase.startswith("the ")
    assert max(need.peaks, key=lambda name: need.peaks[name]) in phase
    assert part.split(" are ")[1] in need.parts
    search._optimizer_bytes = 0.0
    assert search._need(_Choice(1)).most < need.most, "the state of the optimizer counts"


def test_each_transport_has_assumed_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert set(NAMES) <= _EXCHANGES.keys()
    monkeypatch.setenv("FULLSHARD_TRANSPORT", "hosts")
    with simulated_job(4, 0, 1):
        assert dist.group.WORLD is not None
        assert select_transport(dist.group.WORLD, torch.device("cpu")).name == "hosts"
