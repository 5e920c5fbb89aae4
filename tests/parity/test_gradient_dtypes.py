"""Parity of the dtypes of single parameters and of gradients: `param_dtype_override_fn`, `grad_dtype`, `reduce_dtype`.

What torch 2.15 added is there on every torch. Where the installed one has it too, it is given the same test; otherwise
fullshard alone is compared with unsharded training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullshard
from fullshard.torch_private import GRADIENTS_KEEP_DTYPE
from tests.harness import World, ranks
from tests.harness.compare import (
    LIBRARIES,
    OURS,
    Precision,
    Training,
    compare,
    each_block,
    first_difference,
    mean_square,
    train_sharded,
    train_unsharded,
    whole,
)
from tests.harness.models import MLP, random_batch, seeded

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OVERRIDE = "param_dtype_override_fn"
TORCH_OVERRIDES = OVERRIDE in LIBRARIES["torch"].MixedPrecisionPolicy.__dataclass_fields__
NEW = list(LIBRARIES if GRADIENTS_KEEP_DTYPE else OURS)
OVERRIDING = list(LIBRARIES if TORCH_OVERRIDES else OURS)
BATCH = random_batch(4, 6)


def backward(world: World, model: Any, *, micro: int = 1) -> None:
    for each in range(micro):
        mean_square(model, BATCH(world.rank * micro + each)).backward()


def seen_by_hook(model: Any) -> list[torch.dtype]:
    seen: list[torch.dtype] = []
    for module in (*model.blocks, model):
        module.set_all_reduce_hook(lambda output: seen.append(output.dtype))
    return seen


@ranks(2)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("param_dtype", [None, BF16])
def test_what_no_reduce_dtype_means_to_the_installed_torch(
    world: World, library: str, param_dtype: torch.dtype | None
) -> None:
    fsdp = LIBRARIES[library]
    model = seeded(MLP)
    each_block(precision=Precision(param_dtype))(fsdp, model)
    seen = seen_by_hook(model)
    backward(world, model)
    assert set(seen) == {FP32 if GRADIENTS_KEEP_DTYPE else param_dtype or FP32}


@ranks(2)
@pytest.mark.parametrize("library", LIBRARIES)
def test_gradients_wait_in_the_dtype_in_which_they_travel(world: World, library: str) -> None:
    precision = Precision(BF16)
    training = Training(
        build=lambda: seeded(MLP),
        shard=each_block(precision=precision),
        batch=BATCH,
        precision=Precision(BF16, FP32 if GRADIENTS_KEEP_DTYPE else BF16),
        micro_batches=2,
        set_up_micro=lambda model, micro: model.set_requires_gradient_sync(micro == 1),
    )
    steps = train_sharded(training, LIBRARIES[library], world.rank, world.size)
    means = (FP32,) if GRADIENTS_KEEP_DTYPE else (BF16, FP32)  # of bf16 it depends on who adds up
    differences = [
        first_difference(steps, train_unsharded(dataclasses.replace(training, mean_dtype=mean), world.rank, world.size))
        for mean in means
    ]
    assert None in differences, differences


class Scaled(nn.Module):
    """Linear layers in the dtype of the input, each with a scale that is applied in its own dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ScaledLinear() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class ScaledLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6) / 3)
        self.scale = nn.Parameter(1 + torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        return (F.linear(x, self.weight) * self.scale).to(x.dtype)


class ScaledInFp32(Scaled):
    """What a rank computes if all but the scales is cast to bf16."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(BF16)
        for block in self.blocks:
            x = (F.linear(x, block.weight.to(BF16)) * block.scale).to(BF16)
        return x


def scales_stay(param: nn.Parameter) -> torch.dtype | None:
    return param.dtype if param.ndim == 1 else None


@ranks(1, 2)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_single_parameters_keep_their_dtype(world: World, micro_batches: int) -> None:
    def shard(fsdp: ModuleType, model: Any) -> None:
        policy = fsdp.MixedPrecisionPolicy(BF16, FP32, param_dtype_override_fn=scales_stay)
        for module in (*model.blocks, model):
            fsdp.fully_shard(module, mp_policy=policy)

    training = Training(
        build=lambda: seeded(Scaled),
        build_reference=lambda: seeded(ScaledInFp32),
        shard=shard,
        batch=BATCH,
        micro_batches=micro_batches,
        set_up_micro=lambda model, micro: model.set_requires_gradient_sync(micro == micro_batches - 1),
    )
    compare(world, training, with_torch=TORCH_OVERRIDES)


@ranks(2)
@pytest.mark.parametrize("library", OVERRIDING)
def test_the_function_is_asked_once_for_each_parameter(world: World, library: str) -> None:
    fsdp = LIBRARIES[library]
    model, asked = seeded(Scaled), list[torch.Size]()

    def choose(param: nn.Parameter) -> None:
        asked.append(param.shape)

    fsdp.fully_shard(model, mp_policy=fsdp.MixedPrecisionPolicy(BF16, param_dtype_override_fn=choose))
    assert asked == [param.shape for param in seeded(Scaled).parameters()]
    backward(world, model)
    assert len(asked) == 6


@ranks(2)
@pytest.mark.parametrize("library", OVERRIDING)
@pytest.mark.parametrize("said", [torch.float64, FP16, "bfloat16", 16])
def test_another_dtype_is_refused(world: World, library: str, said: Any) -> None:
    fsdp = LIBRARIES[library]
    policy = fsdp.MixedPrecisionPolicy(BF16, param_dtype_override_fn=lambda param: said)
    with pytest.raises(ValueError, match=r"param_dtype_override_fn (must return|returned)"):
        fsdp.fully_shard(seeded(Scaled), mp_policy=policy)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match=r"param_dtype_override_fn is torch\.bfloat16"):
        fullshard.MixedPrecisionPolicy(param_dtype_override_fn=BF16)  # type: ignore[arg-type]


@ranks(2)
def test_ranks_that_choose_differently_are_told(world: World) -> None:
    policy = fullshard.MixedPrecisionPolicy(
        BF16, param_dtype_override_fn=lambda param: FP32 if world.rank == 0 else None
    )
    with pytest.raises(ValueError, match=r"computed in torch\.float32.* where rank 1 has .*computed in param_dtype"):
        fullshard.fully_shard(seeded(Scaled), mp_policy=policy)


def with_grad_dtype(chosen: Callable[[str], Any], build: Callable[[], nn.Module] = MLP) -> Any:
    model = seeded(build)
    for name, parameter in model.named_parameters():
        if chosen(name) != "own":
            parameter.grad_dtype = chosen(name)
    return model


def low_weights(name: str) -> Any:
    return BF16 if name.endswith("weight") else "own"


def mean_of_ranks(world: World, chosen: Callable[[str], Any]) -> dict[str, Tensor]:
    """The gradients of unsharded training: summed up in fp32, and rounded where they come home."""
    sums: dict[str, Tensor] = {}
    for rank in range(world.size):
        worker = with_grad_dtype(chosen)
        mean_square(worker, BATCH(rank)).backward()
        for name, parameter in worker.named_parameters():
            sums[name] = sums.get(name, 0) + parameter.grad.float()
    dtypes = {name: parameter.grad.dtype for name, parameter in worker.named_parameters()}
    return {name: (total / world.size).to(dtypes[name]) for name, total in sums.items()}


@ranks(1, 2)
@pytest.mark.parametrize("library", NEW)
@pytest.mark.parametrize("late", [False, True])
def test_gradients_come_home_in_the_dtype_that_was_chosen(world: World, library: str, late: bool) -> None:
    fsdp = LIBRARIES[library]
    model = with_grad_dtype(low_weights if not late else lambda name: "own")
    each_block()(fsdp, model)
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if late and low_weights(name) != "own":
            parameter.grad_dtype = BF16
    seen = seen_by_hook(model)
    backward(world, model)
    expected = mean_of_ranks(world, low_weights)
    assert set(seen) == {FP32}, "those of biases are promoted to nothing less"
    for name, parameter in parameters.items():
        wanted = BF16 if name.endswith("weight") else FP32
        assert parameter.grad_dtype == parameter.grad.dtype == parameter.grad.to_local().dtype == wanted
        found = whole(parameter.grad)
        assert found.dtype == expected[name].dtype
        assert torch.allclose(found.float(), expected[name].float(), rtol=1e-2, atol=1e-4)
        if wanted == FP32:
            assert torch.allclose(found, expected[name])


@ranks(2)
@pytest.mark.parametrize("library", NEW)
def test_all_low_gradients_travel_so(world: World, library: str) -> None:
    model = with_grad_dtype(lambda name: BF16)
    each_block()(LIBRARIES[library], model)
    seen = seen_by_hook(model)
    parameters = list(model.parameters())
    for _ in range(2):
        backward(world, model)
    assert set(seen) == {BF16}
    assert {parameter.grad.dtype for parameter in parameters} == {BF16}
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    before = [whole(parameter) for parameter in parameters]
    optimizer.step()
    for parameter, old in zip(parameters, before, strict=True):
        assert torch.allclose(whole(parameter), old - 0.1 * whole(parameter.grad).float())


class MainGradient(torch.autograd.Function):
    """A linear layer in low precision, whose gradient of the weight is computed in fp32 and stays so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].float().t() @ x.float()


class WithMainGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.bias = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return MainGradient.apply(x, self.weight) + self.bias


@ranks(2)
@pytest.mark.parametrize("library", NEW)
@pytest.mark.parametrize("micro", [1, 2])
def test_none_takes_gradients_of_any_dtype(world: World, library: str, micro: int) -> None:
    """A model that is stored in bf16, with a gradient that is computed in fp32."""
    fsdp = LIBRARIES[library]
    model, reference = seeded(WithMainGradient).bfloat16(), seeded(WithMainGradient).bfloat16()
    for each in (model, reference):
        each.weight.grad_dtype = None
    fsdp.fully_shard(model)
    weight, bias = model.weight, model.bias
    for step in range(2):
        model.set_requires_gradient_sync(micro == 1)
        for rank in range(world.size):
            for each in range(micro):
                x = BATCH(8 * step + 2 * rank + each)[0].bfloat16()
                if rank == world.rank:
                    model.set_requires_gradient_sync(each == micro - 1)
                    model(x).float().square().sum().backward()
                reference(x).float().square().sum().backward()
        expected = reference.weight.grad / world.size
        assert weight.grad.dtype == expected.dtype == FP32
        assert torch.allclose(whole(weight.grad), expected, rtol=1e-6)
        assert bias.grad.dtype == BF16
        weight.grad = bias.grad = None
        reference.zero_grad()


