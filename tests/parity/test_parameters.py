"""Parity over kinds of parameters: tied, frozen, unused, scalar, uneven, sharded on other dims, of several dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from tests.harness import World, everywhere, ranks
from tests.harness.compare import Batch, Precision, ShardFunction, Training, adamw, compare, each_block, sgd
from tests.harness.models import (
    MLP,
    Branches,
    MixedDtypes,
    OddParameters,
    Transformer,
    random_batch,
    seeded,
    token_batch,
)

OPTIMIZERS = pytest.mark.parametrize("optimizer", [sgd, adamw])


def tied(shard: ShardFunction, **changes: Any) -> Training:
    """Training of a transformer whose head has the weight of its embedding.

    Only for two steps: in a third, the order of a sum over three ranks alone moves gradients by 1.1e-6.
    """
    model = partial(Transformer, tied=True)
    return Training(build=lambda: seeded(model), shard=shard, batch=token_batch(3, 5), steps=2, **changes)


@ranks(1, 2, 3)
@OPTIMIZERS
def test_embedding_and_head_tied_within_a_group(world: World, optimizer: Any) -> None:
    compare(world, tied(each_block(), optimizer=optimizer))


def shard_embedding_and_head_apart(fsdp: ModuleType, model: Any, **options: Any) -> None:
    """The embedding and the head each get a group, as do the blocks."""
    fsdp.fully_shard(model.tokens, **options)
    for block in model.blocks:
        fsdp.fully_shard(block, **options)
    fsdp.fully_shard([model.norm, model.head], **options)
    fsdp.fully_shard(model, **options)


@ranks(1, 2, 3)
@OPTIMIZERS
def test_embedding_and_head_tied_across_groups(world: World, optimizer: Any) -> None:
    training = tied(shard_embedding_and_head_apart, optimizer=optimizer)
    compare(world, training, with_torch=False)  # torch refuses a tie between groups


class TiedToTheRoot(nn.Module):
    """The root computes with the weight of a block, before the block does."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.again = nn.Linear(6, 5), nn.Linear(5, 5)
        self.blocks = nn.ModuleList([nn.Linear(5, 5)])
        self.again.weight = self.blocks[0].weight

    def forward(self, x: Tensor) -> Any:
        return self.blocks[0](torch.tanh(self.again(torch.tanh(self.stem(x)))))


@ranks(2)
def test_a_block_tied_to_a_root_that_is_still_in_its_backward(world: World) -> None:
    compare(world, Training(build=lambda: seeded(TiedToTheRoot), shard=each_block(), batch=random_batch(4, 6)))


@ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_tied_across_groups_in_bf16(world: World, reshard: bool) -> None:
    precision = Precision(torch.bfloat16, torch.float32)

    def shard(fsdp: ModuleType, model: Any) -> None:
        options = {"mp_policy": precision.policy(fsdp), "reshard_after_forward": reshard}
        shard_embedding_and_head_apart(fsdp, model, **options)

    compare(world, tied(shard, precision=precision), with_torch=False)


@everywhere
@ranks(2)
def test_tied_across_groups_over_micro_batches(world: World) -> None:
    def set_up(model: Any, micro: int) -> None:
        model.set_requires_gradient_sync(micro == 1)

    training = tied(shard_embedding_and_head_apart, micro_batches=2, set_up_micro=set_up)
    compare(world, training, with_torch=False)


def tied_blocks() -> MLP:
    """An MLP of which two blocks have the same weight and separate biases."""
    model: Any = seeded(lambda: MLP((5, 5, 5, 3)))
    model.blocks[1][0].weight = model.blocks[0][0].weight
    assert isinstance(model, MLP)
    return model


@ranks(2, 3)
def test_two_blocks_with_one_weight(world: World) -> None:
    training = Training(build=tied_blocks, shard=each_block(), batch=random_batch(4, 5))
    compare(world, training, with_torch=False)


