"""Small models that between them have what makes sharding hard: odd sizes, ties, scalars, mixed dtypes, odd outputs.

Each is seeded, so that two calls give equal weights on every rank, and has `blocks`, the modules to shard one by one
before the root. Their sizes are chosen to be small and to divide by no world size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import fullshard

Checkpointing = Literal["none", "reentrant", "non-reentrant"]
ModelType = TypeVar("ModelType", bound=nn.Module)


def seeded(build: Callable[[], ModelType], seed: int = 0) -> ModelType:
    """Build a model from a seed, and leave the random state as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()


def shard_each(*modules: Any, **options: Any) -> Any:
    """Give each module a group of its own, with the same options, and return the last one."""
    for module in modules:
        fullshard.fully_shard(module, **options)
    return modules[-1]


def random_batch(*shape: int) -> Callable[[int], tuple[Tensor]]:
    """A function from a seed to a batch of one float tensor of this shape."""
    return lambda seed: (torch.randn(shape, generator=torch.Generator().manual_seed(seed)),)


def token_batch(*shape: int) -> Callable[[int], tuple[Tensor]]:
    """A function from a seed to a batch of token ids for `Transformer`."""
    return lambda seed: (torch.randint(Transformer.VOCABULARY, shape, generator=torch.Generator().manual_seed(seed)),)


class MLP(nn.Module):
    """Linear blocks of odd widths, and one parameter of the root's own."""

    WIDTHS = (6, 7, 5, 5, 3)

    def __init__(self, widths: tuple[int, ...] = WIDTHS) -> None:
        super().__init__()
        linears = itertools.starmap(nn.Linear, itertools.pairwise(widths))
        self.blocks = nn.ModuleList(nn.Sequential(linear, nn.Tanh()) for linear in linears)
        self.scale = nn.Parameter(torch.rand(widths[-1]) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


class Attention(nn.Module):
    """Causal self-attention with separate projections, as tensor parallelism wants them.

    The key has no bias: its gradient is zero in exact arithmetic, so there would be nothing to compare.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        split = (*x.shape[:-1], -1, self.head_width)
        query, key, value = (part(x).view(split).transpose(1, 2) for part in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """A transformer block: attention and a two-layer MLP, each after a norm and with a skip connection."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        x = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return x


class Transformer(nn.Module):
    """A language model: embeddings, blocks, a final norm, and a head that may share the weight of the embedding."""

    VOCABULARY = 13
    LONGEST = 8

    def __init__(
        self,
        layers: int = 2,
        *,
        width: int = 12,
        hidden: int = 18,
        tied: bool = False,
        checkpointing: Checkpointing = "none",
        region: int = 1,
    ) -> None:
        super().__init__()
        self.checkpointing, self.region = checkpointing, region
        self.tokens = nn.Embedding(self.VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(self.LONGEST, width) / 10)
        self.blocks = nn.ModuleList(Block(width, heads=2, hidden=hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, self.VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        for first in range(0, len(self.blocks), self.region):
            x = self._region(self.blocks[first : first + self.region], x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _region(self, blocks: Iterable[nn.Module], x: Tensor) -> Tensor:
        """Run some blocks, whose activations are computed again in backward if the model was told to."""

        def run(x: Tensor) -> Tensor:
            for block in blocks:
                x = block(x)
            return x

        if self.checkpointing == "none":
            return run(x)
        y = checkpoint(run, x, use_reentrant=self.checkpointing == "reentrant")
        assert isinstance(y, Tensor)
        return y


class OddParameters(nn.Module):
    """A scalar, a frozen weight, a non-contiguous one, and one of two dimensions of which one is 1."""

    def __init__(self, *, scalar: bool = True, non_contiguous: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 5), nn.Linear(5, 7)])
        self.gain = nn.Parameter(torch.tensor(1.25) if scalar else torch.tensor([1.25]))
        crossed = torch.randn(7, 3)
        self.crossed = nn.Parameter(crossed.t().contiguous().t() if non_contiguous else crossed)
        self.frozen = nn.Parameter(torch.randn(3, 3), requires_grad=False)
        self.row = nn.Parameter(torch.randn(1, 3))
        self.blocks[0].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gain * self.blocks[1](torch.tanh(self.blocks[0](x)))
        return x @ self.crossed @ self.frozen + self.row


class Branches(nn.Module):
    """Three branches, of which a flag in the batch says which are used; the last is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)) for _ in range(3))
        self.spare = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, used: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        outputs = [block(x) for block, wanted in zip(self.blocks, used.tolist(), strict=False) if wanted]
        return torch.stack(outputs).sum(0)


class MixedDtypes(nn.Module):
    """One group with parameters of three dtypes, as a model with a low-precision part has them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 5), nn.Linear(5, 7, dtype=torch.bfloat16)])
        self.blocks.append(nn.Linear(7, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            assert isinstance(block.weight, Tensor)
            x = torch.tanh(block(x.to(block.weight.dtype)))
        return x.float()


@dataclass
class Output:
    """What a forward may return: a tensor, and tensors deep inside containers."""

    main: Tensor
    others: dict[str, list[Tensor]]
    note: str = "not a tensor"


class NestedOutputs(nn.Module):
    """Blocks that return dataclasses with containers of tensors in them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_NestedBlock(6, 7), _NestedBlock(7, 3)])

    def forward(self, x: Tensor) -> Output:
        first = self.blocks[0](x)
        second = self.blocks[1](first.main)
        return Output(second.main, {"all": [*first.others["two"], *second.others["two"]]})


class _NestedBlock(nn.Module):
    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.main, self.other = nn.Linear(columns, rows), nn.Linear(columns, rows)

    def forward(self, x: Tensor) -> Output:
        return Output(torch.tanh(self.main(x)), {"two": [self.other(x), self.other(-x)]})


def split_over(mesh: Any, model: Any) -> None:
    """Tensor parallelism of the blocks of a transformer over a mesh, with all kinds of splits."""
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "attention.query": ColwiseParallel(),
                "attention.key": ColwiseParallel(),
                "attention.value": ColwiseParallel(),
                "attention.out": RowwiseParallel(),
                "up": ColwiseParallel(),
                "down": RowwiseParallel(),
            },
        )


class WithBuffers(nn.Module):
    """A module with buffers, of which no state dict has ``inner.table``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("saved", torch.zeros(2))
        self.inner.register_buffer("table", torch.zeros(2), persistent=False)
