"""Parity of backwards that are finalized by hand: what is reduced when, what is refused, and handles that wait.

torch has it from 2.15 on. Where the installed one does, it is given the same test; otherwise fullshard alone is
compared with unsharded training.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from tests.fully_shard.cases import Recorder, Twins, are_sharded, groups_of, inputs, shard_mlp
from tests.harness import World, ranks
from tests.harness.compare import LIBRARIES, OURS, Precision, Training, adamw, compare, each_block, mean_square, whole
from tests.harness.models import MLP, random_batch, seeded, shard_each

IN_TORCH = hasattr(LIBRARIES["torch"], "GradientReductionHandle")
BOTH = pytest.mark.parametrize("library", LIBRARIES if IN_TORCH else OURS)
BATCH = random_batch(4, 6)
MICRO = 3


def finalize(model: Any, async_op: bool) -> None:
    if hasattr(model, "finalize_backward"):
        model.set_requires_gradient_sync(True)
        handle = model.finalize_backward(async_op=async_op)
        assert (handle is not None) == async_op
        if handle is not None:
            handle.wait()
            handle.wait()


def by_hand(precision: Precision, **options: Any) -> Any:
    def shard(fsdp: ModuleType, model: Any) -> None:
        each_block(precision=precision, **options)(fsdp, model)
        model.set_manual_backward_finalization(True)

    return shard


@ranks(1, 2, 4)
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("precision", [Precision(), Precision(torch.bfloat16, torch.float32)], ids=["fp32", "bf16"])
def test_one_reduction_after_several_backwards(
    world: World, async_op: bool, reshard: bool, precision: Precision
) -> None:
    mesh = world.mesh(2, 2, names=("replicate", "shard")) if world.size == 4 else None
    case = Training(
        build=partial(seeded, MLP),
        shard=by_hand(precision, reshard_after_forward=reshard, mesh=mesh),
        batch=BATCH,
        precision=precision,
        optimizer=adamw,
        micro_batches=MICRO,
        set_up_micro=lambda model, micro: model.set_requires_gradient_sync(False),
        after_backward=partial(finalize, async_op=async_op),
    )
    compare(world, case, with_torch=IN_TORCH)


@ranks(1, 2)
@pytest.mark.parametrize("async_op", [False, True])
def test_one_backward_that_synchronizes(world: World, async_op: bool) -> None:
    end = partial(finalize, async_op=async_op)
    case = Training(build=partial(seeded, MLP), shard=by_hand(Precision()), batch=BATCH, after_backward=end)
    compare(world, case, with_torch=IN_TORCH)


@ranks(2)
@BOTH
def test_what_a_backward_did_not_end_is_reduced_by_finalization(world: World, library: str) -> None:
    model = seeded(MLP)
    by_hand(Precision())(LIBRARIES[library], model)
    first = model.blocks[0][0].weight  # its inputs require no gradients: nothing tells that its backward ended
    mean_square(model, BATCH(world.rank)).backward()
    assert first.grad is None
    model.finalize_backward()
    assert first.grad is not None
    reference = seeded(MLP)
    for rank in range(world.size):
        (mean_square(reference, BATCH(rank)) / world.size).backward()
    assert torch.allclose(whole(first.grad), reference.blocks[0][0].weight.grad)  # type: ignore[arg-type]


@ranks(2)
def test_each_group_is_reduced_and_resharded_once(world: World) -> None:
    model = shard_mlp(reshard_after_forward=True)
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    recorder = Recorder(model, "reduce", "reshard")
    for micro in range(MICRO):
        model(inputs(micro)).sum().backward()
    assert not [event for event in recorder.take() if event.startswith("reduce")]
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    model.finalize_backward()
    names = ["3", "2", "1", "0", "root"]
    assert recorder.take() == [f"{action} {name}" for name in names for action in ("reduce", "reshard")]
    assert are_sharded(model)
    model.finalize_backward()  # nothing is left
    assert recorder.take() == []


@ranks(2)
@BOTH
def test_before_the_first_forward_nothing_happens(world: World, library: str) -> None:
    model = shard_mlp(LIBRARIES[library])
    assert model.finalize_backward() is None
    handle = model.finalize_backward(async_op=True)
    assert isinstance(handle, LIBRARIES[library].GradientReductionHandle)
    handle.wait()
    handle.wait()


@ranks(2)
@BOTH
def test_a_backward_that_reached_nothing(world: World, library: str) -> None:
    model = shard_mlp(LIBRARIES[library])
    model.set_manual_backward_finalization(True)
    output = model(inputs())
    torch.ones(2, requires_grad=True).sum().backward()
    del output
    model.finalize_backward()
    model.finalize_backward(async_op=True).wait()


@ranks(2)
@BOTH
def test_what_is_refused(world: World, library: str) -> None:
    model = shard_mlp(LIBRARIES[library])
    model(inputs()).sum().backward()
    with pytest.raises(RuntimeError, match="requires manual"):
        model.finalize_backward()
    with pytest.raises(RuntimeError, match="must be called on the root"):
        model.blocks[0].set_manual_backward_finalization(True)
    model.set_manual_backward_finalization(True)
    with pytest.raises(RuntimeError, match="must be called on the root"):
        model.blocks[0].finalize_backward()
    seen: list[str] = []

    def change(*args: Any) -> None:
        for attempt in (partial(model.set_manual_backward_finalization, False), model.finalize_backward):
            with pytest.raises(RuntimeError, match="backward") as error:
                attempt()
            seen.append(str(error.value))

    hook = model.blocks[1].register_full_backward_hook(change)
    model(inputs()).sum().backward()
    hook.remove()
    assert len(seen) == 2
    with pytest.raises(RuntimeError, match="cannot change"):
        model.set_manual_backward_finalization(False)
    model.finalize_backward()
    model.set_manual_backward_finalization(False)
    model(inputs()).sum().backward()


@ranks(2)
@BOTH
def test_a_root_that_another_module_contains(world: World, library: str) -> None:
    model = shard_mlp(LIBRARIES[library])
    model.blocks[1].set_manual_backward_finalization(True)
    with pytest.raises(RuntimeError, match="must be called on the root"):
        model(inputs())


@ranks(2)
@BOTH
def test_a_handle_must_be_waited_for(world: World, library: str) -> None:
    model, reference = shard_mlp(LIBRARIES[library]), seeded(MLP)
    parameters = list(model.parameters())
    model.set_manual_backward_finalization(True)
    for _ in range(2):
        mean_square(model, BATCH(world.rank)).backward()
        handle = model.finalize_backward(async_op=True)
        with pytest.raises(RuntimeError, match="waited"):
            model(inputs())
        with pytest.raises(RuntimeError, match="waited"):
            model.finalize_backward()
        handle.wait()
        for rank in range(world.size):
            (mean_square(reference, BATCH(rank)) / world.size).backward()
        for parameter, expected in zip(parameters, reference.parameters(), strict=True):
            assert torch.allclose(whole(parameter.grad), expected.grad)  # type: ignore[arg-type]


@ranks(2)
@BOTH
def test_a_reset_invalidates_the_handle(world: World, library: str) -> None:
    model = shard_mlp(LIBRARIES[library])
    model.set_manual_backward_finalization(True)
    model(inputs()).sum().backward()
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="invalidated"):
            handle.wait()
    model(inputs()).sum().backward()
    following = model.finalize_backward(async_op=True)
    with pytest.raises(RuntimeError, match="invalidated"):
        handle.wait()
    following.wait()


@ranks(2)
def test_a_reset_of_a_model_that_shares_the_communication_invalidates_it_too(world: World) -> None:
    one, other = shard_mlp(), shard_mlp()
    fullshard.share_comm_ctx([one, other])
    one.set_manual_backward_finalization(True)
    one(inputs()).sum().backward()
    handle = one.finalize_backward(async_op=True)
    other(inputs())
    other.reset_iter_state()
    with pytest.raises(RuntimeError, match="shares its communication"):
        handle.wait()
    one.reset_iter_state()
    dist.barrier()


@ranks(2)
def test_between_a_forward_and_its_backward_it_is_refused(world: World) -> None:
    pair = Twins(world, shard_mlp(), seeded(MLP))
    pair.sharded.set_manual_backward_finalization(True)
    loss = mean_square(pair.sharded, (inputs(world.rank),))
    with pytest.raises(
        RuntimeError, match=r"between a forward of FSDPMLP and its backward.*delete what the forward returned"
    ):
        pair.sharded.finalize_backward()
    loss.backward()
    pair.sharded.finalize_backward()
    with torch.no_grad():
        output = pair.sharded(inputs())
    pair.sharded.finalize_backward()
    del output


@ranks(2)
def test_gradients_that_were_left_on_leaves_are_reduced(world: World) -> None:
    """As a stage of a pipeline leaves them that computes the gradients of weights by hand, after those of inputs."""
    model, reference = shard_mlp(reshard_after_forward=False), seeded(MLP)
    shown = list(model.parameters())
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    loss = mean_square(model, BATCH(world.rank))
    leaves = list(model.parameters())
    for leaf, grad in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
        leaf.grad = grad
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    model.finalize_backward(async_op=True).wait()
    for rank in range(world.size):
        (mean_square(reference, BATCH(rank)) / world.size).backward()
    for parameter, expected in zip(shown, reference.parameters(), strict=True):
        assert torch.allclose(whole(parameter.grad), expected.grad)  # type: ignore[arg-type]
    assert all(leaf.grad is None for leaf in leaves)


@ranks(2)
def test_an_error_in_finalization_needs_a_reset(world: World) -> None:
    model = shard_mlp()
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    model(inputs()).sum().backward()
    model.set_requires_gradient_sync(True)

    def fail(output: Tensor) -> None:
        raise ArithmeticError

    model.blocks[2].set_all_reduce_hook(fail)
    with pytest.raises(ArithmeticError):
        model.finalize_backward()
    model.reset_iter_state()
    groups_of(model.blocks[2])[0].options.all_reduce_hook = None
    model.set_manual_backward_finalization(False)
    for parameter in model.parameters():
        parameter.grad = None
    Twins(world, model, seeded(MLP)).step()


class TwoStages(nn.Module):
    """Trains its first stage inside of its forward, as a pipeline in one module does, and returns the second's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = seeded(MLP), seeded(lambda: MLP((3, 5, 3)), seed=1)

    def forward(self, x: Tensor, finalize: Callable[[], object]) -> Tensor:
        output = self.first(x)
        output.square().mean().backward()
        finalize()
        return self.second(output.detach()).square().mean()


