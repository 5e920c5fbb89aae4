"""Parity of the flags of `MixedPrecision`: which inputs are cast, which modules and buffers keep full precision."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness import World, ranks
from tests.harness.compare import Precision, compare, first_difference, mean_square, train_sharded, whole_gradients
from tests.harness.models import MLP, random_batch, seeded
from tests.harness.slow import slow
from tests.harness.wrapper import (
    ORIGINAL,
    OUR_WRAPPER,
    STRATEGIES,
    WRAPPERS,
    assert_all_see,
    no_sync_before,
    training,
    wrap,
    wrap_blocks,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOOLEANS = [False, True]


def compare_with_torch(world: World, case: Any) -> None:
    """Every step is torch's, where numbers of unsharded training are not sharp enough to compare with."""
    reference = train_sharded(case, WRAPPERS["torch"], world.rank, world.size)
    for name, fsdp in OUR_WRAPPER.items():
        difference = first_difference(train_sharded(case, fsdp, world.rank, world.size), reference)
        assert difference is None, f"{name} differs from torch in {difference}"


@ranks(1, 2, transport="shm")
@pytest.mark.parametrize("strategy", STRATEGIES)
@ORIGINAL
@pytest.mark.parametrize("dtypes", [(BF16, None), (None, BF16), *slow((BF16, FP32), (BF16, FP16))])
def test_low_precision_gradients_are_kept(world: World, strategy: str, original: bool, dtypes: Any) -> None:
    def observe(fsdp: ModuleType) -> Any:
        flags = {"keep_low_precision_grads": True}
        model = wrap_blocks(strategy=strategy, original=original, precision=Precision(*dtypes), flags=flags)(
            fsdp, seeded(MLP)
        )
        mean_square(model, random_batch(4, 6)(0)).backward()  # equal on all ranks, so that there is nothing to round
        seen = [(p.dtype, p.grad.dtype) for p in model.parameters() if p.grad is not None]
        # torch cannot show whole gradients of another dtype than the parameters'.
        whole = {} if original else whole_gradients(fsdp, model)
        return set(seen), {name: torch.as_tensor(gradient).tolist() for name, gradient in whole.items()}

    assert_all_see(observe)


@ranks(2, transport="shm")
@pytest.mark.parametrize("last", [1, 2])
def test_bf16_accumulated_without_communication(world: World, last: int) -> None:
    precision = Precision(BF16, FP32)
    shard = wrap_blocks(precision=precision)
    case = training(shard, micro_batches=last + 1, around_micro=no_sync_before(last), precision=precision)
    compare(world, case, with_torch=False)  # torch adds up in bf16


class Notes(nn.Module):
    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.linear = nn.Linear(columns, rows)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, ids: Tensor, *, more: dict[str, Tensor]) -> Tensor:
        self.seen = [x.dtype, ids.dtype, more["float"].dtype, more["int"].dtype, self.linear.weight.dtype]
        return torch.tanh(self.linear(x.to(self.linear.weight.dtype))) * more["float"].to(x.dtype)


