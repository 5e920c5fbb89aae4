"""Parity of what runs inside of wrapped modules: checkpoints, nested outputs, evaluation between steps, and errors."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from tests.harness import World, ranks
from tests.harness.compare import Batch, Call, Precision, compare, mean_square, whole_gradients, whole_parameters
from tests.harness.models import MLP, Checkpointing, NestedOutputs, Transformer, random_batch, seeded, token_batch
from tests.harness.wrapper import (
    ORIGINAL,
    OUR_WRAPPER,
    SHARDED,
    STRATEGIES,
    WRAPPERS,
    no_sync_before,
    training,
    wrap,
    wrap_blocks,
)

CHECKPOINTING = pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
EACH_STRATEGY = pytest.mark.parametrize("strategy", STRATEGIES)
SOME_STRATEGIES = pytest.mark.parametrize("strategy", SHARDED)


def recomputed(module: nn.Module, checkpointing: Checkpointing) -> nn.Module:
    """A module that recomputes its activations in backward."""
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
@CHECKPOINTING
def test_functional_checkpoints_around_several_units(world: World, checkpointing: Checkpointing) -> None:
    def build() -> nn.Module:
        return seeded(lambda: Transformer(layers=4, checkpointing=checkpointing, region=2))

    compare(world, transformer(wrap_blocks(), build=build))


@ranks(2, transport="shm")
@CHECKPOINTING
def test_checkpoints_in_bf16_over_micro_batches(world: World, checkpointing: Checkpointing) -> None:
    precision = Precision(torch.bfloat16, torch.float32)

    def shard(fsdp: ModuleType, model: Any) -> Any:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = wrap(fsdp, recomputed(block, checkpointing), precision=precision)
        return wrap(fsdp, model, precision=precision)

    compare(world, transformer(shard, precision=precision, micro_batches=2))


@ranks(2, transport="shm")
def test_the_wrapped_module_is_found_behind_a_checkpoint(world: World) -> None:
    for fsdp in WRAPPERS.values():
        linear = nn.Linear(6, 3)
        wrapped = wrap(fsdp, recomputed(linear, "non-reentrant"))
        assert wrapped.module is linear
        assert wrapped.in_features == 6


@ranks(2, transport="shm")
@SOME_STRATEGIES
@ORIGINAL
def test_tensors_deep_in_outputs_that_are_dataclasses(world: World, strategy: str, original: bool) -> None:
    def loss(call: Call, batch: Batch) -> Tensor:
        output = call(*batch)
        return output.main.square().mean() + sum(x.mean() for x in output.others["all"])

    shard = wrap_blocks(strategy=strategy, original=original)
    compare(world, training(shard, build=lambda: seeded(NestedOutputs), loss=loss))


class Containers(nn.Module):
    """Blocks that take and return tuples, lists and dicts, with keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Container(6, 5), _Container(5, 3)])

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        (first, rest) = self.blocks[0](x, scale=torch.tensor(0.5))
        (second, more) = self.blocks[1](first, scale=rest["list"][0])
        return second, {"rest": [more["list"], rest["list"]], "none": None}


class _Container(nn.Module):
    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.main, self.gate = nn.Linear(columns, rows), nn.Linear(columns, 1)

    def forward(self, x: Tensor, *, scale: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return torch.tanh(self.main(x) * scale), {"list": [self.gate(x)], "note": "not a tensor"}


@ranks(2, transport="shm")
@SOME_STRATEGIES
@pytest.mark.parametrize("used", ["all", "main", "rest"])
def test_tensors_in_containers_of_which_some_are_used(world: World, strategy: str, used: str) -> None:
    def loss(call: Call, batch: Batch) -> Tensor:
        main, others = call(*batch)
        rest = sum(x.square().mean() for several in others["rest"] for x in several)
        return {"all": main.mean() + rest, "main": main.square().mean(), "rest": rest}[used]

    unused = {"all": (), "main": ("blocks.1.gate",), "rest": ("blocks.1.main",)}[used]
    case = training(
        wrap_blocks(strategy=strategy),
        build=lambda: seeded(Containers),
        loss=loss,
        unused_are_zero=lambda name: name.startswith(unused),
    )
    compare(world, case)


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


@ranks(2, transport="shm")
@SOME_STRATEGIES
def test_evaluation_before_the_first_step(world: World, strategy: str) -> None:
    def shard(fsdp: ModuleType, model: Any) -> Any:
        wrapped = wrap_blocks(strategy=strategy)(fsdp, model)
        wrapped.eval()
        with torch.no_grad():
            wrapped(*random_batch(4, 6)(7))
        wrapped.train()
        return wrapped

    compare(world, training(shard))


class Fails(nn.Module):
    """A layer that raises in forward or in backward when it is told to."""

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
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_error_in_a_step_the_next_one_is_right(world: World, original: bool, where: str) -> None:
    # After an error in backward torch thinks for ever that it is in backward, and shows no full parameters any more.
    for fsdp in (WRAPPERS if where == "forward" else OUR_WRAPPER).values():
        gradients, parameters = after_a_step(world, fsdp, original, fails=where)
        wanted, values = after_a_step(world, fsdp, original, fails=None)
        assert list(gradients) == list(wanted)
        for name, gradient in gradients.items():
            assert gradient is not None
            assert torch.equal(gradient, torch.as_tensor(wanted[name])), name
            assert torch.equal(parameters[name], values[name]), name


def after_a_step(world: World, fsdp: ModuleType, original: bool, *, fails: str | None) -> tuple[Any, Any]:
    """Whole gradients and parameters after two steps, between which one may have failed."""
    model: Any = seeded(lambda: MLP((6, 5, 5, 3)))
    failing = model.blocks[1] = seeded(Fails)
    wrapped = wrap_blocks(original=original)(fsdp, model)
    batch = random_batch(4, 6)(world.rank)
    for step in range(3):
        if step == 1 and fails:
            failing.where = fails
            with pytest.raises(ArithmeticError, match="on purpose"):
                mean_square(wrapped, batch).backward()
            failing.where = None
        elif step != 1:
            mean_square(wrapped, batch).backward()
        if step < 2:
            wrapped.zero_grad()
    return whole_gradients(fsdp, wrapped), whole_parameters(fsdp, wrapped)


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
@SOME_STRATEGIES
def test_a_gradient_of_the_inputs(world: World, strategy: str) -> None:
    for fsdp in WRAPPERS.values():
        model, reference = wrap_blocks(strategy=strategy)(fsdp, seeded(MLP)), seeded(MLP)
        (x,) = random_batch(4, 6)(world.rank)
        inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
        mean_square(model, (inputs[0],)).backward()
        mean_square(reference, (inputs[1],)).backward()
        assert inputs[0].grad is not None
        assert inputs[1].grad is not None
        assert torch.allclose(inputs[0].grad, inputs[1].grad, rtol=1e-6, atol=1e-8)


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
