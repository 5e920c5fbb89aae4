"""What sharding makes of a model: sizes that a table shows and a step does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fullshard
from fullshard.disk.file import DiskFile, DiskWork
from fullshard.disk.tensor import DiskTensor
from fullshard.report.advice import advise
from fullshard.report.environment import Facts, _disks, _file_system
from fullshard.report.explain import ADAM, Explanation, explain
from fullshard.report.facts import OffloadedFacts, bytes_outside, facts_of
from fullshard.report.meta_copy import on_meta
from fullshard.report.meta_step import ExchangeTotal
from fullshard.report.rank_trace import shares
from fullshard.report.search import Search
from fullshard.report.simulated import simulated_job
from fullshard.torch_private import simulated_world
from tests.group.test_extension import Bf16Gathered
from tests.harness import World, ranks

LOW = fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def linear(rows: int = 64, columns: int = 64, ranks: int = 4, **options: Any) -> Explanation:
    return explain(lambda: fullshard.fully_shard(nn.Linear(columns, rows, bias=False), **options), ranks=ranks)


@pytest.mark.parametrize("options", [{}, {"mp_policy": LOW}], ids=["fp32", "bf16"])
def test_a_shard_is_kept_in_the_dtype_of_the_parameters_alone(options: dict[str, Any]) -> None:
    """Without memory that ranks share, nothing else of the parameters rests between steps."""
    found = linear(**options)
    (group,) = found.groups
    assert group.transport != "shm"
    assert (group.shard, group.whole) == (64 * 64 * 4 // 4, 64 * 64 * (2 if options else 4))
    assert found.memory[0].parts[0] == ("shards", 1, group.shard)


def test_advice_on_padding_names_the_group_that_has_most_of_it() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(2**18, rows, bias=False) for rows in (9, 17, 11)))
        for layer in model:
            fullshard.fully_shard(layer)
        return fullshard.fully_shard(model)

    (found,) = [each for each in map(str, advise(explain(build, ranks=8).facts)) if "Padding" in each]
    # 9 rows over 8 ranks take 16: a share of 7 / 9. 17 take 24, and 11 take 16.
    assert "by 78 % in 0, most of it for '0.weight' of shape (9, 262144), cut along dim 0" in found


def test_a_rank_sends_its_part_of_a_parameter_with_a_gather_of_its_own_to_each_other() -> None:
    def build() -> nn.Module:
        model = nn.Linear(16, 8, bias=False)
        model.weight = nn.Parameter(Bf16Gathered(model.weight.detach()))
        return fullshard.fully_shard(model)

    found = explain(build, ranks=4)
    assert found.groups[0].parameters[0].extends
    assert found.traffic[0] == ExchangeTotal("gather in forward", 1, 3 * (2 * 16 * 4))


TABLE, NBYTES = torch.zeros(2**20), 4 * 2**20


class Model(nn.Module):
    def __init__(self, hold: Callable[[Any], object]) -> None:
        super().__init__()
        self.layer, self.lstm = nn.Linear(64, 64), nn.LSTM(64, 8)  # an LSTM lists its parameters
        hold(self)

    def forward(self, x: torch.Tensor) -> Any:
        return self.lstm(self.layer(x))[0]


#: How a model holds tensors, and the bytes of these.
HELD: dict[str, tuple[Callable[[Any], object], int]] = {
    "buffer": (lambda m: m.register_buffer("table", TABLE), NBYTES),
    "attribute": (lambda m: setattr(m, "table", TABLE), NBYTES),
    "attribute of a layer": (lambda m: setattr(m.layer, "table", TABLE), NBYTES),
    "dict of lists": (lambda m: setattr(m, "tables", {"all": [TABLE, TABLE.clone()]}), 2 * NBYTES),
    "twice": (lambda m: vars(m).update(table=TABLE, part=TABLE[: 2**19]), NBYTES),
    "buffer and view": (lambda m: (m.register_buffer("part", TABLE[: 2**19]), setattr(m, "table", TABLE)), NBYTES),
    "parameters": (lambda m: vars(m).update(params=[*m.parameters()], weight=m.layer.weight), 0),
    "view of a parameter": (lambda m: setattr(m, "row", m.layer.weight.detach()[0]), 4 * 64 * 64),
}


def test_tensors_outside_of_groups_count_once() -> None:
    with simulated_world(2, 0):
        for how, (hold, nbytes) in HELD.items():
            for model in (Model(hold), on_meta(Model(hold))):
                assert facts_of(fullshard.fully_shard(model)).outside == nbytes, how
    needed = []
    for how in ("parameters", "view of a parameter", "dict of lists"):
        with simulated_job(2, 0, 1):
            given = torch.ones(2, 64), ADAM, None, None, fullshard.MixedPrecisionPolicy(), {}
            needed.append(Search(Model(HELD[how][0]), *given).plan(2**30).needed - round(1.03 * HELD[how][1]))
    assert needed[1:] == pytest.approx([needed[0]] * 2, abs=16)


def test_the_views_that_a_wrapper_shows_do_not_count() -> None:
    model = Model(lambda _: None)
    assert bytes_outside(model, []) == sum(param.nbytes for param in model.parameters())
    assert explain(lambda: fullshard.FullyShardedDataParallel(model), ranks=2).facts.outside == 0


WIDTH = 256


def build(policy: fullshard.OffloadPolicy) -> Any:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    for layer in model:
        fullshard.fully_shard(layer, offload_policy=policy)
    return fullshard.fully_shard(model, offload_policy=policy)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(8, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def read_all(model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Read parameters and state, after what is still written. Returns how many bytes."""
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, DTensor)]
    on_disk = [
        each for each in (value.to_local() for value in (*model.parameters(), *states)) if type(each) is DiskTensor
    ]
    return sum(each.clone().nbytes for each in on_disk)


