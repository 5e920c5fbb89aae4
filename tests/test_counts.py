"""What a step costs, in counts that repeat: none may grow. Who makes one smaller, writes the smaller one here."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections import OrderedDict
from contextlib import nullcontext
from pathlib import Path
from types import CodeType, FrameType

import pytest
import torch
from benchmarks import host
from benchmarks.contenders import ALONE, ours
from benchmarks.launches import LARGE_TRANSFORMER, TRANSFORMER, measure_launches
from benchmarks.models import Work
from benchmarks.ranks import run_simulated
from benchmarks.traffic import Traffic
from torch import nn
from torch.optim import optimizer as optimizer_of_torch

import fullshard
from fullshard.optim import steps
from fullshard.torch_private import CAN_SWAP_MEMORY
from tests.fully_shard.cases import EXCHANGED, groups_of
from tests.harness import World, ranks
from tests.harness.models import shard_each

SOURCE = Path(__file__).parent.parent / "src" / "fullshard"
#: Lines of the engine: what a change of how training works has to read.
ENGINE, LINES = ("buffer", "comm", "group", "schedule"), 9_700 + 490  # of these 490 for hosts as a level
#: The part by which the engine may be larger, so that the correction of a defect need not pay for itself.
SLACK = 0.02
#: Calls of Python and C functions for a group in a step, by the number of its parameters.
CALLS = {4: 210, 8: 214, 32: 238}
#: How many more there may be where storages cannot exchange memory: whoever takes a slot frees and allocates.
MORE = {} if CAN_SWAP_MEMORY else {"calls": 7, "events": 4.125, "stream_waits": 2.5}
#: Bytes of a step on two ranks by transport, in bytes of all parameters: copied by each rank, and sent. A reduction by
#: gloo's collectives is an all-reduce, and sends twice what it must.
COPIED = {"shm": 1.015, "p2p": 3.001, "collective": 2.84}
SENT = {"shm": 0.0, "p2p": 1.5, "collective": 2.0}
#: Calls of functions of the library for a gather and the wait for it, and files in which they are.
GATHER = {"p2p": (11, 6), "collective": (11, 6)}
#: How many of them call one another before the backend is called. A module's hook comes first, and calls its unit.
DEPTH = 4
#: What a group asks of a device in a step, see ``benchmarks.launches.Cost``: with parameters alike, and with others.
#: By the number of ranks, and whether it computes in bf16 and reduces in fp32. Gradients are cast by one launch.
LAUNCHES = {
    (8, False): {"launches": (2.75, 2.75), "kernels": (2.75, 2.75), "copied": (5.5, 1.86), "collectives": (2.75, 2.75)},
    (8, True): {"launches": (4.75, 5.75), "kernels": (4.75, 5.75), "copied": (4.02, 3.46), "collectives": (2.75, 2.75)},
    (1, False): {"launches": (0, 0), "collectives": (0, 0), "events": (2.125, 2.125), "stream_waits": (2.125, 2.125)},
    (1, True): {"launches": (3, 3), "copied": (3.8, 3.73), "collectives": (0, 0)},
}
ALWAYS = {"allocated": (0, 0), "synchronizations": (0, 0), "events": (5.875, 5.875), "stream_waits": (5.625, 5.625)}
#: What a reader of a step over messages must follow, see :class:`Walk`: the first one, and those that follow.
FIRST_STEP = {"files": 47, "functions": 318, "lines": 2625}
STEADY_STEP = {"files": 24, "functions": 105, "lines": 1245, "chain": 12}
WORK = Work("counted", blocks=3, width=128, sequence=4, vocabulary=64)


def test_the_engine_does_not_grow() -> None:
    lines = {name: sum(len(file.read_text().splitlines()) for file in (SOURCE / name).rglob("*.py")) for name in ENGINE}
    assert sum(lines.values()) <= LINES * (1 + SLACK), lines


def calls_of_groups() -> dict[int, int]:
    library, contenders = host._free_collectives(), [*ours(every_transport=False), ALONE]
    found = {count: host._measure_count(contenders, count, groups=24, rounds=1)["fullshard"] for count in CALLS}
    del library
    return {count: round(each["calls"]) for count, each in found.items()}


def test_a_group_takes_no_more_calls_in_a_step() -> None:
    calls = run_simulated(calls_of_groups, 2)
    limits = {count: most + MORE.get("calls", 0) for count, most in CALLS.items()}
    assert all(calls[count] <= limits[count] for count in CALLS), f"{calls}, and may be {limits}"


@pytest.mark.parametrize(
    ("world_size", "casts"),
    [pytest.param(*each, marks=() if each == (8, True) else pytest.mark.slow) for each in LAUNCHES],
)
def test_a_group_asks_no_more_of_a_device_in_a_step(world_size: int, casts: bool) -> None:
    found = measure_launches(world_size, [8, TRANSFORMER], groups=8, casts=casts)["counts"]
    costs = [each["fullshard"] for each in found.values()]
    for what, most in (ALWAYS | LAUNCHES[world_size, casts]).items():
        limits = [limit + MORE.get(what, 0) for limit in most]
        assert all(cost[what] <= limit for cost, limit in zip(costs, limits, strict=True)), f"{what}: {costs}"


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [8, 64])
def test_large_parameters_are_not_copied(world_size: int) -> None:
    (found,) = measure_launches(world_size, [LARGE_TRANSFORMER], groups=8)["counts"].values()
    cost = found["fullshard"]
    assert (cost["launches"], cost["kernels"], cost["collectives"]) == (2.75, 4.5, 2.75)
    assert cost["copied"] < 0.002
    assert cost["allocated"] == 0


@ranks(2)
@pytest.mark.parametrize("transport", [pytest.param(name, marks=EXCHANGED if name == "shm" else ()) for name in COPIED])
def test_a_step_moves_no_more_bytes(world: World, transport: str) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = transport
    model = WORK.build()
    fullshard.fully_shard_blocks(model)
    for step in range(3):
        model.zero_grad()
        with Traffic() as traffic:
            model(WORK.batch(world.rank, step)).sum().backward()
    copied, sent = traffic.copied / WORK.model_bytes, traffic.asked / WORK.model_bytes
    assert not traffic.unknown
    assert copied <= COPIED[transport] + 0.005, f"{copied:.3f} times the parameters are copied"
    assert sent <= SENT[transport] + 0.005, f"{sent:.3f} times the parameters are sent"
    assert torch.isfinite(next(model.parameters()).to_local()).all()  # type: ignore[union-attr]


@ranks(2)
@pytest.mark.parametrize("transport", GATHER)
def test_a_gather_takes_no_more_calls(world: World, transport: str) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = transport
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)])
    shard_each(*model, model)
    for _ in range(3):
        model(torch.ones(2, 512)).sum().backward()
    group = groups_of(model[1])[0]
    group.step.log._announces = False  # which only gloo's collectives need
    called: list[str] = []
    depth = [0, 0]  # now, and at most

    def notice(frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "return") and frame.f_code.co_filename.startswith(str(SOURCE)):
            depth[0] += 1 if event == "call" else -1
            depth[1] = max(depth)
            if event == "call":
                called.append(frame.f_code.co_filename)

    sys.setprofile(notice)
    try:
        group.unshard()
        group.wait_for_unshard()
    finally:
        sys.setprofile(None)
    group.reshard()
    most_calls, most_files = GATHER[transport]
    assert len(called) <= most_calls, f"{len(called)} calls"
    assert len(set(called)) <= most_files, f"{set(called)}"
    assert depth[1] <= DEPTH, f"{depth[1]} calls of one another"


class Walk:
    """What a reader of some work must follow: the code of the library that runs, in whichever thread, but for what the
    garbage collector happens to end of other models."""

    def __init__(self) -> None:
        self.found: set[CodeType] = set()
        self.chain = 0  # the most frames of the library that call one another
        self._depths = threading.local()

    def __enter__(self) -> Walk:
        gc.collect()
        gc.disable()
        threading.setprofile(self._notice)
        sys.setprofile(self._notice)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        gc.enable()

    def _notice(self, frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "return") and frame.f_code.co_filename.startswith(str(SOURCE)):
            depth = max(0, getattr(self._depths, "now", 0) + (1 if event == "call" else -1))
            self._depths.now = depth
            self.chain = max(self.chain, depth)
            if event == "call" and not frame.f_code.co_name.startswith("<"):
                self.found.add(frame.f_code)

    def counts(self) -> dict[str, int]:
        lines = sum(len({line for _, _, line in code.co_lines() if line}) for code in self.found)
        files = {code.co_filename for code in self.found}
        return {"files": len(files), "functions": len(self.found), "lines": lines, "chain": self.chain}


@ranks(2)
@pytest.mark.transport("p2p")
def test_a_reader_of_a_step_has_no_more_to_follow(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for hooks in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):  # those of reports stay in a process
        own = [each for each in getattr(optimizer_of_torch, hooks).items() if each[1].__module__ == steps.__name__]
        monkeypatch.setattr(optimizer_of_torch, hooks, OrderedDict(own))
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)) for _ in range(4)])
    first, steady = Walk(), Walk()
    shard_each(*model, model)
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(5):
        with first if number == 0 else steady if number == 4 else nullcontext():
            model(torch.ones(2, 32)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for found, most in ((first.counts(), FIRST_STEP), (steady.counts(), STEADY_STEP)):
        assert all(found[what] <= most[what] for what in most), f"{found}, and may be {most}"
