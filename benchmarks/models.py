"""The models that are trained: a transformer at two sizes, and blocks of many small parameters.

Owns the shapes of the work and nothing of how it is sharded. Weights depend on the seed only, so that every contender
and every rank starts from the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Work:
    """A step of training: the model's sizes, and how many tokens a rank sees in it."""

    name: str
    blocks: int
    width: int
    sequence: int
    vocabulary: int = 2048
    sequences: int = 1

    def build(self) -> Transformer:
        """The model, on the CPU (or on the device of a surrounding ``torch.device``)."""
        torch.manual_seed(0)
        return Transformer(self.blocks, self.width, self.vocabulary)

    def batch(self, rank: int, step: int) -> Tensor:
        """Tokens of one rank in one step, shape (sequences, sequence)."""
        generator = torch.Generator().manual_seed(1000 * step + rank)
        return torch.randint(self.vocabulary, (self.sequences, self.sequence), generator=generator)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's parameters: what one group gathers."""
        return 4 * (12 * self.width**2 + 4 * self.width)

    @property
    def model_bytes(self) -> int:
        return self.blocks * self.block_bytes + 4 * (2 * self.vocabulary * self.width + 2 * self.width)


#: 80 M parameters and 16 tokens a rank: the time goes into moving parameters and gradients.
COMMUNICATION = Work("communication", blocks=6, width=1024, sequence=16)
#: 40 M parameters and 128 tokens a rank: the time goes into matrix products.
COMPUTE = Work("compute", blocks=12, width=512, sequence=128)
#: 21 M parameters and 2,048 tokens a rank: what a small model is really trained with.
REALISTIC = Work("realistic", blocks=6, width=512, sequence=512, sequences=4)
#: Blocks as large as those of the first, and next to nothing outside of them, so that memory can be counted in blocks.
BLOCKS = Work("blocks", blocks=4, width=1024, sequence=16, vocabulary=64)
#: 20 M parameters, which with the state of AdamW are 240 MiB to save.
SAVED = Work("saved", blocks=6, width=512, sequence=16)
#: The same at a size that takes a moment.
TINY = Work("tiny", blocks=2, width=64, sequence=4)


class Block(nn.Module):
    """Attention and an MLP, before each a norm: 8 parameters, 12 width² and 4 width elements."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.relu(self.up(self.mlp_norm(x))))


class Transformer(nn.Module):
    """Embedding, blocks, norm and head; returns the loss of predicting each token from those up to it."""

    def __init__(self, blocks: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


class Small(nn.Module):
    """``count`` parameters of 1,024 elements, each used in one multiplication: nearly all of its cost is sharding."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(1024) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x * weight
        return x


class Chain(nn.Module):
    """Small blocks one after the other, and no parameters outside of them."""

    def __init__(self, blocks: int, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Small(count) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Awkward(nn.Module):
    """One parameter of 3 rows, which no number of ranks above 3 divides."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4096))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight
