"""Sums over replicas: in the memory of a host, and by the backend's all-reduces."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard.buffer.plan import ParamShape, make_plan
from fullshard.comm.all_reduce import AllReduceRoute, sum_route
from fullshard.comm.select import select_transport
from fullshard.comm.transport import Reduction, StillRead, Transfer
from tests.harness import World, ranks

CPU = torch.device("cpu")
PLAN = make_plan([ParamShape("a", (7, 3)), ParamShape("b", (5,)), ParamShape("c", (40,))], 1)


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(numel).to(dtype) * (rank + 1)


def summed(world: World, name: str, dtype: torch.dtype, home: torch.dtype, selected: tuple[int, ...]) -> None:
    """Add up some parameters of a buffer and, where no memory is shared, a tensor beside them."""
    group, os.environ["FULLSHARD_TRANSPORT"] = dist.group.WORLD, name
    assert group is not None
    transport, plan = select_transport(group, CPU), PLAN.select(selected)
    full = transport.allocate(PLAN.full_numel * dtype.itemsize, CPU).view(dtype)
    shard = torch.empty(plan.shard_numel, dtype=home)
    route = sum_route(transport, [Transfer(plan, full, shard)], group, 3, CPU)
    assert isinstance(route, AllReduceRoute) == (transport.name != "shm")
    total = sum(rank + 1 for rank in range(world.size))
    for factor in (1, 2):  # twice, as in every step
        full.copy_(values(world.rank, full.numel(), dtype) * factor)
        beside = [values(world.rank, 9, dtype)] if isinstance(route, AllReduceRoute) else []
        pending = route.start([shard], Reduction(2.0), *beside)
        pending.finish()
        if isinstance(pending, StillRead):
            pending.wait()
        mean = values(0, full.numel(), dtype).to(torch.promote_types(dtype, torch.float32)) * total * factor / 2
        for param, start, at in zip(plan.params, plan.full_offsets, plan.shard_offsets, strict=True):
            expected = mean[start : start + param.numel].to(dtype).to(home)
            assert torch.equal(shard[at : at + param.numel], expected)
        for each in beside:
            assert torch.equal(each, (values(0, 9, dtype).to(mean.dtype) * total / 2).to(dtype))
        left_out = [start for index, start in enumerate(PLAN.full_offsets) if index not in selected]
        assert all(full[start + 1] == (world.rank + 1) * (start + 1) * factor for start in left_out)
    dist.barrier()


@pytest.mark.parametrize("transport", ["shm", "p2p", "collective"])
@ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_what_replicas_have_is_added_up_in_every_dtype(world: World, transport: str, dtype: torch.dtype) -> None:
    summed(world, transport, dtype, dtype, (0, 1, 2))


@pytest.mark.parametrize("transport", ["shm", "p2p", "collective"])
@ranks(2, 3)
@pytest.mark.parametrize("selected", [(0,), (1, 2), (0, 2)], ids=str)
def test_parameters_without_gradients_are_left_as_they_are(
    world: World, transport: str, selected: tuple[int, ...]
) -> None:
    summed(world, transport, torch.float32, torch.float32, selected)


@pytest.mark.parametrize("transport", ["shm", "p2p", "collective"])
@ranks(2)
def test_replicas_get_the_same_where_the_sum_is_rounded(world: World, transport: str) -> None:
    summed(world, transport, torch.bfloat16, torch.float32, (0, 1, 2))


@ranks(3)
def test_a_sum_in_fp16_does_not_overflow(world: World) -> None:
    group = dist.group.WORLD
    assert group is not None
    route = sum_route(select_transport(group, CPU), [], group, 3, CPU)
    gradient = torch.full((4,), 40_000.0, dtype=torch.float16)
    route.start((), Reduction(3.0), gradient).finish()
    assert gradient.tolist() == pytest.approx([40_000.0] * 4, rel=2**-9)


@ranks(2)
@pytest.mark.parametrize("is_late", [False, True])
def test_an_error_in_one_sum_waits_for_those_under_way(world: World, is_late: bool) -> None:
    group = dist.group.WORLD
    assert group is not None
    route = sum_route(select_transport(group, CPU), [], group, 3, CPU)
    gradient, refused = torch.ones(9), torch.ones(1, dtype=torch.float16).expand(2)  # cannot be divided in place
    given = [torch.ones(2).to(torch.float8_e5m2), gradient] if is_late else [gradient, refused]  # gloo adds up no fp8
    time.sleep(world.rank / 2)
    with pytest.raises(RuntimeError, match="scalar type" if is_late else "single memory location"):
        route.start((), Reduction(2.0), *given).finish()
    assert gradient.tolist() == [2.0] * 9
    dist.barrier()


@ranks(2)
def test_runs_of_neighbours_travel_together(world: World) -> None:
    calls: list[int] = []
    reduce: Any = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(tensor.numel())
        return reduce(tensor, *args, **kwargs)

    group = dist.group.WORLD
    assert group is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counted)
        for selected in ((0, 1, 2), (0, 2)):
            plan, full = PLAN.select(selected), torch.ones(PLAN.full_numel)
            shard, transport = torch.empty(plan.shard_numel), select_transport(group, CPU)
            sum_route(transport, [Transfer(plan, full, shard)], group, 3, CPU).start([shard]).finish()
    starts = PLAN.full_offsets
    assert calls == [starts[2] + 40, 21, 40]


@ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_only_what_others_add_up_lies_in_shared_memory(world: World, dtype: torch.dtype) -> None:
    """Parameters 1 and 2 are tensors beside the buffer, which become their sums."""
    group = dist.group.WORLD
    assert group is not None
    transport = select_transport(group, CPU)
    full = transport.allocate(PLAN.full_numel * dtype.itemsize, CPU).view(dtype)
    plans = [PLAN.select([index]) for index in range(3)]
    shards = [torch.empty(plan.shard_numel, dtype=dtype) for plan in plans]
    route = sum_route(transport, list(map(Transfer, plans, [full] * 3, shards)), group, 3, CPU)
    total = sum(rank + 1 for rank in range(world.size))
    for factor in (1, 2):
        full.fill_(torch.nan)
        full[:21] = values(world.rank, 21, dtype) * factor
        beside = [values(world.rank, numel, dtype) * factor for numel in (5, 40)]
        pending = route.start(shards[:1], Reduction(2.0), *beside)
        assert int(full[48:88].isnan().sum()) == -(-40 // world.size) - (world.rank == 2) * 2, "its own part"
        pending.finish()
        assert isinstance(pending, StillRead)
        pending.wait()
        for found, numel in zip((shards[0], *beside), (21, 5, 40), strict=True):
            assert torch.equal(found[:numel], (values(0, numel, torch.float64) * total * factor / 2).to(dtype))
    dist.barrier()
