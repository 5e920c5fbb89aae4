"""Communication as the user shapes it: custom collectives, hooks, divisors, and how many reductions are under way."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import fullshard
from fullshard.comm.collective import CollectiveTransport
from fullshard.comm.transport import Reduction
from tests.fully_shard.cases import (
    BOTH,
    Library,
    Twins,
    assert_close,
    both_with,
    first_of,
    groups_of,
    inputs,
    shard_mlp,
    slots_in_use,
    twins,
)
from tests.harness import World, fake_world, ranks
from tests.harness.compare import each_block, whole
from tests.harness.models import MLP, seeded, shard_each


class Counting:
    """What both collectives below have: an allocator that counts, and never hands out the same memory twice."""

    def __init__(self) -> None:
        self.calls = 0
        self.allocated: list[Tensor] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.allocated.append(torch.empty(*size, dtype=dtype, device=device))
        return self.allocated[-1]

    def made(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in memory from this allocator."""
        storages = {one.untyped_storage().data_ptr() for one in self.allocated}
        return tensor.untyped_storage().data_ptr() in storages


class CountingAllGather(Counting, fullshard.AllGather):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.calls += 1
        assert self.made(output_tensor)
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class CountingReduceScatter(Counting, fullshard.ReduceScatter):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        self.calls += 1
        assert self.made(input_tensor)
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


@ranks(2)
@BOTH
def test_custom_collectives_move_and_allocate(world: World, fsdp: Library) -> None:
    model, reference = shard_mlp(fsdp), seeded(MLP)
    gather, reduce = CountingAllGather(), CountingReduceScatter()
    model.blocks[1].set_custom_all_gather(gather)
    model.blocks[1].set_custom_reduce_scatter(reduce)
    weight = model.blocks[1][0].weight
    for _ in range(2):
        model(inputs(world.rank)).sum().backward()
    for rank in (0, 0, 1, 1):
        (reference(inputs(rank)).sum() / world.size).backward()
    assert gather.calls >= 2, "in each forward, and in backward unless the values are still there"
    assert reduce.calls == 2
    assert_close(whole(weight.grad), reference.blocks[1][0].weight.grad, "gradient")


@ranks(2, transport="p2p")
def test_collectives_may_change_between_steps(world: World) -> None:
    pair = twins(world)
    reductions = [CountingReduceScatter(), CountingReduceScatter()]
    gather = CountingAllGather()
    pair.step()
    for reduce in reductions:
        pair.sharded.blocks[1].set_custom_reduce_scatter(reduce)
        pair.step()
        assert [each.calls for each in reductions] == [1, reductions.index(reduce)]
    pair.sharded.blocks[1].set_custom_all_gather(gather)
    pair.step()
    assert gather.calls >= 1
    for enable in (True, False):
        pair.sharded.set_separate_reduce_scatter_group(enable)
        pair.step()
    assert [each.calls for each in reductions] == [1, 4]


@ranks(2, transport="p2p")
def test_a_model_that_joins_another_gathers_what_it_has_then(world: World) -> None:
    policy = fullshard.MixedPrecisionPolicy(param_dtype=torch.float64, output_dtype=torch.float32)
    inner, reference = shard_mlp(mp_policy=policy), seeded(MLP).double()
    for _ in range(2):
        assert_close(inner(inputs()), reference(inputs().double()).float(), "output")
    inner.reshard()
    outer = nn.Sequential(inner, nn.Identity())
    fullshard.fully_shard(outer)
    with torch.no_grad():
        for parameter in (*outer.parameters(), *reference.parameters()):
            parameter.mul_(2)
    assert_close(outer(inputs()), reference(inputs().double()).float(), "output of the larger model")


