"""Parity over world sizes, meshes, `reshard_after_forward` and the ways to group parameters and to run modules."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness import World, everywhere, ranks
from tests.harness.compare import Batch, Call, ShardFunction, Training, adamw, compare, each_block, mean_square, sgd
from tests.harness.models import MLP, NestedOutputs, Transformer, random_batch, seeded, token_batch
from tests.harness.slow import slow, some


def mlp(shard: ShardFunction, model: Any = MLP, **changes: Any) -> Training:
    return Training(**{"build": lambda: seeded(model), "shard": shard, "batch": random_batch(4, 6), **changes})


def transformer(shard: ShardFunction) -> Training:
    return mlp(shard, Transformer, batch=token_batch(3, 5))


@everywhere
@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("optimizer", [sgd, *slow(adamw)])
def test_mlp_of_odd_sizes(world: World, optimizer: Any) -> None:
    compare(world, mlp(each_block(), optimizer=optimizer))


@ranks(2, 4)
@pytest.mark.parametrize("replicas", [2, 1])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_hybrid(world: World, replicas: int, optimizer: Any) -> None:
    mesh = world.mesh(replicas, world.size // replicas, names=("replicate", "shard"))
    compare(world, mlp(each_block(mesh=mesh), optimizer=optimizer))


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("reshard", [True, False, *slow(None)])
def test_reshard_after_forward(world: World, reshard: bool | None) -> None:
    compare(world, transformer(each_block(reshard_after_forward=reshard)))


@pytest.mark.slow
@ranks(4)
def test_reshard_after_forward_to_a_smaller_group(world: World) -> None:
    compare(world, transformer(each_block(reshard_after_forward=2)))


def groups_inside_groups(fsdp: ModuleType, model: Any) -> None:
    for block in model.blocks:
        for module in (block.attention, block.up, block):
            fsdp.fully_shard(module)
    fsdp.fully_shard(model)


def blocks_alone(fsdp: ModuleType, model: Any) -> None:
    """The rest is left to the user, and nobody reduces its gradient."""
    for block in model.blocks:
        fsdp.fully_shard(block)


class FrozenScale(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.scale.requires_grad_(False)


def resharding_changes(model: Any, micro: int) -> None:
    model.set_reshard_after_forward(micro != 1)
    model.set_reshard_after_backward(micro != 0)


def prefetching(fsdp: ModuleType, model: Any) -> None:
    each_block()(fsdp, model)
    blocks = list(model.blocks)
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
        block.set_modules_to_backward_prefetch(blocks[max(index - 2, 0) : index][::-1])


def gather_by_hand(model: Any, micro: int) -> None:
    for handle in [block.unshard(async_op=True) for block in model.blocks[:2]]:
        handle.wait()
    model.blocks[0].reshard()


def lists(fsdp: ModuleType, model: Any) -> None:
    fsdp.fully_shard(list(model.blocks[:2]))
    fsdp.fully_shard([model.norm, model.head])
    fsdp.fully_shard(model)


class ChunkedLoss(nn.Module):
    """A model whose forward ends before the head, which the loss calls on one chunk after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 5), nn.Linear(5, 7)])
        self.norm, self.head = nn.LayerNorm(7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.norm(x)


def chunked(model: Any, batch: Batch) -> Tensor:
    return torch.stack([model.head(chunk).square().mean() for chunk in model(*batch).chunk(2)]).mean()


def two_forwards(call: Call, batch: Batch) -> Tensor:
    first: Tensor = call(batch[0])
    return (first * call(-2 * batch[0]) + first).square().mean()


def evaluate(model: nn.Module) -> Tensor:
    model.eval()
    with torch.no_grad():
        output: Tensor = model(*random_batch(2, 6)(99))
    model.train()
    return output


def evaluate_and_reshard(model: nn.Module) -> Tensor:
    output = evaluate(model)
    getattr(model, "reshard", lambda: None)()  # the root stays unsharded after a forward without backward
    return output


def infer(model: nn.Module, micro: int) -> None:
    with torch.inference_mode():
        model(*random_batch(2, 6)(99))


class SharedBlock(MLP):
    def forward(self, x: Tensor) -> Tensor:
        for index in [0, 1, 2, 2, 3]:
            x = self.blocks[index](x)
        return x * self.scale


class TwoEntrances(MLP):
    def first_half(self, x: Tensor) -> Tensor:
        for block in self.blocks[:2]:
            x = block(x)
        return x * self.scale.sum()


def with_a_second_entrance(fsdp: ModuleType, model: Any) -> None:
    each_block()(fsdp, model)
    fsdp.register_fsdp_forward_method(model, "first_half")


def of_nested_outputs(call: Call, batch: Batch) -> Tensor:
    output = call(*batch)
    return output.main.square().mean() + sum(other.sin().mean() for other in output.others["all"])


WAYS = {
    "one group": mlp(lambda fsdp, model: fsdp.fully_shard(model)),
    "groups inside groups": transformer(groups_inside_groups),
    "blocks alone": mlp(blocks_alone, FrozenScale),
    "resharding changes": mlp(each_block(), micro_batches=3, set_up_micro=resharding_changes, steps=2),
    "prefetch by hand": mlp(prefetching),
    "gathered by hand": mlp(each_block(), set_up_micro=gather_by_hand),
    "lists": transformer(lists),
    "members of a list that run apart": mlp(lists, ChunkedLoss, loss=chunked),
    "two forwards": mlp(each_block(), loss=two_forwards),
    "evaluation, resharded": mlp(each_block(), after_backward=evaluate_and_reshard),
    "evaluation": mlp(each_block(), after_backward=evaluate),
    "inference": mlp(each_block(), set_up_micro=infer),
    "a block that runs twice": mlp(each_block(), SharedBlock),
    "a block that runs twice, kept": mlp(each_block(reshard_after_forward=False), SharedBlock),
    "another method": mlp(with_a_second_entrance, TwoEntrances, loss=lambda model, b: mean_square(model.first_half, b)),
    "nested outputs": mlp(each_block(), NestedOutputs, loss=of_nested_outputs),
}
#: The random programs of tests/fuzz mix the others.
QUICK = ("gathered by hand", "lists", "members of a list that run apart", "two forwards", "evaluation", "inference",
         "a block that runs twice", "nested outputs")  # fmt: skip
#: torch keeps the root's parameters of before the step after an evaluation, and trips over buffers that it has made in
#: inference mode; and before 2.13 it does not find dataclasses.
BEYOND_TORCH = {"evaluation", "inference"}
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
    BEYOND_TORCH.add("nested outputs")


@ranks(2)
@pytest.mark.parametrize("way", some(WAYS, QUICK))
def test_ways_to_group_and_to_run(world: World, way: str) -> None:
    compare(world, WAYS[way], with_torch=way not in BEYOND_TORCH)