@ranks(1, 2, 3)
@OPTIMIZERS
def test_scalar_non_contiguous_and_frozen_parameters(world: World, optimizer: Any) -> None:
    training = Training(
        build=lambda: seeded(OddParameters), shard=each_block(), batch=random_batch(4, 6), optimizer=optimizer
    )
    compare(world, training, with_torch=False)


@everywhere
@ranks(2, 3)
def test_frozen_parameters_among_trained_ones(world: World) -> None:
    def build() -> nn.Module:
        return seeded(lambda: OddParameters(scalar=False, non_contiguous=False))

    compare(world, Training(build=build, shard=each_block(), batch=random_batch(4, 6)))


@ranks(2)
@pytest.mark.parametrize("frozen", [[0], [1], [3], [0, 1], [1, 2, 3]])
def test_frozen_blocks(world: World, frozen: list[int]) -> None:
    def build() -> nn.Module:
        model = seeded(MLP)
        for index in frozen:
            model.blocks[index].requires_grad_(False)
        return model

    compare(world, Training(build=build, shard=each_block(), batch=random_batch(4, 6)))


class Adapted(nn.Module):
    """A frozen linear layer with a small trained addition, as low-rank adapters have it."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.base = nn.Linear(columns, rows).requires_grad_(False)
        self.down, self.up = nn.Linear(columns, 2, bias=False), nn.Linear(2, rows, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.base(x) + self.up(self.down(x)))
        return y


@ranks(2, 3)
def test_adapters_on_a_frozen_model(world: World) -> None:
    def build() -> nn.Module:
        model = seeded(MLP)
        model.requires_grad_(False)
        model.blocks[1], model.blocks[2] = seeded(lambda: Adapted(7, 5)), seeded(lambda: Adapted(5, 5))
        return model

    compare(world, Training(build=build, shard=each_block(), batch=random_batch(4, 6)))


@ranks(2)
def test_a_block_frozen_and_thawed_between_steps(world: World) -> None:
    def toggle(model: Any) -> None:
        model.blocks[1].requires_grad_(not model.blocks[1][0].weight.requires_grad)

    training = Training(
        build=lambda: seeded(MLP), shard=each_block(), batch=random_batch(4, 6), after_backward=toggle, steps=4
    )
    compare(world, training)


@ranks(1, 2, 3)
@pytest.mark.parametrize("groups", ["each block", "one"])
@OPTIMIZERS
def test_unused_parameters(world: World, groups: str, optimizer: Any) -> None:
    def shard(fsdp: ModuleType, model: Any) -> None:
        if groups == "each block":
            for block in model.blocks:
                fsdp.fully_shard(block)
        fsdp.fully_shard(model)

    def batch(seed: int) -> Batch:
        step = seed // world.size  # all ranks use the same branches, and others in the next step
        return (*random_batch(4, 6)(seed), torch.tensor([1, 0, 1]).roll(step))

    training = Training(build=lambda: seeded(Branches), shard=shard, batch=batch, optimizer=optimizer, steps=4)
    compare(world, training)


@ranks(2, 3)
@OPTIMIZERS
def test_parameters_used_on_some_ranks_only(world: World, optimizer: Any) -> None:
    def shard(fsdp: ModuleType, model: Any) -> None:
        fsdp.fully_shard(model)
        model.set_reduce_scatter_unused_params(True)

    def batch(seed: int) -> Batch:
        return (*random_batch(4, 6)(seed), torch.tensor([1, 0, 0]).roll(seed))

    training = Training(
        build=lambda: seeded(Branches), shard=shard, batch=batch, optimizer=optimizer, unused_are_zero=True
    )
    compare(world, training)


@ranks(2, 3, 4)
@pytest.mark.parametrize("rows", [1, 3, 5, 7])
def test_rows_that_do_not_divide(world: World, rows: int) -> None:
    training = Training(build=lambda: seeded(lambda: MLP((6, rows, 5))), shard=each_block(), batch=random_batch(4, 6))
    compare(world, training)


def widest_dim(parameter: nn.Parameter) -> Shard | None:
    """Shard a matrix on its second dim; leave the default to vectors."""
    return Shard(1) if parameter.ndim > 1 else None


@everywhere
@ranks(2)
@OPTIMIZERS
def test_even_shards_of_columns(world: World, optimizer: Any) -> None:
    training = Training(
        build=lambda: seeded(lambda: MLP((6, 4, 8, 3))),
        shard=each_block(shard_placement_fn=widest_dim),
        batch=random_batch(4, 6),
        optimizer=optimizer,
    )
    compare(world, training)


@ranks(2, 3, 4)
@pytest.mark.parametrize("width", [3, 5, 7])
def test_uneven_shards_of_columns(world: World, width: int) -> None:
    training = Training(
        build=lambda: seeded(lambda: MLP((6, width, 5))),
        shard=each_block(shard_placement_fn=widest_dim),
        batch=random_batch(4, 6),
    )
    compare(world, training, with_torch=False)


class Convolutions(nn.Module):
    """Two convolutions, whose weights have four dims to shard on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Conv2d(2, 4, 3), nn.Conv2d(4, 6, (4, 3))])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = F.gelu(block(x))
        return x