@ranks(2)
@pytest.mark.parametrize("async_op", [False, True])
def test_in_a_forward_it_does_not_end_the_forward(world: World, async_op: bool) -> None:
    model, reference = seeded(TwoStages), seeded(TwoStages)
    shard_each(model.first, model.second, reshard_after_forward=True)
    sharded: Any = fullshard.fully_shard(model)
    sharded.set_manual_backward_finalization(True)
    recorder = Recorder(sharded)
    for step in (1, 2):
        sharded(inputs(world.rank), partial(finalize, sharded, async_op)).backward()
        assert {event.step for event in recorder.events} == {step}
        recorder.take()
        finalize(sharded, async_op)
        recorder.take()
        for rank in range(world.size):
            (reference(inputs(rank), lambda: None) / world.size).backward()
        found = dict(sharded.named_parameters())
        for name, parameter in reference.named_parameters():
            scale = world.size if name.startswith("first") else 1  # its loss is not divided by the number of ranks
            assert torch.allclose(whole(found[name].grad), parameter.grad / scale, atol=1e-6)  # type: ignore[operator]


def test_switches_that_are_none_are_refused() -> None:
    model = object.__new__(fullshard.FSDPModule)
    with pytest.raises(TypeError, match="set_manual_backward_finalization expects True or False"):
        fullshard.FSDPModule.set_manual_backward_finalization(model, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="finalize_backward expects True or False"):
        fullshard.FSDPModule.finalize_backward(model, async_op=None)  # type: ignore[arg-type]
