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

from tests.harness import World, ranks
from tests.harness.compare import Batch, Precision, ShardFunction, Training, adamw, compare, each_block
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
from tests.harness.slow import some

LOW = Precision(torch.bfloat16, torch.float32)


def training(model: Any, shard: ShardFunction | None = None, **changes: Any) -> Training:
    defaults = {"build": lambda: seeded(model), "shard": shard or each_block(), "batch": random_batch(4, 6)}
    return Training(**{**defaults, **changes})


def tied(shard: ShardFunction, **changes: Any) -> Training:
    """Training of a transformer whose head has the weight of its embedding.

    Only for two steps: in a third, the order of a sum over three ranks alone moves gradients by 1.1e-6.
    """
    return training(partial(Transformer, tied=True), shard, batch=token_batch(3, 5), steps=2, **changes)


def embedding_and_head_apart(fsdp: ModuleType, model: Any, **options: Any) -> None:
    for module in (model.tokens, *model.blocks, [model.norm, model.head], model):
        fsdp.fully_shard(module, **options)


def apart_in_bf16(fsdp: ModuleType, model: Any, reshard: bool = True) -> None:
    embedding_and_head_apart(fsdp, model, mp_policy=LOW.policy(fsdp), reshard_after_forward=reshard)


class TiedToTheRoot(nn.Module):
    """The root computes with the weight of a block, before the block does."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.again = nn.Linear(6, 5), nn.Linear(5, 5)
        self.blocks = nn.ModuleList([nn.Linear(5, 5)])
        self.again.weight = self.blocks[0].weight

    def forward(self, x: Tensor) -> Any:
        return self.blocks[0](torch.tanh(self.again(torch.tanh(self.stem(x)))))


def tied_blocks() -> MLP:
    model: Any = MLP((5, 5, 5, 3))
    model.blocks[1][0].weight = model.blocks[0][0].weight
    return model


def frozen(*indices: int) -> MLP:
    model = MLP()
    for index in indices:
        model.blocks[index].requires_grad_(False)
    return model


class Adapted(nn.Module):
    """A frozen linear layer with a small trained addition, as low-rank adapters have it."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.base = nn.Linear(columns, rows).requires_grad_(False)
        self.down, self.up = nn.Linear(columns, 2, bias=False), nn.Linear(2, rows, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def adapters() -> MLP:
    model = MLP().requires_grad_(False)
    model.blocks[1], model.blocks[2] = Adapted(7, 5), Adapted(5, 5)
    return model


def freeze_or_thaw(model: Any) -> None:
    model.blocks[1].requires_grad_(not model.blocks[1][0].weight.requires_grad)


def with_zeros(fsdp: ModuleType, model: Any) -> None:
    fsdp.fully_shard(model)
    model.set_reduce_scatter_unused_params(True)


def branches(used: list[int], steps: int = 1) -> Any:
    """Batches of `Branches`: others are used in the next step, or (with `steps=0`) on the next rank."""

    def batch(seed: int) -> Batch:
        return (*random_batch(4, 6)(seed), torch.tensor(used).roll(seed // 2 if steps else seed))

    return batch


def columns(parameter: nn.Parameter, dim: int = 1) -> Shard | None:
    return Shard(dim) if parameter.ndim > 1 else None


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Conv2d(2, 4, 3), nn.Conv2d(4, 6, (4, 3))])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = F.gelu(block(x))
        return x


def convolutions(dim: int) -> Training:
    shard = each_block(shard_placement_fn=partial(columns, dim=dim))
    return training(Convolutions, shard, batch=random_batch(2, 2, 7, 7))


def exact_sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with powers of two, whose products are exact in bf16 too.

    torch adds `alpha * x` to bf16 elements in vectors, without rounding the product. It rounds the product of the
    elements at the end of a tensor that fill no vector, and the last elements of a shard are not those of the whole.
    """
    return torch.optim.SGD(parameters, lr=0.125, momentum=0.5)


def in_one_group(precision: Precision, **changes: Any) -> Training:
    def shard(fsdp: ModuleType, model: Any) -> None:
        fsdp.fully_shard(model, mp_policy=precision.policy(fsdp))

    return training(MixedDtypes, shard, precision=precision, **changes)


def ignoring(fsdp: ModuleType, model: Any) -> None:
    each_block(ignored_params={model.scale, model.blocks[1][0].weight})(fsdp, model)


def reduce_what_is_ignored(model: Any) -> None:
    for parameter in (model.scale, model.blocks[1][0].weight):
        assert not isinstance(parameter, DTensor)
        if isinstance(model.blocks[0][0].bias, DTensor):
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


plain_frozen = partial(OddParameters, scalar=False, non_contiguous=False)
by_columns = each_block(shard_placement_fn=columns)
CASES = {
    "tied apart, in bf16": tied(apart_in_bf16, precision=LOW),
    "tied apart, in bf16, kept": tied(partial(apart_in_bf16, reshard=False), precision=LOW),
    "tied apart, micro-batches": tied(
        embedding_and_head_apart,
        micro_batches=2,
        set_up_micro=lambda model, micro: model.set_requires_gradient_sync(micro == 1),
    ),
    "tied to a root still in its backward": training(TiedToTheRoot),
    "two blocks with one weight": training(tied_blocks, batch=random_batch(4, 5)),
    "frozen among trained": training(plain_frozen),
    **{f"frozen {some}": training(partial(frozen, *some)) for some in ([0], [1], [3], [0, 1], [1, 2, 3])},
    "frozen and thawed": training(MLP, after_backward=freeze_or_thaw, steps=4),
    "unused": training(Branches, batch=branches([1, 0, 1]), optimizer=adamw, steps=4),
    "unused, one group": training(
        Branches, lambda fsdp, model: fsdp.fully_shard(model), batch=branches([1, 0, 1]), steps=4
    ),
    "dtypes in one group": in_one_group(Precision()),
    "dtypes in one group, reduced in fp32": in_one_group(Precision(reduce_dtype=torch.float32)),
    "dtypes computed in one": in_one_group(LOW, optimizer=exact_sgd),
    "a group for each dtype": training(MixedDtypes),
    "ignored": training(MLP, ignoring, after_backward=reduce_what_is_ignored),
}
#: On three ranks too, with shards of other sizes. (Sums of bf16 over three may be rounded in another order.)
UNEVEN = {
    "tied": tied(each_block()),
    "tied apart": tied(embedding_and_head_apart, optimizer=adamw),
    "scalar and in columns": training(OddParameters),
    "adapters": training(adapters),
    "used on some ranks": training(Branches, with_zeros, batch=branches([1, 0, 0], steps=0), unused_are_zero=True),
    **{f"{rows} rows": training(partial(MLP, (6, rows, 5))) for rows in (1, 3, 5, 7)},
    "columns": training(partial(MLP, (6, 4, 8, 3)), by_columns),
    **{f"{width} columns": training(partial(MLP, (6, width, 5)), by_columns) for width in (3, 5, 7)},
    **{f"convolution, dim {dim}": convolutions(dim) for dim in (1, 2, 3, -1)},
}
#: Of those that differ in a number, some.
QUICK = ("tied apart, in bf16", "tied apart, micro-batches", "tied to a root still in its backward", "unused",
         "ignored", "two blocks with one weight", "frozen among trained", "frozen [1, 2, 3]", "frozen and thawed",
         "dtypes in one group", "dtypes computed in one", "tied", "tied apart", "scalar and in columns", "adapters",
         "used on some ranks", "1 rows", "7 rows", "columns", "7 columns", "convolution, dim 1")  # fmt: skip
#: Which torch refuses, or has another result of.
BEYOND_TORCH = ("tied apart", "two blocks", "scalar", "dtypes", "3 col", "5 col", "7 col", "convolution")


@ranks(2)
@pytest.mark.parametrize("case", some(CASES, QUICK))
def test_parameters(world: World, case: str) -> None:
    compare(world, CASES[case], with_torch=not case.startswith(BEYOND_TORCH))


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("case", some(UNEVEN, QUICK))
def test_parameters_that_do_not_divide(world: World, case: str) -> None:
    even = case == "columns" and world.size == 2
    compare(world, UNEVEN[case], with_torch=even or not case.startswith((*BEYOND_TORCH, "columns")))
