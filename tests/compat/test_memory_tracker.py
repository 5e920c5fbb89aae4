"""What torch's `FSDPMemTracker` reads and replaces on a sharded module. tests/frameworks runs the tracker itself."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch

import fullshard
from fullshard.buffer.slots import SHARED, Lease, SlotBuffer
from fullshard.compat.memory_tracker import state_of
from fullshard.schedule.unit import schedule_of, unit_of
from tests.fully_shard.cases import inputs, shard_mlp
from tests.harness import World, ranks
from tests.harness.models import MLP, seeded


@ranks(2)
def test_a_module_has_one_state(world: World) -> None:
    model = shard_mlp()
    unit: Any = unit_of(model)
    state = state_of(unit, model)
    assert state_of(unit, model) is state
    other = copy.deepcopy(model)
    assert state_of(unit_of(other), other) is not state  # type: ignore[arg-type]


@ranks(2)
def test_of_modules_that_were_sharded_together_the_first_has_the_groups(world: World) -> None:
    model = seeded(MLP)
    first, second, *_ = model.blocks
    fullshard.fully_shard([first, second])
    unit: Any = unit_of(first)
    assert state_of(unit, first)._fsdp_param_group is not None
    assert state_of(unit, second)._fsdp_param_group is None


@ranks(2)
def test_the_parameters_of_the_whole_tree_are_there_once_it_is_known(world: World) -> None:
    model = shard_mlp()
    group = state_of(unit_of(model), model)._fsdp_param_group  # type: ignore[arg-type]
    assert [param.sharded_param for param in group.fsdp_params] == [model.scale]
    model(inputs()).sum().backward()
    assert {id(param.sharded_param) for param in group.fsdp_params} == set(map(id, model.parameters()))
    assert all(param._unsharded_param.grad is None for param in group.fsdp_params)  # all are reduced


@ranks(2)
def test_what_replaces_the_hooks_of_a_backward_is_called_and_removed(world: World) -> None:
    model = shard_mlp()
    called = list[str]()
    group = state_of(unit_of(model), model)._fsdp_param_group  # type: ignore[arg-type]
    before, after = group.pre_backward, group.post_backward

    def pre_backward(*args: Any, **kwargs: Any) -> None:
        called.append("pre")
        before(*args, **kwargs)

    def post_backward(*args: Any, **kwargs: Any) -> None:
        called.append("post")
        after(*args, **kwargs)

    group.pre_backward, group.post_backward = pre_backward, post_backward
    assert group.is_watched
    model(inputs()).sum().backward()
    assert called == ["pre", "post"]
    group.pre_backward, group.post_backward = before, after
    assert not group.is_watched
    model(inputs()).sum().backward()
    assert called == ["pre", "post"]
    assert not {"begin_backward", "finish_backward"} & vars(unit_of(model)).keys()


@ranks(2)
def test_the_hooks_of_a_forward_can_be_taken_off_and_called(world: World) -> None:
    model = shard_mlp()
    expected = model(inputs())
    state = state_of(unit_of(model), model)  # type: ignore[arg-type]
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    args, kwargs = state._pre_forward(model, (inputs(),), {})
    output = state._post_forward(model, args, type(model).forward(model, *args, **kwargs))
    assert output.equal(expected)


@ranks(2, transport="p2p")
def test_an_unsharded_parameter_is_its_leaf_once_it_was_gathered(world: World) -> None:
    model = shard_mlp()
    group = state_of(unit_of(model), model)._fsdp_param_group  # type: ignore[arg-type]
    (param,) = group.fsdp_params
    assert param.unsharded_param.numel() == 0
    model(inputs())
    (param,) = [each for each in group.fsdp_params if each.sharded_param is param.sharded_param]
    assert param.unsharded_param.shape == (3,)
    assert param.unsharded_param is unit_of(model).groups[0].params[0].unsharded  # type: ignore[union-attr]


@ranks(2, transport="p2p")
def test_memory_is_reported_while_a_tracker_watches_and_not_otherwise(world: World) -> None:
    model = shard_mlp()
    model(inputs()).sum().backward()
    state = state_of(unit_of(model), model)  # type: ignore[arg-type]
    group = state._fsdp_param_group
    buffers, leases = list[Any](), list[Any]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlotBuffer, "forget_address", lambda buffer: buffers.append(buffer))
        patch.setattr(Lease, "view", lambda *args: leases.append(args))
        state._report_memory()
        assert not buffers + leases
        group.is_watched = True
        state._report_memory()
    pools = unit_of(model).schedule.comm.pools.values()  # type: ignore[union-attr]
    assert set(buffers) == {buffer for pool in pools for buffer in pool.buffers} != set()
    kept = [lease for free in SHARED.free.values() for _, lease in free]
    assert leases == [(lease, torch.uint8, 0, (lease.nbytes,)) for lease in kept] != []


@ranks(2, transport="p2p")
def test_a_buffer_that_was_viewed_is_shown_with_its_new_size(world: World) -> None:
    model = shard_mlp()
    model(inputs()).sum().backward()
    group = state_of(unit_of(model), model)._fsdp_param_group  # type: ignore[arg-type]
    seen = list[Any]()
    pools = unit_of(model).schedule.comm.pools.values()  # type: ignore[union-attr]
    viewed = [buffer for pool in pools for buffer in pool.buffers if "memory" in vars(buffer)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "detach", lambda tensor: seen.append(tensor))
        group.report_memory()
    assert [id(each) for each in seen] == [id(buffer.memory) for buffer in viewed] != []


@ranks(2)
def test_a_recomputation_that_stops_early_ends_no_forward(world: World) -> None:
    model = shard_mlp()
    state = state_of(unit_of(model), model)  # type: ignore[arg-type]
    ended = list[Any]()
    state._after = lambda module, args, output: ended.append(output)
    try:
        raise RuntimeError("all is recomputed that is needed")
    except RuntimeError:
        assert state._post_forward(model, (), None) is None
        assert not ended
        state._post_forward(model, (), "an output")
    state._post_forward(model, (), None)
    assert ended == ["an output", None]


@ranks(2)
def test_hooks_of_others_are_not_taken_for_ours(world: World) -> None:
    model = seeded(MLP)
    called = list[str]()
    fullshard.fully_shard(model)
    for name, register in (("pre", model.register_forward_pre_hook), ("post", model.register_forward_hook)):
        register(lambda *_, name=name: called.append(name), prepend=True)  # type: ignore[misc]
        register(partial(lambda *_, name: called.append(name), name=name), prepend=True)
        register(partial(lambda other, *_: called.append(other), name), prepend=True)
    state = state_of(unit_of(model), model)  # type: ignore[arg-type]
    assert [hook.args[0] for hook in (state._before, state._after)] == [unit_of(model)] * 2
    assert not called


@ranks(2)
def test_of_modules_that_were_sharded_together_the_others_run_too(world: World) -> None:
    model = seeded(MLP)
    first, second, *_ = model.blocks
    fullshard.fully_shard([first, second])
    schedule_of(fullshard.fully_shard(model), "a test")
    state = state_of(unit_of(second), second)  # type: ignore[arg-type]
    args, _ = state._pre_forward(second, (torch.ones(1, 7),), {})
    assert args[0].shape == (1, 7)
    state._pre_forward_hook_handle.remove()
    assert state._post_forward(second, args, torch.ones(1)).shape == (1,)
