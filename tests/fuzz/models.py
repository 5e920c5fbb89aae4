"""Random models, told as data: a model is a stack of cells, each of which keeps the shape `[batch, time, width]`.

Because all cells agree on that shape, any cell can follow any other, stand inside another, be left out, be run twice
or be recomputed. What makes each of them hard to shard is what is inside: recurrent layers that keep lists of their
weights, convolutions that are not contiguous, scalars, ties, frozen parts, outputs in containers.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.harness.faults import FailingBackward, Fault

VOCABULARY = 11
LENGTH = 3
CHECKPOINTS = ("outside reentrant", "outside non-reentrant", "inside reentrant", "inside non-reentrant")
PACKS = ("tensor", "tuple", "list", "dict", "dataclass", "namedtuple", "plain", "weight")


@dataclass(frozen=True)
class Layer:
    """One cell of a model.

    `pack` is what it returns its tensors in; `plain` is an object that nobody can look into. `repeat` is how often it
    runs in a row, `branch` the bit of the batch without which it does not run. `same` is the number of an earlier cell
    of which this one is another use, `tie` that of one whose first weight it has. `inner` are the cells of a nest.
    """

    kind: str
    pack: str = "tensor"
    frozen: bool = False
    checkpoint: str = ""
    repeat: int = 1
    branch: int | None = None
    same: int | None = None
    tie: int | None = None
    inner: tuple[Layer, ...] = ()


@dataclass(frozen=True)
class ModelSpec:
    """A model; `head` is `plain`, or `tied` to the embedding, or `none`."""

    seed: int
    width: int
    layers: tuple[Layer, ...]
    dtype: str = "float64"
    embedding: bool = False
    head: str = "none"
    pack: str = "tensor"
    scale: bool = False
    spare: bool = False
    buffers: bool = False


@dataclass(frozen=True)
class Control:
    """What a forward is told beside tensors: where it is to raise, if anywhere."""

    fault: str = ""
    cell: int = 0


NO_FAULT = Control()


@dataclass
class Carried:
    """Tensors in a dataclass."""

    main: Tensor
    aux: Tensor
    note: str = "not a tensor"


Named = namedtuple("Named", ["main", "aux"])


class Plain:
    """Tensors in an object that no library can look into."""

    def __init__(self, main: Tensor, aux: Tensor) -> None:
        self.main, self.aux = main, aux


def pack(kind: str, main: Tensor, aux: Tensor) -> Any:
    """Two tensors in a container."""
    containers: dict[str, Callable[[], Any]] = {
        "tensor": lambda: main,
        "tuple": lambda: (main, aux),
        "list": lambda: [main, aux],
        "dict": lambda: {"main": main, "inner": {"aux": [aux]}},
        "dataclass": lambda: Carried(main, aux),
        "namedtuple": lambda: Named(main, aux),
        "plain": lambda: Plain(main, aux),
        "weight": lambda: (main, aux),
    }
    return containers[kind]()


def unpack(output: Any) -> list[Tensor]:
    """The tensors of a container."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        return [output["main"], *output["inner"]["aux"]]
    if isinstance(output, (tuple, list)):
        return list(output)
    return [output.main, output.aux]


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


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
        y: Tensor = self.layer(x)[0]
        return y


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
            y: Tensor = self.attention(x, x, x)[0]
            return y
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
            y: Tensor = self.convolution(x.transpose(1, 2)).transpose(1, 2)
            return y
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
        y: Tensor = self.norm(x.transpose(1, 2)).transpose(1, 2) if self.over_time else self.norm(x)
        return y


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
        y: Tensor = x @ self.named["first"] + self.named["bias"]
        return y