@ranks(2)
@pytest.mark.parametrize("library", NEW)
def test_any_dtype_and_unused_parameters_exclude_each_other(world: World, library: str) -> None:
    model = with_grad_dtype(lambda name: None)
    each_block()(LIBRARIES[library], model)
    model.set_reduce_scatter_unused_params(True)
    with pytest.raises(ValueError, match=r"grad_dtype=None.*reduce_dtype"):
        backward(world, model)
    model.reset_iter_state()


@ranks(2)
@pytest.mark.parametrize("library", NEW)
def test_conversions_keep_what_was_chosen(world: World, library: str) -> None:
    model = with_grad_dtype(low_weights)
    each_block()(LIBRARIES[library], model)
    backward(world, model)
    before = whole(model.blocks[0][0].weight.grad)
    model.double()
    assert model.blocks[0][0].weight.grad_dtype == BF16
    assert model.blocks[0][0].bias.grad_dtype == torch.float64
    assert model.blocks[0][0].weight.grad.dtype == BF16, "a gradient is not converted either"
    assert torch.equal(whole(model.blocks[0][0].weight.grad), before)


@ranks(2)
def test_ranks_that_chose_differently_are_told(world: World) -> None:
    model = with_grad_dtype(lambda name: BF16 if world.rank == 1 else "own")
    with pytest.raises(ValueError, match=r"gradients in own where rank 1 has .*gradients in torch\.bfloat16"):
        fullshard.fully_shard(model)
