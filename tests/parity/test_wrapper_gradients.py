"""Parity of what a user does with gradients through the wrapper: `no_sync`, hooks of communication, and clipping."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks

import fullshard
from tests.harness import World, ranks
from tests.harness.compare import Batch, Call, Precision, compare, mean_square, whole_gradients
from tests.harness.faults import FailingBackward, Fault
from tests.harness.models import MLP, random_batch, seeded
from tests.harness.slow import slow
from tests.harness.wrapper import (
    EACH_WRAPPER,
    HYBRID,
    ORIGINAL,
    STRATEGIES,
    WRAPPERS,
    assert_all_see,
    training,
    wrap,
    wrap_blocks,
)

EACH_STRATEGY = pytest.mark.parametrize("strategy", ["FULL_SHARD", *slow("SHARD_GRAD_OP"), "NO_SHARD"])
NORMS = pytest.mark.parametrize("norm_type", [2.0, float("inf"), *slow(1.0)])


def after_a_forward(fsdp: ModuleType, **options: Any) -> Any:
    model = wrap_blocks(**options)(fsdp, seeded(MLP))
    model(*random_batch(4, 6)(0))
    return model


@ranks(2, transport="shm")
@EACH_WRAPPER
def test_no_sync_is_of_the_root_only(world: World, library: str) -> None:
    model = after_a_forward(WRAPPERS[library])
    with pytest.raises(RuntimeError, match="no_sync"), model.blocks[0].no_sync():
        pass
    with model.no_sync():
        pass


@ranks(2, transport="shm")
@EACH_WRAPPER
@ORIGINAL
def test_no_sync_ends_with_an_error_inside_of_it(world: World, library: str, original: bool) -> None:
    fsdp = WRAPPERS[library]
    model = wrap_blocks(original=original)(fsdp, seeded(MLP))
    with pytest.raises(ArithmeticError), model.no_sync():
        raise ArithmeticError
    batch = random_batch(4, 6)(0)  # equal on all ranks: the mean over them is the gradient of each
    mean_square(model, batch).backward()
    reference = seeded(MLP)
    mean_square(reference, batch).backward()
    for name, gradient in whole_gradients(fsdp, model).items():
        assert gradient is not None
        assert torch.allclose(gradient, torch.as_tensor(reference.get_parameter(name).grad), rtol=1e-6, atol=1e-8)


@ranks(2)
@EACH_STRATEGY
@ORIGINAL
def test_gradients_that_were_not_communicated_can_be_thrown_away(world: World, strategy: str, original: bool) -> None:
    """After `zero_grad` nothing is left of what `no_sync` put aside."""

    def around(model: Any, micro: int) -> Any:
        if micro == 2:
            model.zero_grad(set_to_none=original)
        return model.no_sync() if micro < 3 else nullcontext()

    for fsdp in WRAPPERS.values():
        batches = [random_batch(4, 6)(seed) for seed in range(4)]  # equal on all ranks
        model = wrap_blocks(strategy=strategy, original=original)(fsdp, seeded(MLP))
        reference = seeded(MLP)
        for micro, batch in enumerate(batches):
            with around(model, micro):
                mean_square(model, batch).backward()
            if micro >= 2:
                mean_square(reference, batch).backward()
        for name, gradient in whole_gradients(fsdp, model).items():
            assert gradient is not None
            wanted = torch.as_tensor(reference.get_parameter(name).grad)
            assert torch.allclose(gradient, wanted, rtol=1e-5, atol=1e-8), name


@ranks(2)
def test_what_a_user_writes_while_a_gradient_waits_is_added_to(world: World) -> None:
    model, reference = wrap_blocks(original=False)(fullshard, seeded(MLP)), seeded(MLP)
    with model.no_sync():
        mean_square(model, random_batch(4, 6)(0)).backward()
    for parameter in model.parameters():
        parameter.grad.fill_(0.5)
    mean_square(model, random_batch(4, 6)(1)).backward()
    for seed in range(2):
        mean_square(reference, random_batch(4, 6)(seed)).backward()
    found = whole_gradients(fullshard, model)
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name], parameter.grad + 0.5)


def clip_to(max_norm: float, norm_type: float) -> Callable[[Any], Tensor]:
    def clip(model: Any) -> Tensor:
        return (
            model.clip_grad_norm_(max_norm, norm_type)
            if hasattr(model, "clip_grad_norm_")
            else nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
        )

    return clip


@ranks(2)
@EACH_STRATEGY
@NORMS
def test_clipped_gradients(world: World, strategy: str, norm_type: float) -> None:
    for original in (False, True):
        shard = wrap_blocks(strategy=strategy, original=original)
        compare(world, training(shard, after_backward=clip_to(1e-2, norm_type)))


@ranks(2, transport="shm")
@NORMS
@ORIGINAL
@pytest.mark.parametrize("ignore", ["parameter", "module", "states"])
def test_clipped_gradients_with_parameters_that_are_ignored(
    world: World, norm_type: float, original: bool, ignore: str
) -> None:
    def shard(fsdp: ModuleType, model: Any) -> Any:
        options: dict[str, Any] = {
            "parameter": {"ignored_states": [model.scale]},
            "module": {"ignored_modules": [model.blocks[0]]},
            "states": {"ignored_states": [model.blocks[0]]},
        }[ignore]
        for index, block in enumerate(model.blocks):
            if index > 0:
                model.blocks[index] = wrap(fsdp, block, original=original)
        return wrap(fsdp, model, original=original, **options)

    # What is ignored is not communicated either, so that all ranks have to see the same batches.
    step = {"batch": lambda seed: random_batch(4, 6)(0), "after_backward": clip_to(1e-2, norm_type)}
    compare(world, training(shard, **step))


@ranks(2, transport="shm")
@EACH_WRAPPER
def test_clipping_is_of_the_root_only(world: World, library: str) -> None:
    model = after_a_forward(WRAPPERS[library])
    with pytest.raises(RuntimeError, match="clip_grad_norm_"):
        model.blocks[0].clip_grad_norm_(1.0)


@ranks(2, transport="shm")
@ORIGINAL
@pytest.mark.parametrize("keep", [False, True])
def test_the_dtype_of_a_norm(world: World, original: bool, keep: bool) -> None:
    def observe(fsdp: ModuleType) -> Any:
        precision, flags = Precision(torch.bfloat16), {"keep_low_precision_grads": keep}
        model = wrap_blocks(original=original, precision=precision, flags=flags)(fsdp, seeded(MLP))
        mean_square(model, random_batch(4, 6)(0)).backward()
        norm = model.clip_grad_norm_(1e-2)
        return (
            norm.dtype,
            norm.shape,
            norm.requires_grad,
            [p.grad.dtype for p in model.parameters() if p.grad is not None],
        )

    assert_all_see(observe)


def hooked(state: Callable[[], Any], hook: Callable[..., Any], **options: Any) -> Any:
    def shard(fsdp: ModuleType, model: Any) -> Any:
        wrapped = wrap_blocks(**options)(fsdp, model)
        wrapped.register_comm_hook(state(), hook)
        return wrapped

    return shard


@ranks(2, 3, transport="shm")
@EACH_STRATEGY
@ORIGINAL
def test_the_hooks_that_communicate_as_usual(world: World, strategy: str, original: bool) -> None:
    hook = default_hooks.allreduce_hook if strategy == "NO_SHARD" else default_hooks.reduce_scatter_hook
    compare(
        world,
        training(
            hooked(lambda: default_hooks.DefaultState(dist.group.WORLD), hook, strategy=strategy, original=original)
        ),
    )


@ranks(2, transport="shm")
@pytest.mark.parametrize(
    ("strategy", "dtype"), [*((strategy, torch.bfloat16) for strategy in STRATEGIES), ("FULL_SHARD", torch.float16)]
)
@ORIGINAL
def test_the_hooks_that_compress(world: World, strategy: str, original: bool, dtype: torch.dtype) -> None:
    hooks = {torch.bfloat16: default_hooks.bf16_compress_hook, torch.float16: default_hooks.fp16_compress_hook}

    def loss(call: Call, batch: Batch) -> Tensor:
        return 64 * mean_square(call, batch)  # large enough for what is halved in fp16

    case = training(
        hooked(
            lambda: default_hooks.LowPrecisionState(dist.group.WORLD),
            hooks[dtype],
            strategy=strategy,
            original=original,
        ),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        precision=Precision(reduce_dtype=dtype),
    )
    with pytest.MonkeyPatch.context() as patch:
        # These hooks of torch were written for accelerators: on CPU no tensor can record a stream.
        patch.setattr(Tensor, "record_stream", lambda *_: None)
        compare(world, case)


def sum_by_hand(seen: list[Any], gradient: Tensor, shard: Tensor | None = None) -> None:
    """A hook of one's own: the sum over ranks, not the mean."""
    seen.append((list(gradient.shape), gradient.dtype, None if shard is None else list(shard.shape)))
    dist.all_reduce(gradient)
    if shard is not None:
        shard.copy_(gradient.chunk(dist.get_world_size())[dist.get_rank()])


