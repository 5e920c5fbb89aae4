"""`fit` finds a plan that fits, which loses little time, or says how much memory one needs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from benchmarks import fitting
from benchmarks.models import Work
from benchmarks.ranks import run_ranks
from torch import nn

from fullshard import DoesNotFitError, MixedPrecisionPolicy, Plan, cli, fit, tree
from fullshard.comm.process_group import gather_objects
from fullshard.report.activations import trace_step
from fullshard.report.explain import ADAM, planned_device, state_bytes
from fullshard.report.search import Search
from fullshard.report.simulated import simulated_job
from fullshard.torch_private import simulated_world
from tests.harness import World, ranks

WORK = Work("fitted", blocks=4, width=128, sequence=256, vocabulary=64)
SMALL = Work("small", blocks=2, width=16, sequence=8, vocabulary=16)
ROOMY = "1 TiB"
ENOUGH = 1 << 40


@pytest.fixture(params=["shm", *(pytest.param(name, marks=pytest.mark.slow) for name in ("p2p", "collective"))])
def transport(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    monkeypatch.setenv("FULLSHARD_TRANSPORT", request.param)
    return str(request.param)


def planned(memory: float | str, ranks: int = 2, work: Work = SMALL, **options: Any) -> Plan:
    return fit(work.build(), work.batch(0, 0), memory=memory, ranks=ranks, **options)


@contextmanager
def searching(
    model: nn.Module | None = None,
    batch: Any = None,
    *,
    mesh: tuple[int, ...] = (2,),
    device: str | None = None,
    optimizer_bytes: float = ADAM,
    hardware: dict[str, float] | None = None,
) -> Iterator[Search]:
    """The search of a call of ``fit``, which finds plans for several sizes of memory."""
    model, batch = model or WORK.build(), WORK.batch(0, 0) if batch is None else batch
    with simulated_job(math.prod(mesh), 0, 1, planned_device(device), mesh) as made:
        yield Search(model, batch, optimizer_bytes, None, made, MixedPrecisionPolicy(), hardware or {})


def smallest(search: Search) -> int:
    with pytest.raises(DoesNotFitError, match="the smallest memory is") as caught:
        search.plan(2**10)
    return caught.value.smallest


def test_a_plan_for_gpus_offloads_to_the_cpu_and_leaves_room_for_what_cublas_takes() -> None:
    roomy = planned(ROOMY, device="cuda")
    assert (roomy.transport, roomy.offloaded_state) == ("collective", 0)
    with searching(SMALL.build(), SMALL.batch(0, 0), device="cuda") as search:
        assert search.plan(smallest(search)).offloaded_state > 0
    with simulated_world(2, 0), pytest.raises(ValueError, match="a job plans for its own devices, not for cuda"):
        fit(WORK.build(), WORK.batch(0, 0), memory=ROOMY, device="cuda")


def test_with_enough_memory_nothing_is_recomputed_and_every_group_stays_whole() -> None:
    model, batch = SMALL.build(), SMALL.batch(0, 0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan = fit(model, batch, memory=ROOMY, ranks=2)
    assert plan.zero_stage == 2
    assert not plan.recomputed
    assert not any(group.reshards for group in plan.groups)
    assert "The fastest plan fits." in str(plan)
    tokens = next(each for each in tree.tensors(batch)).numel()
    assert f"Assumed: each rank processes {tokens:,} tokens, computes" in " ".join(str(plan).split())
    assert type(model).__name__ == "Transformer"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_less_memory_costs_more_time(transport: str) -> None:
    with searching() as search:
        roomy, least = search.plan(ENOUGH), smallest(search)
        plans = [roomy, *(search.plan(round(least + share * (roomy.needed - least))) for share in (0.7, 0.3, 0.0))]
        with pytest.raises(DoesNotFitError, match=r"on 2 ranks into .* for the \w+ of .*, of which .* are \w+"):
            search.plan(least - 1)
    assert all(plan.needed <= plan.memory for plan in plans)
    assert [plan.seconds for plan in plans] == sorted(plan.seconds for plan in plans)
    assert plans[-1].seconds > roomy.seconds
    assert plans[-1].recomputed
    assert {plan.transport for plan in plans} == {transport}


def test_what_would_fit_otherwise_is_said() -> None:
    says = r"Otherwise: on 4 ranks: needs .*; computed in bfloat16: needs"
    with pytest.raises(DoesNotFitError, match=says):
        planned(2**10)


def test_a_step_is_traced_once_for_all_numbers_of_ranks() -> None:
    with mock.patch("fullshard.report.search.trace_step", wraps=trace_step) as traced:
        planned(ROOMY, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))  # searches for 2 and for 4 ranks
    assert traced.call_count <= 3


def test_the_ranks_of_a_host_share_its_full_buffers_and_its_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLSHARD_TRANSPORT", "")
    work = Work("wide", blocks=4, width=512, sequence=4, vocabulary=64)
    with simulated_job(8, 0, 2):
        search = Search(work.build(), work.batch(0, 0), ADAM, None, None, MixedPrecisionPolicy(), {}, hosts=2)
        fastest = search._fastest()
        freed = replace(fastest, resharded=len(search._groups[fastest.key]))
        saved = search.need(fastest).most - search.need(freed).most
        whole = [group.whole for group in search._facts[fastest.key].groups]
    three = 3 * max(whole)  # in use, gathered ahead, and the first block, whose backward ends with the model's
    assert saved == pytest.approx(1.03 * (sum(whole) - three) / 4, rel=0.05), "its share of what stays whole"
    two = planned(ROOMY, ranks=8, work=work, hosts=2)
    assert (two.transport, two.zero_stage) == ("hosts", 2)
    assert "the 4 ranks of a node together send 1 GB/s" in " ".join(str(two).split())
    slow = planned(ROOMY, ranks=8, work=work, hosts=2, hardware={"node_bandwidth": 1e8})
    assert slow.seconds > 5 * two.seconds
    with pytest.raises(ValueError, match="hosts=3 must divide ranks=8"):
        planned(ROOMY, ranks=8, hosts=3)


def test_a_disk_takes_what_does_not_fit(transport: str, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with simulated_job(2, 0, 1) as mesh:
        work = Work("wide", blocks=4, width=512, sequence=16, vocabulary=64)
        given = work.build(), work.batch(0, 0), ADAM, None, mesh, MixedPrecisionPolicy(), {}
        without, search = Search(*given), Search(*given, str(disk))
        roomy, least = search.plan(ENOUGH), smallest(search)
        most = smallest(without)
        plans = [search.plan(round(least + share * (most - least))) for share in (0.9, 0.5, 0.0)]
    assert not roomy.offloaded_state
    assert least < 0.8 * most
    assert all(plan.needed <= plan.memory and plan.offload_directory == str(disk) for plan in plans)
    assert [plan.seconds for plan in plans] == sorted(plan.seconds for plan in plans)
    assert plans[0].offloaded_state > 0
    assert plans[0].offloaded_parameters < plans[-1].offloaded_parameters == 1
    assert not disk.exists(), "planning makes nothing there"
    assert "a disk moves 1 GB/s" in str(plans[0])


def test_latency_makes_larger_groups() -> None:
    sizes = []
    for latency in (0.0, 1.0):
        with searching(hardware={"bandwidth": 1e12, "latency": latency, "peak_flops": 1e15}) as search:
            sizes.append(len(search.plan(ENOUGH).groups))
    assert sizes[1] < sizes[0] or sizes[1] == 3


def test_blocks_that_count_batches_are_not_recomputed() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())

    with searching(nn.Sequential(*(block() for _ in range(4))), torch.ones(4, 8, 32, 32)) as search:
        assert not search.plan(smallest(search)).recomputed


def test_replicas_need_as_much_as_the_ranks_that_shard() -> None:
    with searching(SMALL.build(), SMALL.batch(0, 0), mesh=(4,)) as search:
        needed = search.plan(ENOUGH).needed
    assert planned(ROOMY, 4, mesh=(2, 2)).needed > needed


@pytest.mark.slow
@pytest.mark.parametrize(("size", "transport"), [(1, "p2p"), (2, "p2p"), (2, "shm")])
@pytest.mark.parametrize("name", fitting.CASES)
def test_a_step_takes_no_more_than_the_memory_it_was_planned_for(name: str, size: int, transport: str) -> None:
    plans = run_ranks(fitting.make_plans, size, name, transport)[0]
    for plan in plans:
        measured = max(run_ranks(fitting.measure_peak, size, name, transport, plan))
        assert measured <= plan.memory, f"{fitting.short(plan)}: {measured} bytes, and {plan.needed} were predicted"
        assert plan.needed <= 1.15 * measured


@ranks(2)
def test_ranks_of_a_job_agree_on_a_plan(world: World) -> None:
    plan = fit(SMALL.build(), SMALL.batch(world.rank, 0), memory=ROOMY)
    assert set(gather_objects(plan.to_json(), None)) == {plan.to_json()}
    with pytest.raises(RuntimeError, match="this process is one of 2 ranks and cannot plan for 3"):
        fit(WORK.build(), WORK.batch(0, 0), memory=ROOMY, ranks=3)


def test_arguments_that_make_no_sense_are_refused() -> None:
    with pytest.raises(RuntimeError, match="not a rank of a job"):
        fit(WORK.build(), WORK.batch(0, 0), memory=ROOMY)
    with pytest.raises(ValueError, match="expected bytes"):
        planned("much")
    with pytest.raises(ValueError, match="nothing is trained"):
        fit(WORK.build().requires_grad_(False), WORK.batch(0, 0), memory=ROOMY, ranks=2)
    with pytest.raises(ValueError, match="hardware has arguments of"):
        planned(ROOMY, hardware={"speed": 1.0})
    with pytest.raises(ValueError, match="optimizer_bytes must be bytes for each element, 0 or more, got -1"):
        planned(ROOMY, optimizer_bytes=-1)
    for mesh in ((2, 3), (8,), (-2, -1), (1, 1, 2)):
        with pytest.raises(ValueError, match="whose product is the number of ranks, 2; got"):
            planned(ROOMY, mesh=mesh)


def test_the_state_of_adamw_has_the_dtype_of_the_parameters() -> None:
    model, needed = WORK.build().bfloat16(), []
    for nbytes in (state_bytes(model, None), state_bytes(model, 8.0)):
        with searching(model, optimizer_bytes=nbytes) as search:
            needed.append(search.plan(ENOUGH).needed)
    elements = sum(param.numel() for param in model.parameters())
    assert needed[1] - needed[0] == pytest.approx(4 * elements / 2, rel=0.1)


def test_the_command_prints_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["fit", f"{__file__}:build", "--ranks", "2", "--memory"]
    assert cli.main([*arguments, "1GB"]) == 0
    assert "The fastest plan fits." in capsys.readouterr().out
    assert cli.main([*arguments, "1GB", "--json"]) == 0
    assert Plan.from_json(capsys.readouterr().out).model == "Sequential"
    assert cli.main([*arguments, "100"]) == 1
    assert "the smallest memory is" in capsys.readouterr().err
    assert cli.main(["fit", "tests.report.test_search:nothing", "--ranks", "2", "--memory", "1GB"]) == 2


#: A table of a user's file is on the CPU, although the model is built on meta.
WEIGHTS = torch.ones(4)


def build() -> tuple[nn.Module, torch.Tensor]:
    assert WEIGHTS.tolist() == [1.0] * 4
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.ones(2, 8)


@pytest.mark.parametrize("count", [0, 1.5, "2", True])
def test_a_number_of_ranks_that_is_none_is_refused(count: Any) -> None:
    with pytest.raises(RuntimeError, match="give fit\\(\\) the number of ranks, got ranks="):
        planned(ROOMY, count)
