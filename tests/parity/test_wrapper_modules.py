"""Parity of what runs inside of wrapped modules: checkpoints, nested outputs, evaluation between steps, and errors."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from tests.harness import World, ranks
from tests.harness.compare import Batch, compare, mean_square, whole_gradients
from tests.harness.models import MLP, Checkpointing, Transformer, random_batch, seeded, token_batch
from tests.harness.slow import slow
from tests.harness.wrapper import (
    ORIGINAL,
    OUR_WRAPPER,
    SHARDED,
    WRAPPERS,
    no_sync_before,
    training,
    wrap,
    wrap_blocks,
)

CHECKPOINTING = pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
EACH_STRATEGY = pytest.mark.parametrize("strategy", ["FULL_SHARD", *slow("SHARD_GRAD_OP"), "NO_SHARD"])
SOME_STRATEGIES = pytest.mark.parametrize("strategy", SHARDED)


def recomputed(module: nn.Module, checkpointing: Checkpointing) -> nn.Module:
    kinds = {"reentrant": CheckpointImpl.REENTRANT, "non-reentrant": CheckpointImpl.NO_REENTRANT}
    return checkpoint_wrapper(module, checkpoint_impl=kinds[checkpointing])


def transformer(shard: Any, **changes: Any) -> Any:
    """Two steps of the transformer, which has to be whole in the reference."""
    return training(shard, **{"build": lambda: seeded(Transformer), "batch": token_batch(3, 5), **changes})


@ranks(2)
@CHECKPOINTING
@SOME_STRATEGIES
@pytest.mark.parametrize("order", ["wrapper around checkpoint", "checkpoint around wrapper"])
def test_checkpoint_wrapper(world: World, checkpointing: Checkpointing, strategy: str, order: str) -> None:
    options: dict[str, Any] = {"strategy": strategy, "original": strategy == "FULL_SHARD"}

    def shard(fsdp: ModuleType, model: Any) -> Any:
        for index, block in enumerate(model.blocks):
            if order == "wrapper around checkpoint":
                model.blocks[index] = wrap(fsdp, recomputed(block, checkpointing), **options)
            else:
                model.blocks[index] = recomputed(wrap(fsdp, block, **options), checkpointing)
        return wrap(fsdp, model, **options)

    compare(world, transformer(shard))


@pytest.mark.slow
@ranks(2, transport="shm")
@CHECKPOINTING
@ORIGINAL
def test_checkpoints_inside_of_units(world: World, checkpointing: Checkpointing, original: bool) -> None:
    def shard(fsdp: ModuleType, model: Any) -> Any:
        for block in model.blocks:
            block.attention = recomputed(block.attention, checkpointing)
            block.up = recomputed(block.up, checkpointing)
        return wrap_blocks(original=original)(fsdp, model)

    # A reentrant checkpoint is a backward inside of the backward, whose end torch takes for that of the unit.
    compare(world, transformer(shard), with_torch=checkpointing == "non-reentrant")


@ranks(2, transport="shm")
def test_the_wrapped_module_is_found_behind_a_checkpoint(world: World) -> None:
    for fsdp in WRAPPERS.values():
        linear = nn.Linear(6, 3)
        wrapped = wrap(fsdp, recomputed(linear, "non-reentrant"))
        assert wrapped.module is linear
        assert wrapped.in_features == 6


@ranks(2)
@EACH_STRATEGY
@ORIGINAL
@pytest.mark.parametrize("graph", [False, True], ids=["no_grad", "with a graph that is dropped"])
def test_evaluation_between_steps(world: World, strategy: str, original: bool, graph: bool) -> None:
    def loss(call: Any, batch: Batch) -> Tensor:
        call.eval()
        with torch.set_grad_enabled(graph):
            before = mean_square(call, batch).detach()
        call.train()
        value = mean_square(call, batch)
        assert torch.equal(before, value.detach())
        return value

    compare(world, training(wrap_blocks(strategy=strategy, original=original), loss=loss))


@ranks(2, transport="shm")
@SOME_STRATEGIES
@ORIGINAL
def test_evaluation_between_backward_and_step(world: World, strategy: str, original: bool) -> None:
    def evaluate(model: Any) -> Tensor:
        with torch.no_grad():
            output: Tensor = model(*random_batch(4, 6)(7))
        return output

    # The step that follows is lost with torch, wherever the forward left parameters unsharded.
    case = training(wrap_blocks(strategy=strategy, original=original), after_backward=evaluate)
    compare(world, case, with_torch=False)


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.where: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            raise ArithmeticError("on purpose")
        y: Tensor = self.linear(x)
        if self.where == "backward":
            y.register_hook(self.fail)
        return y

    def fail(self, _: Tensor) -> None:
        raise ArithmeticError("on purpose")


@ranks(2, transport="shm")
@ORIGINAL
def test_gradients_wait_for_others_after_an_error_in_a_forward(world: World, original: bool) -> None:
    """Each error ends one step. torch refuses to go on without synchronization."""
    models: list[Any] = [seeded(lambda: MLP((6, 5, 5, 3))) for _ in range(2)]
    for model in models:
        model.blocks[1] = seeded(Fails)
    failing, batch = models[0].blocks[1], random_batch(4, 6)(0)
    (fsdp,) = OUR_WRAPPER.values()
    wrapped = wrap_blocks(original=original)(fsdp, models[0])
    failing.where = "forward"
    with pytest.raises(ArithmeticError, match="on purpose"):
        wrapped(*batch)
    failing.where = None
    with wrapped.no_sync():
        mean_square(wrapped, batch).backward()
    mean_square(wrapped, batch).backward()
    mean_square(models[1], batch).backward()
    found = whole_gradients(fsdp, wrapped)
    for name, parameter in models[1].named_parameters():
        torch.testing.assert_close(found[name], 2 * parameter.grad)


@ranks(2, transport="shm")
def test_a_unit_that_is_called_twice_in_a_forward(world: World) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

        def forward(self, x: Tensor) -> Tensor:
            for index in (0, 1, 0):
                x = torch.tanh(self.blocks[index](x))
            return x

    compare(world, training(wrap_blocks(), build=lambda: seeded(Twice), micro_batches=2))
    compare(
        world, training(wrap_blocks(), build=lambda: seeded(Twice), micro_batches=2, around_micro=no_sync_before(1))
    )
