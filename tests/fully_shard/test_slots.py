"""Memory that takes turns: what is allocated when, who reuses it, and what a released slot reads as."""

from __future__ import annotations

import gc
import itertools
import mmap
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard.buffer import heap
from fullshard.buffer.slots import SHARED, SlotPool
from tests.fully_shard.cases import EXCHANGED, environment, first_of, groups_of, inputs, shard_mlp, slots_in_use, twins
from tests.harness import World, ranks
from tests.harness.compare import each_block, sgd
from tests.harness.held import mappings
from tests.harness.models import MLP, seeded, shard_each


def equal_blocks(count: int = 6, width: int = 6) -> Any:
    """Blocks of one size and a root without parameters of its own."""
    model = nn.Module()
    model.blocks = nn.Sequential(*[nn.Linear(width, width) for _ in range(count)])
    model.forward = model.blocks.forward
    return model


def parameter_pool(model: nn.Module) -> SlotPool:
    return groups_of(model)[-1].parameter_pool


@pytest.fixture(autouse=True)
def _collect() -> None:
    gc.collect()


class Allocations:
    """Counts the calls by which a model's pools get memory."""

    def __init__(self, model: nn.Module) -> None:
        self.count = 0
        self.pools = {id(pool): pool for group in groups_of(model) for pool in _pools_of(group)}.values()
        for pool in self.pools:
            pool._allocate = self._counting(pool._allocate)

    def _counting(self, allocate: Any) -> Any:
        def count(*args: Any) -> Tensor:
            self.count += 1
            return allocate(*args)

        return count


def _pools_of(group: Any) -> list[SlotPool]:
    return [group.parameter_pool, group.gradient_pool, group.comm.pool("staging", group.transport.private)]


@EXCHANGED
@ranks(2, transport="p2p")
@pytest.mark.parametrize(("param_dtype", "reshard"), [(None, True), (torch.bfloat16, False)])
def test_a_second_step_allocates_no_buffer(world: World, param_dtype: torch.dtype | None, reshard: bool) -> None:
    policy = fullshard.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    model = shard_mlp(mp_policy=policy, reshard_after_forward=reshard)
    for _ in range(2):  # the second knows what to gather ahead, and needs a slot for it
        model(inputs()).sum().backward()
    allocations = Allocations(model)
    for _ in range(3):
        model(inputs()).sum().backward()
    assert allocations.count == 0
    for pool in allocations.pools:
        pool.drop()
    model(inputs()).sum().backward()
    assert allocations.count > 0, "the counter counts"


@ranks(2)
@pytest.mark.parametrize("transport", ["p2p", "shm"])
def test_later_steps_fault_in_almost_nothing_and_map_nothing(world: World, transport: str) -> None:
    width, count = 512, 4  # a block of 1 MiB, of 257 pages
    model = seeded(lambda: equal_blocks(count, width))
    with environment(FULLSHARD_TRANSPORT=transport):
        each_block()(fullshard, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(1, width)

    def faults(act: Callable[[], object]) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        act()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    pages = count * width * width * 4 // resource.getpagesize()
    with mmap.mmap(-1, pages * resource.getpagesize()) as fresh:
        assert faults(lambda: fresh.write(bytes(len(fresh)))) >= pages, "the counter counts"
    for _ in range(3):  # the first steps fault in shards, slots and gradients, unless the process has pages to spare
        step()
    mapped = mappings()
    assert min(faults(step) for _ in range(5)) < pages / 8
    assert mappings() == mapped or transport == "p2p"


@ranks(2, transport="p2p")
def test_there_are_one_slot_and_one_for_each_group_ahead(world: World) -> None:
    for limit in (0, 1, 2, 3):
        model = seeded(equal_blocks)
        each_block(reshard_after_forward=True)(fullshard, model)
        model.set_prefetch_limit(limit)
        for _ in range(3):
            model(inputs()).sum().backward()
        pool = parameter_pool(model.blocks)
        (size,) = {group.full.buffer.nbytes for group in groups_of(model.blocks)}
        assert slots_in_use(pool) == 0
        assert pool.nbytes_free == (1 + limit) * size


@ranks(2, transport="p2p")
def test_dropped_slots_give_their_memory_back_and_the_next_step_is_right(world: World) -> None:
    pair = twins(world)
    pair.step()
    pools = [pool for group in groups_of(pair.sharded) for pool in _pools_of(group)]
    kept = sum(pool.nbytes_free for pool in {id(pool): pool for pool in pools}.values())
    assert kept > 0
    messages = SHARED.nbytes_free  # what transports keep goes too
    assert pair.sharded.free_buffers() == kept + messages
    assert SHARED.nbytes_free == 0 or messages == 0
    assert all(pool.nbytes_free == 0 for pool in pools)
    pair.step()
    assert sum(pool.nbytes_free for pool in {id(pool): pool for pool in pools}.values()) <= 2 * kept
    pair.step()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="counts memory as Linux tells it")