class Noting(nn.Module):
    """Blocks that take tensors of several dtypes, of which the second gets what the root was given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Notes(6, 6), Notes(6, 6)])
        self.scale = nn.Parameter(torch.ones(()).reshape(1))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [x.dtype, self.scale.dtype]
        rest = {"ids": torch.arange(4), "more": {"float": torch.ones(1), "int": torch.ones(1, dtype=torch.int32)}}
        y = self.blocks[0](x, **rest)
        return self.scale * (y + self.blocks[1](x, **rest))


@ranks(1, 2, transport="shm")
@pytest.mark.parametrize("cast", BOOLEANS)
@pytest.mark.parametrize("cast_root", BOOLEANS)
@pytest.mark.parametrize("original", BOOLEANS)
def test_inputs_that_are_cast(world: World, cast: bool, cast_root: bool, original: bool) -> None:
    def observe(fsdp: ModuleType) -> Any:
        model = seeded(Noting)
        notes = [model, *model.blocks]
        flags = {"cast_forward_inputs": cast, "cast_root_forward_inputs": cast_root}
        wrapped = wrap_blocks(precision=Precision(BF16), flags=flags, original=original)(fsdp, model)
        dtypes = []
        for training_mode in BOOLEANS:
            wrapped.train(training_mode)
            output = wrapped(*random_batch(4, 6)(0))
            dtypes += [output.dtype, *(note.seen for note in notes)]
        output.float().square().mean().backward()
        return dtypes

    assert_all_see(observe)


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(columns, rows), nn.BatchNorm1d(rows), nn.Tanh())
            for columns, rows in [(6, 5), (5, 7)]
        )
        self.norm = nn.LayerNorm(7)
        self.register_buffer("shift", torch.full((7,), 0.1))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x) + self.get_buffer("shift")


def wrap_automatically(ignored: tuple[str, ...] | None, buffer_dtype: torch.dtype | None = None, **options: Any) -> Any:
    """Wrap the blocks of `Normalized` by a policy; modules of some classes of `torch.nn` keep full precision."""

    def shard(fsdp: Any, model: nn.Module) -> Any:
        flags: dict[str, Any] = {"buffer_dtype": buffer_dtype}
        if ignored is not None:
            flags["_module_classes_to_ignore"] = [getattr(nn, name) for name in ignored]
        policy = fsdp.wrap.ModuleWrapPolicy({nn.Sequential})
        return wrap(fsdp, model, auto_wrap_policy=policy, precision=Precision(BF16, FP32), flags=flags, **options)

    return shard


@ranks(2, transport="shm")
@pytest.mark.parametrize("ignored", [None, ("LayerNorm",), *slow((), ("BatchNorm1d", "LayerNorm"))])
@ORIGINAL
def test_modules_that_keep_full_precision(world: World, ignored: tuple[str, ...] | None, original: bool) -> None:
    """By default batch norms do: they get units of their own, and with them come casts of what goes in and out."""
    # A kernel of batch norm wants buffers of the dtype of the parameters, or of both in full precision.
    buffer_dtype = BF16 if ignored is not None and "BatchNorm1d" not in ignored else None
    shard = wrap_automatically(ignored, buffer_dtype, original=original)

    def observe(fsdp: ModuleType) -> Any:
        model = seeded(Normalized)
        seen: list[Any] = []
        for module in [model.norm, *(block[1] for block in model.blocks)]:
            module.register_forward_hook(lambda m, i, o: seen.append((i[0].dtype, m.weight.dtype, o.dtype)))
        wrapped = shard(fsdp, model)
        seen.append([name for name, _ in wrapped.named_parameters()])
        seen.append([type(unit.module).__name__ for unit in fsdp.FullyShardedDataParallel.fsdp_modules(wrapped)])
        wrapped(*random_batch(4, 6)(world.rank))
        return [*seen, {name: buffer.dtype for name, buffer in wrapped.named_buffers()}]

    assert_all_see(observe)
    compare_with_torch(world, training(shard, build=lambda: seeded(Normalized)))


@ranks(2, transport="shm")
@pytest.mark.parametrize("buffer_dtype", [None, BF16, torch.float64])
@ORIGINAL
def test_dtypes_of_buffers(world: World, buffer_dtype: torch.dtype | None, original: bool) -> None:
    def observe(fsdp: ModuleType) -> Any:
        wrapped = wrap_automatically(None, buffer_dtype, original=original)(fsdp, seeded(Normalized))

        def dtypes() -> list[torch.dtype]:
            return [buffer.dtype for buffer in wrapped.buffers()]

        seen = [dtypes()]
        mean_square(wrapped, random_batch(4, 6)(world.rank)).backward()
        seen.append(dtypes())
        with fsdp.FullyShardedDataParallel.summon_full_params(wrapped):
            seen += [dtypes(), [parameter.dtype for parameter in wrapped.parameters()]]
        return [*seen, dtypes()]

    assert_all_see(observe)


@ranks(2, transport="shm")
@pytest.mark.parametrize("full", ["0", "1"])
@ORIGINAL
def test_full_precision_in_evaluation(world: World, full: str, original: bool) -> None:
    def observe(fsdp: ModuleType) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", full)
            model = seeded(Noting)
            notes = [model, *model.blocks]
            wrapped = wrap_blocks(precision=Precision(BF16, FP32), original=original)(fsdp, model)
            seen: list[Any] = []
            for mode in (True, False, True):
                wrapped.train(mode)
                output = wrapped(*random_batch(4, 6)(0))
                seen += [output.dtype, *(note.seen for note in notes)]
            output.float().square().mean().backward()
            return seen

    assert_all_see(observe)