@ranks(2)
def test_custom_collectives_with_several_groups(world: World) -> None:
    meshes = world.mesh(), world.mesh(1, 2, names=("a", "b"))["b"]
    model, reference = seeded(MLP), seeded(MLP)

    def place(parameter: nn.Parameter) -> Any:
        return fullshard.ShardPlacementResult(Shard(0), meshes[1]) if parameter.ndim == 2 else None

    each_block(mesh=meshes[0], shard_placement_fn=place)(fullshard, model)
    gather, reduce = CountingAllGather(), CountingReduceScatter()
    model.blocks[0].set_custom_all_gather(gather)
    model.blocks[0].set_custom_reduce_scatter(reduce)
    assert len(groups_of(model.blocks[0])) == 2
    pair = Twins(world, model, reference)
    pair.step()
    assert gather.calls >= 2
    assert reduce.calls == 2
    pair.step()


@ranks(2)
@BOTH
def test_an_all_reduce_hook_sees_what_was_reduced_and_may_change_it(world: World, fsdp: Library) -> None:
    seen: list[Tensor] = []
    model, reference = shard_mlp(fsdp), seeded(MLP)
    model.blocks[0].set_all_reduce_hook(lambda output: (seen.append(output.clone()), output.mul_(3)))
    weights = model.blocks[0][0].weight, model.blocks[1][0].weight
    model(inputs()).sum().backward()
    reference(inputs()).sum().backward()
    assert len(seen) == 1
    assert seen[0].ndim == 1
    assert seen[0].numel() >= 7 * 7 / world.size
    assert_close(whole(weights[0].grad), 3 * reference.blocks[0][0].weight.grad, "gradient")
    assert_close(whole(weights[1].grad), reference.blocks[1][0].weight.grad, "gradient of another group")


@ranks(2)
@BOTH
def test_gradient_divide_factor_and_forced_sums_of_one_module(world: World, fsdp: Library) -> None:
    for factor in (5.0, None):
        model, reference = shard_mlp(fsdp), seeded(MLP)
        reduce = SumsOnly()
        if factor is None:
            model.blocks[0].set_custom_reduce_scatter(reduce)
        else:
            model.blocks[0].set_gradient_divide_factor(factor)
        model.blocks[0].set_force_sum_reduction_for_comms(True)
        weights = model.blocks[0][0].weight, model.blocks[1][0].weight
        model(inputs()).sum().backward()
        reference(inputs()).sum().backward()
        assert reduce.calls == (factor is None)
        assert_close(whole(weights[0].grad), reference.blocks[0][0].weight.grad * 2 / (factor or 2), "gradient")
        assert_close(whole(weights[1].grad), reference.blocks[1][0].weight.grad, "gradient of another group")


@ranks(1)
@BOTH
def test_the_old_name_of_the_divide_factor_is_deprecated(world: World, fsdp: Library) -> None:
    model, reference = shard_mlp(fsdp), seeded(MLP)
    with pytest.warns(DeprecationWarning, match="set_gradient_divide_factor"):
        model.set_reduce_scatter_divide_factor(4.0)
    scale = model.scale
    model(inputs()).sum().backward()
    reference(inputs()).sum().backward()
    assert_close(whole(scale.grad), reference.scale.grad / 4, "gradient")


