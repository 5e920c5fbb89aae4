"""The memory formula, counted in bytes at shards, slots and gradients: at rest, in forward, in backward, and after."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fullshard
from fullshard.group.gradients import Gradients
from tests.fully_shard.cases import groups_of, slots_in_use
from tests.harness import World, ranks
from tests.harness.compare import each_block
from tests.harness.models import seeded

WIDTH = 8
COUNT = 6


def blocks() -> Any:
    """Equal blocks that all have one size, and a root without parameters of its own."""
    model = nn.Module()
    model.blocks = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(COUNT)])
    model.forward = model.blocks.forward
    return model


def batch() -> torch.Tensor:
    return torch.randn(3, WIDTH).requires_grad_()


class Meter:
    """Counts what the pools of a model have in use, and the most that they had at any event."""

    def __init__(self, model: Any) -> None:
        model.add_observer(lambda event: self.look())
        group = groups_of(model)[0]
        self.parameters, self.gradients = group.parameter_pool, group.gradient_pool
        self.most_parameters = self.most_gradients = 0

    def look(self) -> None:
        self.most_parameters = max(self.most_parameters, slots_in_use(self.parameters))
        self.most_gradients = max(self.most_gradients, slots_in_use(self.gradients))


def sharded_bytes(model: nn.Module) -> int:
    """What the memory takes in which this rank's parts of the parameters lie."""
    return sum(group.shard.views[0].untyped_storage().nbytes() for group in groups_of(model))


@ranks(2, transport="p2p")
def test_at_rest_there_are_only_the_shards(world: World) -> None:
    model = seeded(blocks)
    each_block()(fullshard, model)
    groups = groups_of(model.blocks)
    whole = COUNT * (WIDTH * WIDTH + WIDTH) * 4
    padding = COUNT * 64 * 2
    assert whole / world.size <= sharded_bytes(model.blocks) <= whole / world.size + padding
    assert sharded_bytes(model.blocks) == sum(group.shard.nbytes for group in groups)
    parts = {p.to_local().untyped_storage() for p in model.parameters()}  # type: ignore[attr-defined]
    assert sum(part.nbytes() for part in parts) == whole / world.size
    for group in groups:
        memory = group.shard.views[0].untyped_storage()
        ends = range(memory.data_ptr(), memory.data_ptr() + memory.nbytes())
        assert all(param.local.data_ptr() in ends for param in group.params)
    assert all(pool.nbytes_free == slots_in_use(pool) == 0 for group in groups for pool in group.comm.pools.values())


@ranks(1, 2, transport="p2p")
@pytest.mark.parametrize(("ahead", "buffers"), [(0, 1), (2, 2), (1, 1), (1, 2)])
def test_a_step_has_one_group_those_ahead_and_the_gradients_under_way(world: World, ahead: int, buffers: int) -> None:
    model = seeded(blocks)
    each_block(reshard_after_forward=True)(fullshard, model)
    model.set_prefetch_limit(ahead)
    model.set_reduce_scatter_max_input_buffers(buffers)
    meter = Meter(model)
    for _ in range(2):
        with torch.no_grad():
            model(batch())
    gathers = world.size > 1
    assert (meter.most_parameters, meter.most_gradients) == ((1 + ahead) * gathers, 0)
    for _ in range(2):
        model(batch()).sum().backward()
    assert meter.most_parameters == 1 + ahead if gathers else meter.most_parameters <= 1 + ahead
    assert meter.most_gradients == buffers if gathers else meter.most_gradients <= buffers
    assert slots_in_use(meter.parameters) == slots_in_use(meter.gradients) == 0


@ranks(2, transport="p2p")
def test_without_reshard_after_forward_every_group_is_there(world: World) -> None:
    model = seeded(blocks)
    each_block(reshard_after_forward=False)(fullshard, model)
    meter = Meter(model)
    output = model(batch())
    assert slots_in_use(meter.parameters) == COUNT
    output.sum().backward()
    assert slots_in_use(meter.parameters) == 0


@ranks(2, transport="p2p")
def test_after_a_step_gradients_have_the_size_of_the_shards_and_zero_grad_frees_them(world: World) -> None:
    model = seeded(blocks)
    each_block()(fullshard, model)
    model(batch()).sum().backward()
    assert all(param.unsharded.grad is None for group in groups_of(model) for param in group.params)
    model.reshard()
    grads = [parameter.grad.to_local() for parameter in model.parameters()]
    storages = {grad.untyped_storage().data_ptr(): grad.untyped_storage().nbytes() for grad in grads}
    assert sum(storages.values()) == sharded_bytes(model.blocks)
    left = [weakref.ref(parameter.grad) for parameter in model.parameters()]
    del grads
    model.zero_grad()
    gc.collect()
    assert [ref() for ref in left if ref() is not None] == []


@ranks(2, transport="p2p")
def test_nothing_of_a_deleted_model_is_left(world: World) -> None:
    for how in ("unshard", "forward", "step", "prefetch"):
        model = seeded(blocks)
        originals: list[Any] = [weakref.ref(parameter) for parameter in model.parameters()]
        each_block()(fullshard, model)
        gc.collect()
        assert [ref() for ref in originals if ref() is not None] == [], "sharding frees the original parameters"
        if how == "unshard":
            model.blocks[0].unshard()
        elif how == "forward":
            model(batch())
        for _ in range({"step": 1, "prefetch": 3}.get(how, 0)):
            model(batch()).sum().backward()
        groups = groups_of(model)
        pools = [pool for group in groups for pool in (group.comm, *group.comm.pools.values())]
        leaves = [param.unsharded for group in groups for param in group.params if param.unsharded is not None]
        left = [weakref.ref(each) for each in (*groups, *pools, *leaves, *model.parameters(), *model.modules())]
        del model, groups, pools, leaves
        gc.collect()
        assert [ref() for ref in left if ref() is not None] == [], how


@ranks(2, transport="p2p")
def test_a_model_of_bf16_parameters_gathers_half_the_bytes(world: World) -> None:
    sizes = []
    for dtype in (None, torch.bfloat16):
        model = seeded(blocks)
        each_block(mp_policy=fullshard.MixedPrecisionPolicy(param_dtype=dtype))(fullshard, model)
        sizes.append(groups_of(model.blocks)[0].full.buffer.nbytes)
    assert sizes[0] / 2 <= sizes[1] < sizes[0] / 2 + 64, "up to the alignment of the buffer"


@ranks(2, transport="collective")
@pytest.mark.parametrize("bias", [True, False])
def test_large_gradients_do_not_wait_to_be_cast_or_added(world: World, bias: bool) -> None:
    """Those that move where they lie would exist twice when the backward of their module ends."""
    waited: list[int] = []
    copy_waiting = Gradients.copy_waiting

    def look(self: Gradients) -> None:
        waited.append(sum(grad.nbytes for grad in self._waiting.values()))
        copy_waiting(self)

    def step(dtype: torch.dtype | None, reductions: tuple[bool, ...]) -> None:
        policy = fullshard.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        model = seeded(lambda: nn.Sequential(*[nn.Linear(512, 512, bias=bias) for _ in range(4)]))
        fullshard.fully_shard(model, mp_policy=policy)
        for reduces in reductions:
            waited.clear()
            model.set_requires_gradient_sync(reduces)
            model(torch.randn(3, 512)).sum().backward()

    with mock.patch.object(Gradients, "copy_waiting", look):
        step(torch.bfloat16, (True,))
        assert max(waited) < 512 * 512 * 2
        step(None, (False, False))
        assert max(waited) < 512 * 512 * 4
