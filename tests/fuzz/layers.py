"""What cells have inside: modules that keep the shape `[batch, time, width]`, each hard to shard in its own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 11


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Recurrent(nn.Module):
    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        kinds: dict[str, Callable[[], nn.Module]] = {
            "lstm": lambda: nn.LSTM(width, width, batch_first=True),
            "deep lstm": lambda: nn.LSTM(width, width // 2, 2, batch_first=True, bidirectional=True),
            "projected lstm": lambda: nn.LSTM(width, width + 1, proj_size=width, batch_first=True),
            "gru": lambda: nn.GRU(width, width, batch_first=True),
            "rnn": lambda: nn.RNN(width, width, batch_first=True, bias=False),
        }
        self.layer = kinds[kind]()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class RecurrentCells(nn.Module):
    """A cell that is called once for each moment."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(width, width)

    def forward(self, x: Tensor) -> Tensor:
        state = x[:, 0]
        states = []
        for moment in x.unbind(1):
            state = self.cell(moment, state)
            states.append(state)
        return torch.stack(states, 1)


class Attention(nn.Module):
    """Attention; `kind` is `mha` (torch's module), `sdpa` (torch's function) or `written` (by hand)."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "mha":
            self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        else:
            self.qkv = nn.Linear(width, 3 * width, bias=False)
            self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "mha":
            return self.attention(x, x, x)[0]
        query, key, value = self.qkv(x).chunk(3, -1)
        if self.kind == "sdpa":
            y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            y = (query @ key.transpose(1, 2) / query.shape[-1] ** 0.5).softmax(-1) @ value
        y = self.out(y)
        return y


class Convolution(nn.Module):
    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "conv1d":
            self.convolution: nn.Module = nn.Conv1d(width, width, 3, padding=1, groups=2)
        elif kind == "transposed":
            self.convolution = nn.ConvTranspose1d(width, width, 3, padding=1)
        else:
            self.convolution = nn.Conv2d(1, 3, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.join = nn.Conv2d(3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind != "conv2d":
            return self.convolution(x.transpose(1, 2)).transpose(1, 2)
        y = self.join(self.convolution(x.unsqueeze(1))).squeeze(1)
        return y


class Norm(nn.Module):
    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        kinds: dict[str, Callable[[], nn.Module]] = {
            "layer norm": lambda: nn.LayerNorm(width),
            "rms norm": lambda: nn.RMSNorm(width, eps=1e-3),
            "group norm": lambda: nn.GroupNorm(2, width),
            "batch norm": lambda: nn.BatchNorm1d(width),
            "instance norm": lambda: nn.InstanceNorm1d(width, affine=True, track_running_stats=True),
        }
        self.over_time = kind in ("group norm", "batch norm", "instance norm")
        self.norm = kinds[kind]()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2) if self.over_time else self.norm(x)


class Odd(nn.Module):
    """Scalars, a parameter of one row, one that is not contiguous, one of size 0, one that is frozen."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.25))
        self.row = nn.Parameter(torch.randn(1, width))
        self.crossed = nn.Parameter(torch.randn(width, width).t().contiguous().t() / 2)
        self.frozen = nn.Parameter(torch.randn(width), requires_grad=False)
        self.cube = nn.Parameter(torch.randn(2, 3, width) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * (x @ self.crossed.mT) + self.row * self.frozen + self.cube.sum((0, 1))


class Listed(nn.Module):
    """Parameters in a list and in a dict, of which one stands in both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.listed = nn.ParameterList([torch.randn(width, width) / 2 for _ in range(2)])
        self.named = nn.ParameterDict({"first": self.listed[0], "bias": nn.Parameter(torch.randn(width))})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.listed:
            x = torch.tanh(x @ weight)
        return x @ self.named["first"] + self.named["bias"]


class Adapter(nn.Module):
    """A frozen linear layer with a small trained addition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 1, bias=False), nn.Linear(1, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Counted(nn.Module):
    """Buffers of several kinds that each forward changes, one of them outside of state dicts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.mean: Tensor
        self.count: Tensor
        self.last: Tensor
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("last", torch.zeros(width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) + self.mean.to(x.dtype)
        with torch.no_grad():
            self.last = y.detach().mean((0, 1)).to(self.mean.dtype)
            self.mean.lerp_(self.last, 0.1)
            self.count += 1
        return y


class Halves(nn.Module):
    """One half of the parameters is used without gradients."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.teacher, self.student = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            aim = self.teacher(x)
        return self.student(x) * torch.sigmoid(aim)


class TwoDtypes(nn.Module):
    """Parameters of another floating dtype beside those of the model's, and integers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.randn(width, 3, dtype=torch.float32) / 2)
        self.wide = nn.Parameter(torch.randn(3, width, dtype=torch.float64) / 2)
        self.places = nn.Parameter(torch.randperm(width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(self.narrow.dtype) @ self.narrow
        return (y.to(self.wide.dtype) @ self.wide).to(x.dtype)[..., self.places]


class TwoPrecisions(nn.Module):
    """Parameters in fp32 and in fp64 in turns, one of them a scalar."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(width, 3, dtype=torch.float32) / 2)
        self.second = nn.Parameter(torch.randn(3, 5, dtype=torch.float64) / 2)
        self.factor = nn.Parameter(torch.tensor(0.8, dtype=torch.float32))
        self.third = nn.Parameter(torch.randn(5, width, dtype=torch.float32) / 2)

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(self.first.dtype) @ self.first * self.factor
        z: Tensor = (y.to(self.second.dtype) @ self.second).to(self.third.dtype) @ self.third
        return z.to(x.dtype)


class Complex(nn.Module):
    """Complex parameters, one of them a scalar."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(width, width, dtype=torch.complex128) / 2)
        self.phase = nn.Parameter(torch.tensor(0.6 + 0.8j, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        y = (x.to(self.turn.dtype) @ self.turn) * self.phase
        return (y.real + y.imag).to(x.dtype)


class _Power(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")  # else the backward mixes dtypes under autocast
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.mT, x.flatten(0, 1).mT @ grad.flatten(0, 1)


class Written(nn.Module):
    """A backward written by hand, which reads the weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return _Power.apply(x, self.weight)  # type: ignore[no-untyped-call]


class Bag(nn.Module):
    """An embedding with a padding row and one that is used by a function."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, width, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x.detach()[..., 0].abs() * 5).long() % VOCABULARY
        return x * self.table(ids)
