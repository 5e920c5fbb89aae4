"""What torch's `FSDPMemTracker` reads and replaces on a sharded module. tests/frameworks runs the tracker itself."""

from __future__ import annotations

import copy
from typing import Any

import fullshard
from fullshard.compat.memory_tracker import state_of
from fullshard.schedule.unit import unit_of
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
