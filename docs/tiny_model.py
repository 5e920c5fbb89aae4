"""The model, the batches and the loss of the code in the pages, which import them from ``tiny_model``."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A layer that repeats."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """A language model without attention."""

    def __init__(self, vocabulary: int = 50, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch() -> torch.Tensor:
    """This rank's part of a batch: 4 sequences of 8 random tokens."""
    return torch.randint(50, (4, 8))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of predicting each next token."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
