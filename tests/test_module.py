"""The methods of `FSDPModule` by which a user steers gathering, resharding and prefetch, each by its effect."""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.tensor import DTensor

import fullshard
from fullshard.report.facts import facts_of
from tests.fully_shard.cases import BOTH, Library, Recorder, Twins, are_sharded, assert_close, inputs, shard_mlp, twins
from tests.harness import World, ranks
from tests.harness.compare import each_block, kept
from tests.harness.models import MLP, seeded


def test_every_method_of_torch_has_the_same_signature() -> None:
    for name, method in vars(torch.distributed.fsdp.FSDPModule).items():
        if name.startswith("_") or not callable(method):
            continue
        expected = inspect.signature(method).parameters.values()
        found = inspect.signature(getattr(fullshard.FSDPModule, name)).parameters.values()
        assert [(p.name, p.kind, p.default) for p in found] == [(p.name, p.kind, p.default) for p in expected], name


def test_fully_shard_takes_the_arguments_of_torch() -> None:
    expected = inspect.signature(torch.distributed.fsdp.fully_shard).parameters
    found = inspect.signature(fullshard.fully_shard).parameters
    assert list(found)[: len(expected)] == list(expected)
    for name in ("mesh", "reshard_after_forward", "shard_placement_fn", "ignored_params", "dp_mesh_dims"):
        assert found[name].default is None
        assert found[name].kind is inspect.Parameter.KEYWORD_ONLY
    for name in ("mp_policy", "offload_policy"):
        assert vars(expected[name].default).items() <= vars(found[name].default).items()


@ranks(2)
@BOTH
def test_unshard_before_the_first_forward_shows_full_parameters(world: World, fsdp: Library) -> None:
    model, reference = shard_mlp(fsdp), seeded(MLP)
    model.blocks[0].unshard()
    assert torch.equal(model.blocks[0][0].weight, reference.blocks[0][0].weight)
    assert not isinstance(model.blocks[0][0].weight, DTensor)
    assert isinstance(model.blocks[1][0].weight, DTensor), "unshard is not recursive"
    assert isinstance(model.scale, DTensor)


@ranks(2)
@BOTH
def test_reshard_is_not_recursive(world: World, fsdp: Library) -> None:
    model = shard_mlp(fsdp)
    for module in (model, *model.blocks):
        module.unshard()
    model.reshard()
    assert isinstance(model.scale, DTensor)
    assert not are_sharded(model.blocks)
    model.blocks[0].reshard()
    assert are_sharded(model.blocks[0])
    assert not are_sharded(model.blocks[1])


@ranks(2)
@BOTH
def test_an_asynchronous_unshard_shows_parameters_after_wait(world: World, fsdp: Library) -> None:
    model, reference = shard_mlp(fsdp), seeded(MLP)
    handle = model.blocks[0].unshard(async_op=True)
    assert isinstance(handle, fsdp.UnshardHandle)
    assert are_sharded(model.blocks[0]), "the gather may still be under way"
    for _ in range(2):
        handle.wait()
        assert torch.equal(model.blocks[0][0].weight, reference.blocks[0][0].weight)
    handle = model.blocks[1].unshard(async_op=True)
    assert_close(model(inputs()), reference(inputs()), "output")  # whose forward waits
    handle.wait()


@ranks(2)
@BOTH
def test_unshard_of_a_module_without_parameters_does_nothing(world: World, fsdp: Library) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    fsdp.fully_shard(model[1])
    fsdp.fully_shard(model)
    assert model[1].unshard() is None
    model[1].unshard(async_op=True).wait()
    model[1].reshard()
    assert model(inputs()).shape == (4, 6)


@ranks(2)
@BOTH
@pytest.mark.parametrize("async_op", [True, False])
def test_unshard_of_a_member_of_a_list_before_the_first_forward(world: World, fsdp: Library, async_op: bool) -> None:
    model, reference = seeded(MLP), seeded(MLP)
    fsdp.fully_shard([model.blocks[0], model.blocks[1]])
    fsdp.fully_shard(model)
    handle = model.blocks[1].unshard(async_op)  # type: ignore[operator]
    if async_op:
        handle.wait()
    for block, expected in zip(model.blocks[:2], reference.blocks[:2], strict=True):  # type: ignore[arg-type]
        assert torch.equal(block[0].weight, expected[0].weight)  # type: ignore[index]
    assert_close(model(inputs()), reference(inputs()), "output")
    model.blocks[1].unshard()  # type: ignore[operator]
    model.blocks[0].reshard()  # type: ignore[operator]
    assert_close(model(inputs()), reference(inputs()), "output")