@ranks(2, 3)
@pytest.mark.parametrize("dim", [1, 2, 3, -1])
def test_shards_of_any_dim_of_a_convolution(world: World, dim: int) -> None:
    def placement(parameter: nn.Parameter) -> Shard | None:
        return Shard(dim) if parameter.ndim > 1 else None

    training = Training(
        build=lambda: seeded(Convolutions),
        shard=each_block(shard_placement_fn=placement),
        batch=random_batch(2, 2, 7, 7),
    )
    compare(world, training, with_torch=False)


@ranks(1, 2)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_several_dtypes_in_one_group(world: World, reduce_dtype: torch.dtype | None) -> None:
    # Not on more ranks: the order of their sum alone may round a bf16 parameter to its other neighbour.
    precision = Precision(reduce_dtype=reduce_dtype)
    training = Training(
        build=lambda: seeded(MixedDtypes),
        shard=lambda fsdp, model: fsdp.fully_shard(model, mp_policy=precision.policy(fsdp)),
        batch=random_batch(4, 6),
        precision=precision,
    )
    compare(world, training, with_torch=False)


@ranks(2)
def test_a_group_for_each_dtype(world: World) -> None:
    compare(world, Training(build=lambda: seeded(MixedDtypes), shard=each_block(), batch=random_batch(4, 6)))


def exact_sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with powers of two, whose products are exact in bf16 too.

    torch adds `alpha * x` to bf16 elements in vectors, without rounding the product. It rounds the product of the
    elements at the end of a tensor that fill no vector, and the last elements of a shard are not those of the whole.
    """
    return torch.optim.SGD(parameters, lr=0.125, momentum=0.5)


@everywhere
@ranks(2)
def test_several_dtypes_computed_in_one(world: World) -> None:
    precision = Precision(torch.bfloat16, torch.float32)
    training = Training(
        build=lambda: seeded(MixedDtypes),
        shard=lambda fsdp, model: fsdp.fully_shard(model, mp_policy=precision.policy(fsdp)),
        batch=random_batch(4, 6),
        optimizer=exact_sgd,
        precision=precision,
    )
    compare(world, training, with_torch=False)


@ranks(2)
def test_ignored_parameters_are_left_to_the_user(world: World) -> None:
    def shard(fsdp: ModuleType, model: Any) -> None:
        each_block(ignored_params={model.scale, model.blocks[1][0].weight})(fsdp, model)

    def reduce_by_hand(model: Any) -> None:
        for parameter in (model.scale, model.blocks[1][0].weight):
            assert not isinstance(parameter, DTensor)
            if isinstance(model.blocks[0][0].bias, DTensor):
                dist.all_reduce(parameter.grad)
                parameter.grad /= world.size

    training = Training(build=lambda: seeded(MLP), shard=shard, batch=random_batch(4, 6), after_backward=reduce_by_hand)
    compare(world, training)
