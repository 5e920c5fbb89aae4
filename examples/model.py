"""A byte-level GPT: rotary attention, RMSNorm, SwiGLU, and an embedding that is also the head.

It is an ordinary PyTorch module that knows nothing of ranks or sharding, which is the point: ``train.py`` shards it
from outside. A token is a byte, so there is no tokenizer, and a loss in nats per byte says how well it predicts text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a model; ``hidden`` is the width inside its MLPs."""

    layers: int
    heads: int
    width: int
    hidden: int


MODELS = {
    "small": ModelConfig(layers=4, heads=4, width=256, hidden=704),
    # Wide, with few layers: with the short batches of train.py, the state is larger than the activations.
    "base": ModelConfig(layers=4, heads=12, width=768, hidden=2112),
}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of coordinates by an angle that grows with the position (rotary embedding, Su et al. 2021).

    Args:
        x: queries or keys of shape (batch, heads, time, head width).
        cos: cosines of the angles, shape (time, head width / 2).
        sin: their sines.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention of several heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query_key_value = nn.Linear(config.width, 3 * config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = self.query_key_value(x).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(rotate(query, cos, sin), rotate(key, cos, sin), value, is_causal=True)
        return self.output(x.transpose(1, 2).reshape(batch, time, width))


class MLP(nn.Module):
    """SwiGLU: one projection gates the other (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_and_up = nn.Linear(config.width, 2 * config.hidden, bias=False)
        self.output = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_and_up(x).chunk(2, dim=-1)
        return self.output(F.silu(gate) * up)


class Block(nn.Module):
    """One layer of the model, and the unit in which ``train.py`` shards it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Predicts the next byte at every position.

    The head has no weight of its own: it reads ``embedding.weight`` again. That parameter therefore belongs to the root
    module, which uses it at both ends of its forward.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        for name, parameter in self.named_parameters():
            # Each block adds twice to the residual stream: start small, so that the sum does not grow with the depth.
            if name.endswith("output.weight"):
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map bytes of shape (batch, time), int64, to fp32 logits of shape (batch, time, 256)."""
        cos, sin = self.angles(tokens)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.linear(self.norm(x), self.embedding.weight).float()

    def angles(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines for every position of ``tokens``, each of shape (time, head width / 2), in fp32."""
        half = torch.arange(0, self.head_width, 2, device=tokens.device, dtype=torch.float32)
        positions = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        turns = torch.outer(positions, 10_000.0 ** (-half / self.head_width))
        return turns.cos(), turns.sin()


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats per byte, of predicting each byte of ``tokens`` from those before it."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
