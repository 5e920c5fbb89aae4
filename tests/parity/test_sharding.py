"""Parity over world sizes, meshes, `reshard_after_forward` and the ways to group parameters and to run modules."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness import World, everywhere, ranks
from tests.harness.compare import Batch, Call, Training, adamw, compare, each_block, mean_square, sgd
from tests.harness.models import MLP, NestedOutputs, Transformer, random_batch, seeded, token_batch

OPTIMIZERS = pytest.mark.parametrize("optimizer", [sgd, adamw])


def mlp() -> MLP:
    """The model of most cases here."""
    return seeded(MLP)


@everywhere
@ranks(1, 2, 3, 4)
@OPTIMIZERS
def test_mlp_of_odd_sizes(world: World, optimizer: Any) -> None:
    training = Training(build=mlp, shard=each_block(), batch=random_batch(4, 6), optimizer=optimizer)
    compare(world, training)


@ranks(1, 2, 3, 4)
@OPTIMIZERS
def test_transformer(world: World, optimizer: Any) -> None:
    training = Training(
        build=lambda: seeded(Transformer), shard=each_block(), batch=token_batch(3, 5), optimizer=optimizer
    )
    compare(world, training)


@ranks(2)
def test_one_group_for_all(world: World) -> None:
    training = Training(build=mlp, shard=lambda fsdp, model: fsdp.fully_shard(model), batch=random_batch(4, 6))
    compare(world, training)


@everywhere
@ranks(2)
def test_groups_inside_groups(world: World) -> None:
    def shard(fsdp: ModuleType, model: Any) -> None:
        for block in model.blocks:
            fsdp.fully_shard(block.attention)
            fsdp.fully_shard(block.up)
            fsdp.fully_shard(block)
        fsdp.fully_shard(model)

    compare(world, Training(build=lambda: seeded(Transformer), shard=shard, batch=token_batch(3, 5)))


@ranks(2)
def test_blocks_sharded_and_the_rest_left_to_the_user(world: World) -> None:
    def build() -> nn.Module:
        model = mlp()
        model.scale.requires_grad_(False)  # nobody reduces its gradient
        return model

    def shard(fsdp: ModuleType, model: Any) -> None:
        for block in model.blocks:
            fsdp.fully_shard(block)

    compare(world, Training(build=build, shard=shard, batch=random_batch(4, 6)))


@everywhere
@ranks(2)
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_hybrid_on_two_ranks(world: World, shape: tuple[int, int]) -> None:
    mesh = world.mesh(*shape, names=("replicate", "shard"))
    compare(world, Training(build=mlp, shard=each_block(mesh=mesh), batch=random_batch(4, 6)))


@ranks(4)
@OPTIMIZERS
def test_hybrid_on_four_ranks(world: World, optimizer: Any) -> None:
    mesh = world.mesh(2, 2, names=("replicate", "shard"))
    compare(world, Training(build=mlp, shard=each_block(mesh=mesh), batch=random_batch(4, 6), optimizer=optimizer))


@ranks(2)
@pytest.mark.parametrize("reshard", [None, True, False])
def test_reshard_after_forward(world: World, reshard: bool | None) -> None:
    shard = each_block(reshard_after_forward=reshard)
    compare(world, Training(build=lambda: seeded(Transformer), shard=shard, batch=token_batch(3, 5)))


@everywhere
@ranks(4)
def test_reshard_after_forward_to_a_smaller_group(world: World) -> None:
    shard = each_block(reshard_after_forward=2)
    compare(world, Training(build=lambda: seeded(Transformer), shard=shard, batch=token_batch(3, 5)))


@ranks(2)
def test_resharding_changed_between_micro_batches(world: World) -> None:
    def set_up(model: Any, micro: int) -> None:
        model.set_reshard_after_forward(micro != 1)
        model.set_reshard_after_backward(micro != 0)

    training = Training(
        build=mlp, shard=each_block(), batch=random_batch(4, 6), micro_batches=3, set_up_micro=set_up, steps=2
    )
    compare(world, training)


@ranks(2)
def test_explicit_prefetch(world: World) -> None:
    def shard(fsdp: ModuleType, model: Any) -> None:
        each_block()(fsdp, model)
        blocks = list(model.blocks)
        for index, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
            block.set_modules_to_backward_prefetch(blocks[max(index - 2, 0) : index][::-1])

    compare(world, Training(build=mlp, shard=shard, batch=random_batch(4, 6)))


@ranks(2)
def test_parameters_gathered_by_hand(world: World) -> None:
    def set_up(model: Any, micro: int) -> None:
        handles = [block.unshard(async_op=True) for block in model.blocks[:2]]
        for handle in handles:
            handle.wait()
        model.blocks[0].reshard()

    compare(world, Training(build=mlp, shard=each_block(), batch=random_batch(4, 6), set_up_micro=set_up))


@ranks(2)
def test_list_of_modules_as_one_group(world: World) -> None:
    def shard(fsdp: ModuleType, model: Any) -> None:
        fsdp.fully_shard(list(model.blocks[:2]))
        fsdp.fully_shard([model.norm, model.head])
        fsdp.fully_shard(model)

    compare(world, Training(build=lambda: seeded(Transformer), shard=shard, batch=token_batch(3, 5)))


class ChunkedLoss(nn.Module):
    """A model whose forward ends before the head, which the loss calls on one chunk after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 5), nn.Linear(5, 7)])
        self.norm, self.head = nn.LayerNorm(7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        normed: Tensor = self.norm(x)
        return normed


def chunked(model: Any, batch: Batch) -> Tensor:
    """The loss over the chunks of a batch."""
    losses: list[Tensor] = [model.head(chunk).square().mean() for chunk in model(*batch).chunk(3)]
    return torch.stack(losses).mean()


@ranks(2)
def test_members_of_a_list_run_apart(world: World) -> None:
    def shard(fsdp: ModuleType, model: Any) -> None:
        for block in model.blocks:
            fsdp.fully_shard(block)
        fsdp.fully_shard([model.norm, model.head])
        fsdp.fully_shard(model)

    training = Training(build=lambda: seeded(ChunkedLoss), shard=shard, batch=random_batch(6, 6), loss=chunked)
    compare(world, training)


@everywhere
@ranks(2)
def test_two_forwards_before_a_backward(world: World) -> None:
    def loss(call: Call, batch: Batch) -> Tensor:
        first: Tensor = call(batch[0])
        second: Tensor = call(-2 * batch[0])
        return (first * second + first).square().mean()

    compare(world, Training(build=mlp, shard=each_block(), batch=random_batch(4, 6), loss=loss))


def evaluate(model: nn.Module) -> Tensor:
    """The output of a model for a batch that is not trained on."""
    model.eval()
    with torch.no_grad():
        output: Tensor = model(*random_batch(2, 6)(99))
    model.train()
    return output


@ranks(2)
def test_evaluation_between_backward_and_step(world: World) -> None:
    def evaluate_and_reshard(model: nn.Module) -> Tensor:
        output = evaluate(model)
        reshard = getattr(model, "reshard", lambda: None)
        reshard()  # the root stays unsharded after a forward without backward
        return output

    training = Training(build=mlp, shard=each_block(), batch=random_batch(4, 6), after_backward=evaluate_and_reshard)
    compare(world, training)


@ranks(2)
def test_a_step_after_evaluation_is_seen_by_the_next_forward(world: World) -> None:
    # torch keeps the root's parameters of before the step, because nobody has resharded them.
    training = Training(build=mlp, shard=each_block(), batch=random_batch(4, 6), after_backward=evaluate)
    compare(world, training, with_torch=False)


@ranks(2)
def test_inference_mode_before_training(world: World) -> None:
    def set_up(model: nn.Module, micro: int) -> None:
        with torch.inference_mode():
            model(*random_batch(2, 6)(99))

    training = Training(build=mlp, shard=each_block(), batch=random_batch(4, 6), set_up_micro=set_up)
    compare(world, training, with_torch=False)  # torch makes its buffers in inference mode, and trips over them later


class SharedBlock(MLP):
    """An MLP that runs one of its blocks twice."""

    def forward(self, x: Tensor) -> Tensor:
        for index in [0, 1, 2, 2, 3]:
            x = self.blocks[index](x)
        return x * self.scale


@everywhere
@ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_a_block_that_runs_twice(world: World, reshard: bool) -> None:
    shard = each_block(reshard_after_forward=reshard)
    compare(world, Training(build=lambda: seeded(SharedBlock), shard=shard, batch=random_batch(4, 6)))


class TwoEntrances(MLP):
    """A model with a second method that is used like forward."""

    def first_half(self, x: Tensor) -> Tensor:
        for block in self.blocks[:2]:
            x = block(x)
        return x * self.scale.sum()


@ranks(2)
def test_registered_forward_method(world: World) -> None:
    def shard(fsdp: ModuleType, model: Any) -> None:
        each_block()(fsdp, model)
        fsdp.register_fsdp_forward_method(model, "first_half")

    def loss(model: Any, batch: Batch) -> Tensor:
        return mean_square(model.first_half, batch)

    compare(world, Training(build=lambda: seeded(TwoEntrances), shard=shard, batch=random_batch(4, 6), loss=loss))


@ranks(2)
def test_outputs_inside_dataclasses_and_containers(world: World) -> None:
    def loss(call: Call, batch: Batch) -> Tensor:
        output = call(*batch)
        means = [output.main.square().mean(), *(other.sin().mean() for other in output.others["all"])]
        return torch.stack(means).sum()

    build = partial(seeded, NestedOutputs)
    finds_dataclasses = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)  # torch's own
    training = Training(build=build, shard=each_block(), batch=random_batch(4, 6), loss=loss)
    compare(world, training, with_torch=finds_dataclasses)