class Adapter(nn.Module):
    """A frozen linear layer with a small trained addition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 1, bias=False), nn.Linear(1, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x))
        return y


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
        y: Tensor = self.student(x) * torch.sigmoid(aim)
        return y


class TwoDtypes(nn.Module):
    """Parameters of another floating dtype beside those of the model's, and integers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.randn(width, 3, dtype=torch.float32) / 2)
        self.wide = nn.Parameter(torch.randn(3, width, dtype=torch.float64) / 2)
        self.places = nn.Parameter(torch.randperm(width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(self.narrow.dtype) @ self.narrow
        z: Tensor = (y.to(self.wide.dtype) @ self.wide).to(x.dtype)[..., self.places]
        return z


class _Power(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.mT, x.flatten(0, 1).mT @ grad.flatten(0, 1)


class Written(nn.Module):
    """A backward written by hand, which reads the weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Power.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return y


class Bag(nn.Module):
    """An embedding with a padding row and one that is used by a function."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, width, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x.detach()[..., 0].abs() * 5).long() % VOCABULARY
        return x * self.table(ids)


class Nest(nn.Module):
    """Cells inside a cell."""

    def __init__(self, layers: tuple[Layer, ...], width: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(Cell(layer, width) for layer in layers)

    def forward(self, x: Tensor) -> Tensor:
        for cell in self.cells:
            for tensor in unpack(cell(x)):
                x = x + tensor / 2
        return x


KINDS: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda width: nn.Linear(width, width),
    "linear without bias": lambda width: nn.Linear(width, width, bias=False),
    "mlp": lambda width: MLP(width, 7),
    "thin mlp": lambda width: MLP(width, 1),
    "sequence": lambda width: nn.Sequential(nn.Linear(width, 5), nn.Tanh(), nn.Linear(5, width)),
    "dropout": lambda width: nn.Sequential(nn.Linear(width, width), nn.Dropout(0.3)),
    "prelu": lambda width: nn.PReLU(),
    "encoder": lambda width: nn.TransformerEncoderLayer(width, 2, 5, dropout=0.0, batch_first=True),
    "weight norm": lambda width: nn.utils.parametrizations.weight_norm(nn.Linear(width, width)),
    "spectral norm": lambda width: nn.utils.parametrizations.spectral_norm(nn.Linear(width, width)),
    "orthogonal": lambda width: nn.utils.parametrizations.orthogonal(nn.Linear(width, width)),
    "gru cells": RecurrentCells,
    "odd": Odd,
    "listed": Listed,
    "adapter": Adapter,
    "counted": Counted,
    "halves": Halves,
    "two dtypes": TwoDtypes,
    "written": Written,
    "bag": Bag,
    **{kind: partial(Recurrent, kind) for kind in ("lstm", "deep lstm", "projected lstm", "gru", "rnn")},
    **{kind: partial(Attention, kind) for kind in ("mha", "sdpa", "written attention")},
    **{kind: partial(Convolution, kind) for kind in ("conv1d", "transposed", "conv2d")},
    **{kind: partial(Norm, kind) for kind in ("layer norm", "rms norm", "group norm", "batch norm", "instance norm")},
}


class Cell(nn.Module):
    """A layer with a skip connection, which returns what its parent adds up."""

    def __init__(self, layer: Layer, width: int) -> None:
        super().__init__()
        self.layer = layer
        self.core = Nest(layer.inner, width) if layer.kind == "nest" else KINDS[layer.kind](width)
        if layer.frozen:
            self.requires_grad_(False)

    def forward(self, x: Tensor, control: Control = NO_FAULT, number: int = -1) -> Any:
        fault = control.fault if number == control.cell else ""
        if fault == "in cell":
            raise Fault("in the forward of a cell")
        y = x
        for _ in range(self.layer.repeat):
            if self.layer.checkpoint.startswith("inside"):
                y = checkpoint(self.core, y, use_reentrant=self.layer.checkpoint == "inside reentrant")
            else:
                y = self.core(y)
            y = torch.tanh(y)
        if fault == "late in cell":
            raise Fault("late in the forward of a cell")
        if fault == "backward in cell":
            y = FailingBackward.apply(y)  # type: ignore[no-untyped-call]
        if self.layer.pack == "weight":  # a view of a parameter leaves the module
            return pack("weight", y, next(self.parameters()).flatten()[:1])
        return pack(self.layer.pack, y, y.mean(-1, keepdim=True))


class Model(nn.Module):
    """The model of a spec, in fp32 until it is converted."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        width = spec.width
        self.embedding = nn.Embedding(VOCABULARY, width) if spec.embedding else None
        self.cells = nn.ModuleList()
        for layer in spec.layers:
            self.cells.append(Cell(layer, width) if layer.same is None else self.cells[layer.same])
        for cell, layer in zip(self.cells, spec.layers, strict=True):
            if layer.tie is not None:
                set_weight(cell, first_weight(self.cells[layer.tie]))
        self.scale = nn.Parameter(torch.tensor(0.75)) if spec.scale else None
        self.spare = nn.Parameter(torch.randn(3)) if spec.spare else None
        self.head = nn.Linear(width, VOCABULARY, bias=False) if spec.head != "none" else None
        if spec.head == "tied":
            assert self.head is not None
            assert self.embedding is not None
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, tokens: Tensor, bits: Tensor, control: Control = NO_FAULT) -> Any:
        if self.embedding is not None:
            x = x + self.embedding(tokens)
        for number, (cell, layer) in enumerate(zip(self.cells, self.spec.layers, strict=True)):
            if control.cell == number and control.fault == "between cells":
                raise Fault("between the forwards of cells")
            if layer.branch is not None and not bits[layer.branch]:
                continue
            if layer.checkpoint.startswith("outside"):
                reentrant = layer.checkpoint == "outside reentrant"
                output = checkpoint(cell, x, control, number, use_reentrant=reentrant)
            else:
                output = cell(x, control, number)
            if control.cell == number and control.fault == "backward":
                x = FailingBackward.apply(x)  # type: ignore[no-untyped-call]
            for tensor in unpack(output):
                x = x + tensor / 2
        if self.scale is not None:
            x = x * self.scale
        aux = x.mean(-1)
        if self.head is not None:
            x = self.head(x)
        return pack(self.spec.pack, x, aux)


def first_weight(module: nn.Module) -> nn.Parameter:
    """The first matrix of a module."""
    return next(parameter for parameter in module.parameters() if parameter.ndim == 2)


def set_weight(module: nn.Module, weight: nn.Parameter) -> None:
    """Let the first matrix of a module be this parameter."""
    own = first_weight(module)
    for inner in module.modules():
        for name, parameter in list(inner.named_parameters(recurse=False)):
            if parameter is own:
                setattr(inner, name, weight)
                return


def build(spec: ModelSpec) -> Model:
    """The same model on every call, whatever the random state, which it leaves as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(spec.seed)
        model = Model(spec)
    return convert(model, getattr(torch, spec.dtype))


def convert(model: Model, dtype: torch.dtype) -> Model:
    """Parameters and buffers in a dtype, but for those that are there to have another."""
    for module in model.modules():
        if not isinstance(module, TwoDtypes):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    module._buffers[name] = buffer.to(dtype)
    return model