@ranks(2, 3, transport="shm")
@EACH_STRATEGY
@ORIGINAL
def test_a_hook_of_ones_own(world: World, strategy: str, original: bool) -> None:
    """It has all to say about the gradients of a unit: there is no divisor beside it."""
    case = training(hooked(list, sum_by_hand, strategy=strategy, original=original), divisor=1.0)
    compare(world, case)

    def observe(fsdp: ModuleType) -> list[Any]:
        seen: list[Any] = []
        model = hooked(lambda: seen, sum_by_hand, strategy=strategy, original=original)(fsdp, seeded(MLP))
        with model.no_sync():
            with model.no_sync():
                mean_square(model, random_batch(4, 6)(0)).backward()
            mean_square(model, random_batch(4, 6)(0)).backward()
        assert not seen
        mean_square(model, random_batch(4, 6)(0)).backward()
        if strategy == "NO_SHARD" and original:
            return [len(seen)]  # torch pads what need not be padded, for nothing is cut
        return sorted(seen, key=str)  # there is no order between the root's own parameters and its first block

    assert_all_see(observe)


@ranks(2, transport="shm")
@EACH_WRAPPER
def test_hooks_that_are_refused(world: World, library: str) -> None:
    fsdp = WRAPPERS[library]
    model = after_a_forward(fsdp)
    with pytest.raises(AssertionError, match="root"):
        model.blocks[0].register_comm_hook([], sum_by_hand)
    with pytest.raises(ValueError, match="callable"):
        model.register_comm_hook([], "not a function")
    model.register_comm_hook([], sum_by_hand)
    with pytest.raises(AssertionError, match="already"):
        model.register_comm_hook([], sum_by_hand)