@ranks(2)
def test_what_is_set_for_a_tree_is_set_at_its_root(world: World) -> None:
    model = seeded(MLP)
    fullshard.fully_shard([model.blocks[0], model.blocks[1]])
    fullshard.fully_shard(model)
    with pytest.raises(
        RuntimeError, match=r"before the root of the tree was known: .* call that module, or its method"
    ):
        model.blocks[0].set_is_last_backward(False)  # type: ignore[operator]
    model.set_is_last_backward(True)  # type: ignore[operator]
    model.blocks[0].set_is_last_backward(True)  # type: ignore[operator]


@ranks(2)
@pytest.mark.parametrize("recurse", [True, False])
def test_without_gradient_sync_nothing_is_reduced(world: World, recurse: bool) -> None:
    model = shard_mlp()
    recorder = Recorder(model, "reduce")
    model.set_requires_gradient_sync(False, recurse=recurse)
    model(inputs()).sum().backward()
    assert recorder.take() == ([] if recurse else ["reduce 3", "reduce 2", "reduce 1", "reduce 0"])
    assert not model.scale.grad.full_tensor().any()
    model.set_requires_gradient_sync(True)
    model(inputs()).sum().backward()
    assert sorted(recorder.take()) == ["reduce 0", "reduce 1", "reduce 2", "reduce 3", "reduce root"]


@ranks(2)
@BOTH
def test_without_all_reduce_replicas_keep_partial_sums(world: World, fsdp: Library) -> None:
    mesh = world.mesh(2, 1, names=("replicate", "shard"))
    model = shard_mlp(fsdp, mesh=mesh)
    model.set_requires_all_reduce(False)
    parameters = list(model.parameters())
    model(inputs(world.rank)).sum().backward()
    shown = [parameter.grad.full_tensor() for parameter in parameters if parameter.grad is not None]
    assert not any(each.any() for each in shown), "partial sums are kept, not shown"
    model.set_requires_all_reduce(True)
    model(inputs(world.rank)).sum().backward()
    reference = seeded(MLP)
    for rank in range(world.size):
        reference(inputs(rank)).sum().backward()
    for parameter, expected in zip(parameters, reference.parameters(), strict=True):
        assert_close(kept(parameter.grad), expected.grad, "sum of two backwards, mean of two ranks")


@ranks(2)
def test_partial_sums_of_a_parameter_that_was_frozen_are_not_lost(world: World) -> None:
    model = shard_mlp(mesh=world.mesh(2, 1, names=("replicate", "shard")))
    model.set_requires_all_reduce(False)
    model(inputs()).sum().backward()
    model.set_requires_all_reduce(True)
    model.blocks[1][0].weight.requires_grad_(False)
    with pytest.raises(
        RuntimeError, match=r"gradients of \['blocks\.1\.0\.weight'\] were summed over some of the ranks only"
    ):
        model(inputs()).sum().backward()
    model.reset_iter_state()
    model(inputs()).sum().backward()
    assert model.blocks[1][0].weight.grad is None


@ranks(2)
@BOTH
@pytest.mark.parametrize("recurse", [True, False])
def test_set_reshard_after_forward(world: World, fsdp: Library, recurse: bool) -> None:
    model = shard_mlp(fsdp)
    model(inputs())
    assert are_sharded(model.blocks)
    assert not isinstance(model.scale, DTensor), "the root stays unsharded unless it was told otherwise"
    model.set_reshard_after_forward(True, recurse=recurse)
    model(inputs())
    assert isinstance(model.scale, DTensor)
    model.set_reshard_after_forward(False, recurse=recurse)
    model(inputs())
    assert not isinstance(model.scale, DTensor)
    assert are_sharded(model.blocks) is not recurse


@ranks(4)
def test_set_reshard_after_forward_replaces_a_smaller_mesh(world: World) -> None:
    model = shard_mlp(reshard_after_forward=2)
    recorder = Recorder(model, "rest")
    model(inputs())
    assert recorder.take()
    model.set_reshard_after_forward(True)
    model(inputs())
    assert not recorder.take()
    assert all(group.post_forward is None for group in facts_of(model).groups)