@ranks(2, transport="p2p")
def test_freed_buffers_are_the_systems_and_not_kept_in_the_heap(world: World) -> None:
    """The heap was told to keep what a step frees, so that it does not give it back by itself."""
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    shard_each(*model, model)
    for _ in range(3):
        model(torch.ones(1, 1024)).sum().backward()
        model.zero_grad()
    before, freed = resident(), model.free_buffers()
    assert freed >= 8 * 2**20
    assert before - resident() > freed / 2
    left = resident()
    heap.return_freed()
    assert left - resident() < 2**20, "nothing was left to give back"


@ranks(2, transport="p2p")
def test_dropping_between_forward_and_backward_is_harmless(world: World) -> None:
    pair = twins(world)

    def loss(model: Any, x: Tensor) -> Tensor:
        value = model(x).square().mean()
        if model is pair.sharded:
            model.free_buffers()
        return value

    for _ in range(3):
        pair.step(loss=loss)


@ranks(2, transport="p2p")
def test_groups_of_different_sizes_take_turns_in_one_slot(world: World) -> None:
    def build() -> Any:
        model = nn.Module()
        widths = (6, 40, 3, 50, 2, 60, 5)
        model.blocks = nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(widths)])
        model.forward = model.blocks.forward
        return model

    pair = twins(world, lambda: seeded(build))
    for _ in range(4):
        pair.step()
    largest = max(group.full.buffer.nbytes for group in groups_of(pair.sharded))
    assert parameter_pool(pair.sharded.blocks).nbytes_free <= 3 * largest


@ranks(2, transport="p2p")
def test_a_slot_that_is_in_use_is_not_taken_again(world: World) -> None:
    model = shard_mlp()
    model.blocks[0].unshard()
    with pytest.raises(RuntimeError, match="in use"):
        groups_of(model.blocks[0])[0].full.buffer.take()


@ranks(2, transport="p2p")
def test_two_trees_share_no_slot(world: World) -> None:
    one, other = twins(world), twins(world)
    assert not {id(pool) for group in groups_of(one.sharded) for pool in _pools_of(group)} & {
        id(pool) for group in groups_of(other.sharded) for pool in _pools_of(group)
    }
    for _ in range(2):
        one.step()
        other.step()


@ranks(2, timeout=20, transport="p2p")
@first_of("steps", True, False)
def test_a_model_on_one_rank_alone_changes_nothing_for_the_others(world: World, steps: bool) -> None:
    pair = twins(world)
    pair.step()
    single = torch.distributed.new_group([0])
    if world.rank == 0:
        mesh = torch.distributed.device_mesh.DeviceMesh.from_group(single, "cpu")
        model = seeded(MLP)
        each_block(mesh=mesh)(fullshard, model)
        optimizer = sgd(model.parameters())

    def loss(model_: Any, x: Tensor) -> Tensor:
        value = model_(x).square().mean()
        if world.rank == 0 and model_ is pair.sharded:
            model(inputs()).sum().backward()
            if steps:
                optimizer.step()
        return value

    for _ in range(3):
        pair.step(loss=loss)


@ranks(2, transport="p2p")
def test_debug_mode_fills_what_was_released_with_nan(world: World) -> None:
    with environment(FULLSHARD_DEBUG="1"):
        model = shard_mlp(reshard_after_forward=True)
    kept: list[Tensor] = []
    model.blocks[0].register_forward_hook(lambda module, args, output: kept.append(module[0].weight))
    model.blocks[0].unshard()
    weight = model.blocks[0][0].weight
    assert not weight.isnan().any()
    model.blocks[0].reshard()
    assert weight.isnan().all(), "whoever reads it later sees it"
    quiet = shard_mlp(reshard_after_forward=True)
    quiet.blocks[0].unshard()
    weight = quiet.blocks[0][0].weight
    quiet.blocks[0].reshard()
    assert not weight.isnan().any()