@ranks(2, transport="shm")
@EACH_WRAPPER
@pytest.mark.parametrize("strategy", HYBRID)
def test_hooks_of_hybrids_are_refused(world: World, library: str, strategy: str) -> None:
    mesh = world.mesh(1, 2, names=("replicate", "shard"))
    model = wrap_blocks(strategy=strategy, device_mesh=mesh)(WRAPPERS[library], seeded(MLP))
    with pytest.raises(AssertionError, match=r"(?i)hybrid"):
        model.register_comm_hook([], sum_by_hand)


@ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@ORIGINAL
def test_gradients_of_a_step_with_an_error_do_not_come_home_after_they_were_cleared(
    world: World, strategy: str, original: bool
) -> None:
    """Those whose reduction was under way when the error came."""
    model = wrap_blocks(strategy=strategy, original=original)(fullshard, seeded(MLP))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = model.blocks[1].register_forward_hook(lambda module, args, output: FailingBackward.apply(output))
    with pytest.raises(Fault):
        mean_square(model, random_batch(4, 6)(0)).backward()
    handle.remove()
    optimizer.zero_grad()
    mean_square(model, random_batch(4, 6)(1)).backward()
    reference = seeded(MLP)
    mean_square(reference, random_batch(4, 6)(1)).backward()
    found = whole_gradients(fullshard, model)
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name], parameter.grad)


@ranks(4)
@pytest.mark.parametrize("norm_type", [2.0, *slow(1.0, float("inf"))])
@pytest.mark.parametrize("inner", ["first", *slow("last")])
def test_modules_over_other_process_groups_count_once_in_the_norm(world: World, norm_type: float, inner: str) -> None:
    """One layer is sharded inside of nodes, and replicated or not over these; the other one over all ranks."""
    nodes = world.mesh(2, 2, names=("replicate", "shard"))
    model, reference = (nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    layers = [0, 1] if inner == "first" else [1, 0]
    hybrid = {"device_mesh": nodes, "sharding_strategy": fullshard.ShardingStrategy.HYBRID_SHARD}
    model[layers[0]] = fullshard.FullyShardedDataParallel(model[layers[0]], **hybrid)
    model[layers[1]] = fullshard.FullyShardedDataParallel(model[layers[1]])
    model = fullshard.FullyShardedDataParallel(model)
    for rank in range(world.size):
        reference(torch.full((2, 3), 1.0 + rank)).sum().div(world.size).backward()
    model(torch.full((2, 3), 1.0 + world.rank)).sum().backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 1e-2, norm_type)
    torch.testing.assert_close(model.clip_grad_norm_(1e-2, norm_type), expected)


@pytest.mark.slow
@ranks(4)
def test_modules_of_some_ranks_each_have_one_norm(world: World) -> None:
    """As experts: ranks 0 and 1 have other parameters than 2 and 3, and all have some in common."""
    pairs = world.mesh(2, 2, names=("pair", "shard"))["shard"]
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1] = fullshard.FullyShardedDataParallel(model[1], pairs.get_group())
    model = fullshard.FullyShardedDataParallel(model)
    model(torch.ones(1, 2)).sum().backward()
    for param in model.parameters():
        param.grad.fill_(1.0)
    assert model.clip_grad_norm_(1e9, 2.0).item() == pytest.approx((4 + 2 * 4) ** 0.5)


@ranks(4)
def test_a_norm_over_process_groups_of_which_none_has_all_ranks_is_refused(world: World) -> None:
    mesh = world.mesh(2, 2, names=("rows", "columns"))
    layers = [
        fullshard.FullyShardedDataParallel(nn.Linear(2, 2), mesh[name].get_group()) for name in mesh.mesh_dim_names
    ]
    model = fullshard.FullyShardedDataParallel(nn.Sequential(*layers), mesh["rows"].get_group())
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match=r"sharded over ranks \[\d, \d\] and others over \[\d, \d\]"):
        model.clip_grad_norm_(1.0)