@ranks(2)
@BOTH
@pytest.mark.parametrize("recurse", [True, False])
def test_set_reshard_after_backward(world: World, fsdp: Library, recurse: bool) -> None:
    model = shard_mlp(fsdp, reshard_after_forward=False)
    model.set_reshard_after_backward(False, recurse=recurse)
    model(inputs()).sum().backward()
    assert not isinstance(model.scale, DTensor)
    assert are_sharded(model.blocks) is not recurse
    model.set_reshard_after_backward(True)
    model(inputs()).sum().backward()
    assert are_sharded(model)


@ranks(2)
def test_without_reshard_after_backward_the_next_micro_batch_gathers_nothing(world: World) -> None:
    model = shard_mlp(reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    model(inputs()).sum().backward()
    recorder = Recorder(model, "gather")
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    model(inputs()).sum().backward()
    assert recorder.take() == []


@ranks(2)
def test_without_reshard_after_backward_the_optimizer_is_still_seen(world: World) -> None:
    pair = twins(world, reshard_after_forward=False)
    pair.sharded.set_reshard_after_backward(False)
    for _ in range(3):
        pair.step()


@ranks(2)
def test_set_unshard_in_backward(world: World) -> None:
    model = shard_mlp()
    model.set_prefetch_limit(0)
    model.blocks[0].set_unshard_in_backward(False)
    model.blocks[0].requires_grad_(False)
    recorder = Recorder(model, "gather", "reuse")
    output = model(inputs())
    recorder.take()
    output.sum().backward()
    assert [event.split()[1] for event in recorder.take()] == ["3", "2", "1"]


@ranks(2)
def test_is_last_backward_decides_when_reductions_are_waited_for(world: World) -> None:
    model, reference = shard_mlp(), seeded(MLP)
    parameters = list(model.parameters())
    model.set_is_last_backward(False)
    model(inputs()).sum().backward()
    assert any(parameter.grad is None for parameter in parameters), "the last reduction may still be under way"
    model.set_is_last_backward(True)
    model(inputs()).sum().backward()
    (2 * reference(inputs()).sum()).backward()
    for parameter, expected in zip(parameters, reference.parameters(), strict=True):
        assert_close(kept(parameter.grad), expected.grad, "gradient of two backwards")


@ranks(1)
@pytest.mark.parametrize("limit", [-1, True, 1.0, None])
def test_the_prefetch_limit_counts_groups_or_bytes(world: World, limit: Any) -> None:
    for given in ({"groups": limit}, {"nbytes": limit}, {"groups": 1, "nbytes": 1}):
        with pytest.raises(ValueError, match="prefetch limit must be one int of 0 or more, got groups="):
            shard_mlp().set_prefetch_limit(**given)


@ranks(2)
@BOTH
def test_a_post_optimizer_event_is_harmless_on_the_cpu(world: World, fsdp: Library) -> None:
    model, reference = shard_mlp(fsdp), seeded(MLP)
    model(inputs()).sum().backward()
    model.set_post_optim_event(torch.Event("cpu"))
    assert_close(model(inputs()), reference(inputs()), "output")


@ranks(1)
@BOTH
def test_state_of_a_module(world: World, fsdp: Library) -> None:
    model = shard_mlp(fsdp)
    assert fsdp.fully_shard.state(model) is not None
    assert fsdp.fully_shard.state(model) is not fsdp.fully_shard.state(model.blocks[0])
    assert fsdp.fully_shard.state(model.blocks[0][0]) is None


@ranks(2)
@BOTH
def test_a_registered_method_gathers_and_frees(world: World, fsdp: Library) -> None:
    class Encoder(nn.Linear):
        def encode(self, x: torch.Tensor, *, twice: bool) -> torch.Tensor:
            assert not isinstance(self.weight, DTensor)
            return nn.functional.linear(x, self.weight, self.bias) * (2 if twice else 1)

    reference = seeded(lambda: Encoder(6, 5))
    model = nn.Sequential(seeded(lambda: Encoder(6, 5)), nn.Linear(5, 5))
    fsdp.fully_shard(model[0])
    fsdp.register_fsdp_forward_method(model[0], "encode")
    fsdp.fully_shard(model)
    weight = model[0].weight
    encoded = model[0].encode(inputs(), twice=True)
    assert_close(encoded, reference(inputs()) * 2, "encoded")
    encoded.sum().backward()
    (reference(inputs()) * 2).sum().backward()
    assert isinstance(model[0].weight, DTensor)
    assert_close(kept(weight.grad), reference.weight.grad, "gradient")


@ranks(2)
@BOTH
def test_a_registered_method_may_call_forward_many_times(world: World, fsdp: Library) -> None:
    class Generator(MLP):
        def generate(self, x: torch.Tensor, count: int) -> torch.Tensor:
            for _ in range(count):
                x = self(x) @ torch.ones(3, 6)
            return x

    model, reference = seeded(Generator), seeded(Generator)
    each_block()(fsdp, model)
    fsdp.register_fsdp_forward_method(model, "generate")
    with torch.no_grad():
        assert_close(model.generate(inputs(), 3), reference.generate(inputs(), 3), "generated")
    found, expected = model(inputs()), reference(inputs())
    found.sum().backward()
    expected.sum().backward()
    assert_close(kept(model.scale.grad), reference.scale.grad, "gradient of a step after it")


class Halves(nn.Module):
    """Its forward calls a method that programs call too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.scale = nn.Parameter(torch.full((6,), 2.0))
        self.fails = False

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.blocks[0](x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.scale * self.blocks[1](self.encode(x))
        if self.fails:
            raise ArithmeticError("in forward")
        return x


@ranks(2)
@pytest.mark.parametrize("reshard", [None, True])
def test_forward_may_call_a_registered_method(world: World, reshard: bool | None) -> None:
    """Torch frees the parameters when the method ends, before the forward has: with True it reads freed memory."""
    model, reference = seeded(Halves), seeded(Halves)
    for block in model.blocks:
        fullshard.fully_shard(block)
    fullshard.fully_shard(model, reshard_after_forward=reshard)
    fullshard.register_fsdp_forward_method(model, "encode")
    pair = Twins(world, model, reference)
    for seed in range(2):
        assert_close(model.encode(inputs(seed)), reference.encode(inputs(seed)), "encoded")
        pair.step()


@ranks(2)
def test_a_forward_of_another_name_may_call_a_registered_method(world: World) -> None:
    """Programs replace the forward of a model by a function of their own."""

    def fused(this: Any, x: torch.Tensor) -> torch.Tensor:
        return this.scale * this.blocks[1](this.encode(x))

    model: Any = seeded(Halves)
    model.forward = MethodType(fused, model)
    fullshard.fully_shard(model)
    fullshard.register_fsdp_forward_method(model, "encode")
    pair = Twins(world, model, seeded(Halves))
    for _ in range(2):
        pair.step()


@ranks(2)
def test_a_registered_method_does_not_go_on_with_a_forward_that_failed(world: World) -> None:
    model: Any = fullshard.fully_shard(seeded(Halves))
    fullshard.register_fsdp_forward_method(model, "encode")
    model.fails = True
    with pytest.raises(ArithmeticError):
        model(inputs(0))
    with pytest.raises(RuntimeError, match=r"call reset_iter_state\(\)"):
        model.encode(inputs(0))
    model.reset_iter_state()
    assert_close(model.encode(inputs(0)), seeded(Halves).encode(inputs(0)), "encoded")


@ranks(1)
@BOTH
def test_registering_a_method_does_nothing_on_other_modules(world: World, fsdp: Library) -> None:
    linear = nn.Linear(2, 2)
    before = linear.extra_repr
    fsdp.register_fsdp_forward_method(linear, "extra_repr")
    fsdp.register_fsdp_forward_method(linear, "no_such_method")
    assert linear.extra_repr == before


@ranks(1)
def test_shared_contexts_have_the_same_lanes(world: World) -> None:
    stages = [shard_mlp(), shard_mlp()]
    fullshard.share_comm_ctx(stages)
    first, second = (fullshard.fully_shard.state(stage).schedule for stage in stages)
    assert first.comm is second.comm


@ranks(1)
def test_a_removed_observer_hears_nothing(world: World) -> None:
    model = shard_mlp()
    recorder = Recorder(model)
    recorder.stop()
    model(inputs())
    assert recorder.take() == []


@ranks(1)
def test_an_observer_that_removes_itself_keeps_no_other_from_hearing(world: World) -> None:
    model = shard_mlp()
    heard: list[str] = []
    stop = model.add_observer(lambda event: stop())
    model.add_observer(lambda event: heard.append(event.action))
    model(inputs())
    assert heard[0] == "gather"


def test_twins_notice_a_difference() -> None:
    """The comparison that these tests rest on fails if the two models differ."""
    one, other = seeded(MLP), seeded(MLP, seed=1)
    with pytest.raises(AssertionError, match="loss is off"):
        Twins(World(0, 1), one, other).step()