@ranks(1, 2)
@pytest.mark.parametrize("parameters", [True, False])
def test_what_rests_on_the_disk_is_as_large_as_its_file(world: World, tmp_path: Path, parameters: bool) -> None:
    model = build(fullshard.DiskOffloadPolicy(tmp_path, parameters=parameters))
    found = explain(model)
    rest = {kind: nbytes for kind, _, nbytes in found.memory[0].parts}
    weights, biases = (4 * 4 * numel // world.size for numel in (WIDTH**2, WIDTH))
    on_disk, in_memory = (weights, biases) if parameters else (0, weights + biases)
    assert (rest["shards"], rest.get("shards on a disk", 0)) == (in_memory, on_disk)
    assert (rest["optimizer state"], rest["optimizer state on a disk"]) == (2 * biases, 2 * weights)
    assert found.memory[0].nbytes == in_memory + 2 * biases
    train(model, torch.optim.AdamW(model.parameters(), foreach=False), 2)
    (file,) = (each for each in DiskFile.opened() if each.directory == tmp_path)
    gradients = sum(each.offloaded.reduced for each in found.groups)
    assert file.nbytes == on_disk + 2 * weights + gradients
    assert gradients == on_disk
    # What is counted as memory of a step is no more than without a disk, and at least what reads need.
    inside = explain(build(fullshard.OffloadPolicy()))
    for here, there in zip(found.memory[:4], inside.memory[:4], strict=True):
        assert here.nbytes < there.nbytes
    if parameters:
        assert "copies of shards" in {kind for kind, *_ in found.memory[1].parts}


def test_a_simulated_world_predicts_the_same(tmp_path: Path) -> None:
    found = explain(lambda: build(fullshard.DiskOffloadPolicy(tmp_path)), ranks=2)
    assert ("shards on a disk", 1, 4 * 4 * WIDTH**2 // 2) in found.memory[0].parts
    assert "copies of shards" in {kind for kind, *_ in found.memory[1].parts}
    text = " ".join(str(found).split())
    assert "99.6 % of the parameters on a disk" in text
    assert "parameters on the CPU" not in text


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (OffloadedFacts("parameters", " on the CPU", 100, 100, 25), "parameters on the CPU"),
        (
            OffloadedFacts("parameters", " on a disk", 50, 50, 25),
            "50.0 % of the parameters and optimizer state on a disk",
        ),
        (OffloadedFacts("optimizer state", " on a disk", 0, 0, 10), "40.0 % of the optimizer state on a disk"),
    ],
)
def test_what_is_offloaded_is_said_in_words(facts: OffloadedFacts, text: str) -> None:
    assert facts.text(100, 25) == text


@ranks(2)
def test_metrics_and_traces_tell_of_the_disk(world: World, tmp_path: Path) -> None:
    model = build(fullshard.DiskOffloadPolicy(tmp_path))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    train(model, optimizer, 1)
    read_all(model, optimizer)
    counted = DiskFile.transferred()
    with fullshard.log_metrics(model, tmp_path / f"metrics-{world.rank}.jsonl"):
        train(model, optimizer, 2)
    lines = [json.loads(line) for line in (tmp_path / f"metrics-{world.rank}.jsonl").read_text().splitlines()]
    weights = 4 * 4 * WIDTH**2 // 2
    reads = read_all(model, optimizer)
    read, written = (after - before for after, before in zip(DiskFile.transferred(), counted, strict=True))
    assert len(lines) == 2
    for line in lines:  # threads may write most of it after the step
        assert 0 < line["disk_written_bytes"] <= written
        assert 0 < line["disk_read_bytes"] <= read
        assert 0 <= line["disk_waited_seconds"] <= line["seconds"]
    assert written == 2 * 4 * weights  # parameters, gradients, two of the state
    assert sum(line["disk_written_bytes"] for line in lines) <= written
    assert sum(line["disk_read_bytes"] for line in lines) <= read - reads
    with fullshard.profile(model, steps=1) as trace:
        train(model, optimizer, 1)
        assert not DiskWork.listeners  # after the steps: it is recorded no more
    (rank,) = trace.ranks
    waits = rank.of("disk")
    found = shares(rank)
    assert found.disk == pytest.approx(sum(span.length for span in waits))
    parts = found.computing + found.copying + found.waiting + found.optimizer + found.outside + found.disk
    assert parts == pytest.approx(found.step, rel=0.01)


def test_the_doctor_warns_of_file_systems_in_memory_and_of_full_ones() -> None:
    def said(free: int, kind: str) -> tuple[str, str]:
        (check,) = _disks([Facts(rank=1, host="a", disks=[("/data", 1 << 20, free, kind)], restarts=0)])
        return check.result, check.text

    assert said(1 << 21, "ext4")[0] == "ok"
    assert said(1 << 19, "ext4")[0] == said(1 << 21, "tmpfs")[0] == "warning"
    text = "Rank 1 keeps 1.0 MiB of offloaded values in /data of a (ext4), where 2.0 MiB are free."
    assert said(1 << 21, "ext4")[1] == text


def test_the_type_of_a_file_system_is_that_of_the_innermost_mount() -> None:
    assert _file_system(Path("/proc/self")) == "proc"


@ranks(1)
def test_the_doctor_knows_a_disk_whose_directory_is_gone(world: World, tmp_path: Path) -> None:
    directory = tmp_path / "gone"
    model = build(fullshard.DiskOffloadPolicy(directory))
    directory.rmdir()
    (found,) = (disk for disk in Facts().disks if disk[0] == str(directory))
    assert found[1] >= 4 * 4 * WIDTH**2
    assert found[2] > 0
    assert model is not None