class SumsOnly(CountingReduceScatter):
    """Notices every other operation than a plain sum."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        assert op == dist.ReduceOp.SUM
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


@ranks(2)
def test_transports_are_told_of_forced_sums(world: World) -> None:
    for forced in (True, False):
        model = shard_mlp()
        model.blocks[0].set_force_sum_reduction_for_comms(forced)
        (group,) = groups_of(model.blocks[0])
        seen: list[Reduction] = []

        class Listening(CollectiveTransport):
            def reduce_route(self, *args: Any, seen: list[Reduction] = seen, **kwargs: Any) -> Any:
                route = super().reduce_route(*args, **kwargs)

                def start(shards: Any, reduction: Reduction) -> Any:
                    seen.append(reduction)
                    return route.start(shards, reduction)

                return SimpleNamespace(start=start)

        group.use_transport(reduce=Listening())
        model(inputs()).sum().backward()
        assert seen == [Reduction(2.0, forced)]


class Switch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x: Tensor, second: bool) -> Tensor:
        return self.two(x) if second else self.one(x)


@ranks(2)
@both_with("set_reduce_scatter_unused_params")
@first_of("recurse", False, True)
def test_unused_parameters_get_zeros_on_request(world: World, fsdp: Library, recurse: bool) -> None:
    model = Switch()
    model.inner = Switch()
    fsdp.fully_shard(model.inner)
    fsdp.fully_shard(model)
    parameters = dict(model.named_parameters())
    model.set_reduce_scatter_unused_params(True, recurse=recurse)
    (model(inputs(), False).sum() + model.inner(inputs(), False).sum()).backward()
    assert torch.equal(whole(parameters["two.weight"].grad), torch.zeros(5, 6))
    if recurse:
        assert torch.equal(whole(parameters["inner.two.weight"].grad), torch.zeros(5, 6))
    else:
        assert parameters["inner.two.weight"].grad is None


@ranks(2)
def test_ranks_may_use_different_parameters_on_request(world: World) -> None:
    model = seeded(Switch)
    fullshard.fully_shard(model)
    model.set_reduce_scatter_unused_params(True)
    parameters = dict(model.named_parameters())
    model(inputs(), world.rank == 1).sum().backward()
    expected = inputs().sum(0).expand(5, 6) / 2
    assert_close(whole(parameters["one.weight"].grad), expected, "gradient from rank 0")
    assert_close(whole(parameters["two.weight"].grad), expected, "gradient from rank 1")


class LettingGo(fullshard.AllGather):
    """An all-gather that knows whether the memory that it gave is still held."""

    def __init__(self) -> None:
        self.given: list[weakref.ref[Tensor]] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        memory = torch.empty(*size, dtype=dtype, device=device)
        self.given.append(weakref.ref(memory))
        return memory

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


@ranks(2)
def test_the_memory_of_a_users_gather_is_let_go_when_the_values_have_arrived(world: World) -> None:
    model, gather = shard_mlp(reshard_after_forward=False), LettingGo()
    for module in model.blocks:
        module.set_custom_all_gather(gather)
    model(inputs(world.rank))
    assert all(group.full.state.is_unsharded for group in groups_of(model))
    assert gather.given
    assert [reference() for reference in gather.given] == [None] * len(gather.given)


@ranks(2)
@first_of("count", 2, 1, 3)
def test_so_many_gradient_buffers_are_in_use_at_once(world: World, count: int) -> None:
    def build() -> Any:
        model = nn.Module()
        model.blocks = nn.Sequential(*[nn.Linear(6, 6) for _ in range(5)])  # a root without parameters holds no buffer
        model.forward = model.blocks.forward
        return model

    pair = twins(world, lambda: seeded(build))
    pair.sharded.set_reduce_scatter_max_input_buffers(count)
    most = 0

    def look(event: Any) -> None:
        nonlocal most
        most = max(most, slots_in_use(pool))

    pair.sharded.add_observer(look)
    pool = groups_of(pair.sharded)[0].gradient_pool
    pair.step()
    pair.step()
    assert most == count


@ranks(2)
def test_reductions_may_have_a_process_group_of_their_own(world: World) -> None:
    pair = twins(world)
    pair.sharded.set_separate_reduce_scatter_group()
    groups = groups_of(pair.sharded)
    own = {group.reduce_process_group for group in groups}
    assert len(own) == 1, "one for all groups that shard over the same ranks"
    assert groups[0].data.shard_group not in own
    pair.step()
    pair.sharded.set_separate_reduce_scatter_group(False)
    assert {group.reduce_process_group for group in groups} == {groups[0].data.shard_group}
    pair.step()
    pair.sharded.set_separate_reduce_scatter_group(recurse=False)
    apart = [group.reduce_process_group is not group.data.shard_group for group in groups]
    assert apart == [True, False, False, False, False]
    pair.step()


@ranks(2)
@BOTH
def test_where_the_process_group_allocates_nothing_memory_comes_from_where_it_did(world: World, fsdp: Library) -> None:
    model = shard_mlp(fsdp)
    pair = Twins(world, model, seeded(MLP))
    for enable in (True, False):
        for module in (model, *model.blocks):
            module.set_allocate_memory_from_process_group_for_comm(enable)
        pair.step()


@both_with("set_symm_mem_for_comm")
def test_process_group_memory_and_custom_collectives_exclude_each_other(fsdp: Library) -> None:
    with fake_world(2):
        model = shard_mlp(fsdp)
        model.set_custom_all_gather(CountingAllGather())
        with pytest.raises(AssertionError):
            model.set_allocate_memory_from_process_group_for_comm(True)
        with pytest.raises(AssertionError):
            model.set_symm_mem_for_comm()


def test_what_only_nccl_has_and_streams_of_replicas_are_refused() -> None:
    with fake_world(2) as world:
        model = shard_mlp(mesh=world.mesh(2, 1, names=("replicate", "shard")))
        with pytest.raises(ValueError, match="NCCL"):
            model.set_symm_mem_for_comm("MPI")
        with pytest.raises(ValueError, match="stream"):
            model.set_all_reduce_hook(lambda output: None, stream=object())


@ranks(2, fresh=True)
def test_ranks_on_two_hosts_train_as_on_one(world: World) -> None:
    """Between two hosts small groups move by collectives."""
    called = []
    native = CollectiveTransport._route
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fullshard.comm.local_ranks.host_id", lambda: f"host {world.rank}")
        pair = twins(world)
        patch.setattr(CollectiveTransport, "_route", lambda *args: called.append(args[1]) or native(*args))
        for _ in range(3):
            pair.step()
    groups = groups_of(pair.sharded)
    assert {group.transport.name for group in groups} == {"p2p"}
    assert len([request for request in called if request.direction == "gather"]) == len(groups)


class Mixed(nn.Module):
    """Large parameters that divide evenly over the ranks, and small and uneven ones; one that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(256, 768)
        self.norm = nn.LayerNorm(768)
        self.extra = nn.Parameter(torch.randn(256, 768) / 16)
        self.down = nn.Linear(768, 257)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, with_extra: bool) -> Tensor:
        hidden = self.norm(self.up(x))
        return (self.down(hidden + x @ self.extra if with_extra else hidden) * self.scale).square().mean()


