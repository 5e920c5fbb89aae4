"""`fit` finds a plan that fits, which loses little time, or says how much memory one needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import fitting
from benchmarks.models import Work
from benchmarks.ranks import run_ranks
from torch import nn

from fullshard import DoesNotFitError, MixedPrecisionPolicy, Plan, cli, fit, tree
from fullshard.comm.process_group import gather_objects
from fullshard.report.explain import ADAM
from fullshard.report.search import Search, _simulated
from fullshard.torch_private import simulated_world
from tests.harness import World, ranks

WORK = Work("fitted", blocks=4, width=128, sequence=256, vocabulary=64)
ROOMY = "1 TiB"


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    monkeypatch.setenv("FULLSHARD_TRANSPORT", request.param)
    return str(request.param)


def planned(memory: float | str, ranks: int = 2, **options: Any) -> Plan:
    return fit(WORK.build(), WORK.batch(0, 0), memory=memory, ranks=ranks, **options)


@contextmanager
def searching() -> Iterator[Search]:
    """The search of a call of ``fit``, which finds plans for several sizes of memory."""
    with _simulated(2, None) as mesh:
        yield Search(WORK.build(), WORK.batch(0, 0), ADAM, None, mesh, MixedPrecisionPolicy(), {})


def smallest(search: Search) -> int:
    with pytest.raises(DoesNotFitError, match="the smallest memory is") as caught:
        search.plan(2**10)
    return caught.value.smallest


def test_a_plan_for_gpus_offloads_to_the_cpu_and_leaves_room_for_what_cublas_takes() -> None:
    roomy = planned(ROOMY, device="cuda")
    assert (roomy.transport, roomy.offloaded_state) == ("collective", 0)
    with pytest.raises(DoesNotFitError, match="the smallest memory is") as caught:
        planned("64 MiB", device="cuda")
    assert planned(caught.value.smallest, device="cuda").offloaded_state > 0
    with simulated_world(2, 0), pytest.raises(ValueError, match="a job plans for its own devices, not for cuda"):
        fit(WORK.build(), WORK.batch(0, 0), memory=ROOMY, device="cuda")


def test_with_enough_memory_nothing_is_recomputed_and_every_group_stays_whole() -> None:
    plan = planned(ROOMY)
    assert plan.zero_stage == 2
    assert not plan.recomputed
    assert not any(group.reshards for group in plan.groups)
    assert "The fastest plan fits." in str(plan)
    tokens = next(each for each in tree.tensors(WORK.batch(0, 0))).numel()
    assert f"Assumed: each rank processes {tokens:,} tokens, computes" in " ".join(str(plan).split())


@pytest.mark.parametrize("transport", ["shm", "p2p", "collective"], indirect=True)
def test_less_memory_costs_more_time(transport: str) -> None:
    with searching() as search:
        roomy, least = search.plan(1 << 40), smallest(search)
        plans = [roomy, *(search.plan(round(least + share * (roomy.needed - least))) for share in (0.7, 0.3, 0.0))]
    assert all(plan.needed <= plan.memory for plan in plans)
    assert [plan.seconds for plan in plans] == sorted(plan.seconds for plan in plans)
    assert plans[-1].seconds > roomy.seconds
    assert plans[-1].recomputed
    assert {plan.transport for plan in plans} == {transport}


def test_a_byte_less_than_the_smallest_memory_does_not_fit() -> None:
    with searching() as search:
        least = smallest(search)
        assert search.plan(least).needed <= least
        with pytest.raises(DoesNotFitError, match=r"on 2 ranks into .* for the \w+ of .*, of which .* are \w+"):
            search.plan(least - 1)
    with pytest.raises(
        DoesNotFitError, match=r"Otherwise: on 4 ranks: needs .*; computed in bfloat16: needs"
    ) as caught:
        planned(least - 1)
    assert caught.value.smallest == least


@pytest.mark.parametrize("transport", ["shm", "p2p"], indirect=True)
def test_a_disk_takes_what_does_not_fit(transport: str, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with _simulated(2, None) as mesh:
        work = Work("wide", blocks=4, width=512, sequence=16, vocabulary=64)
        given = work.build(), work.batch(0, 0), ADAM, None, mesh, MixedPrecisionPolicy(), {}
        without, search = Search(*given), Search(*given, str(disk))
        roomy, least = search.plan(1 << 40), smallest(search)
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
    quick, slow = ({"bandwidth": 1e12, "latency": latency, "peak_flops": 1e15} for latency in (0.0, 1.0))
    sizes = {at: len(planned(ROOMY, hardware=each).groups) for at, each in (("quick", quick), ("slow", slow))}
    assert sizes["slow"] < sizes["quick"] or sizes["slow"] == 3


def test_blocks_that_count_batches_are_not_recomputed() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())

    model = nn.Sequential(*(block() for _ in range(4)))
    with pytest.raises(DoesNotFitError) as caught:
        fit(model, torch.ones(4, 8, 32, 32), memory=2**10, ranks=2)
    assert not fit(model, torch.ones(4, 8, 32, 32), memory=caught.value.smallest, ranks=2).recomputed


def test_the_model_stays_as_it_is() -> None:
    model = WORK.build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fit(model, WORK.batch(0, 0), memory=ROOMY, ranks=2)
    assert type(model).__name__ == "Transformer"
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_replicas_need_as_much_as_the_ranks_that_shard() -> None:
    assert planned(ROOMY, 4, mesh=(2, 2)).needed > planned(ROOMY, 4).needed


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
    plan = fit(WORK.build(), WORK.batch(world.rank, 0), memory=ROOMY)
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
    model, batch = WORK.build().bfloat16(), WORK.batch(0, 0)
    half, given = (fit(model, batch, memory=ROOMY, ranks=2, optimizer_bytes=each).needed for each in (None, 8.0))
    elements = sum(param.numel() for param in model.parameters())
    assert given - half == pytest.approx(4 * elements / 2, rel=0.1)


def test_the_command_prints_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["fit", f"{__file__}:build", "--ranks", "2", "--memory"]
    assert cli.main([*arguments, "1GB"]) == 0
    assert "The fastest plan fits." in capsys.readouterr().out
    assert cli.main([*arguments, "1GB", "--json"]) == 0
    assert Plan.from_json(capsys.readouterr().out).model == "Transformer"
    assert cli.main([*arguments, "1kB"]) == 1
    assert "the smallest memory is" in capsys.readouterr().err
    assert cli.main(["fit", "tests.report.test_search:nothing", "--ranks", "2", "--memory", "1GB"]) == 2


#: A table of a user's file is on the CPU, although the model is built on meta.
WEIGHTS = torch.ones(4)


def build() -> tuple[nn.Module, torch.Tensor]:
    assert WEIGHTS.tolist() == [1.0] * 4
    work = Work("small", blocks=2, width=16, sequence=8, vocabulary=16)
    return work.build(), work.batch(0, 0)


@pytest.mark.parametrize("count", [0, 1.5, "2", True])
def test_a_number_of_ranks_that_is_none_is_refused(count: Any) -> None:
    with pytest.raises(RuntimeError, match="give fit\\(\\) the number of ranks, got ranks="):
        planned(ROOMY, count)