@ranks(2, 3, transport="collective")
@first_of("reduce_dtype", torch.float64, None)
def test_large_parameters_beside_small_ones_train_as_unsharded(world: World, reduce_dtype: torch.dtype | None) -> None:
    reference, model = seeded(Mixed), seeded(Mixed)
    fullshard.fully_shard(model, mp_policy=fullshard.MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    for step, uses in enumerate(((True,), (False,), (False, True, True), (True, False))):
        for module in (reference, model):
            module.zero_grad()
        for number, with_extra in enumerate(uses):
            model.set_requires_gradient_sync(number == len(uses) - 1)
            batches = [
                torch.randn(3, 256, generator=torch.Generator().manual_seed(9 * step + r)) for r in range(world.size)
            ]
            model(batches[world.rank], with_extra).backward()
            torch.stack([reference(batch, with_extra) for batch in batches]).mean().backward()
        for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            if expected.grad is None:
                assert param.grad is None, name
            else:
                torch.testing.assert_close(
                    param.grad.full_tensor(), expected.grad, msg=lambda text, at=name: f"{at}: {text}"
                )


class Shift(nn.Module):
    """Adds a large parameter: autograd gives both summands one gradient, in one piece of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(512, 256))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.unsqueeze(0)


@ranks(2, transport="collective")
def test_a_gradient_that_others_still_read_is_not_reduced_in_its_memory(world: World) -> None:
    model = nn.Sequential(Shift(), Shift())
    shard_each(*model, model)
    x = torch.zeros(1, 512, 256, requires_grad=True)
    shifted = model[0](x)
    shifted.register_hook(lambda _: groups_of(model[1])[0].comm.reductions.wait_for_oldest())
    (model[1](shifted) * (world.rank + 1)).sum().backward()
    assert x.grad is not None
    assert (x.grad == world.rank + 1).all()
    assert all((whole(param.grad) == 1.5).all() for param in model.parameters())
