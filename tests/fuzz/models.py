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
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.fuzz.layers import (
    MLP,
    VOCABULARY,
    Adapter,
    Attention,
    Bag,
    Complex,
    Convolution,
    Counted,
    Halves,
    Listed,
    Norm,
    Odd,
    Recurrent,
    RecurrentCells,
    TwoDtypes,
    TwoPrecisions,
    Written,
)
from tests.harness.faults import FailingBackward, Fault

LENGTH = 3
CHECKPOINTS = ("outside reentrant", "outside non-reentrant", "inside reentrant", "inside non-reentrant")
PACKS = ("tensor", "tuple", "list", "dict", "dataclass", "namedtuple", "plain", "weight")


@dataclass(frozen=True)
class Layer:
    """One cell of a model.

    `pack` is what it returns its tensors in; `plain` is an object that nobody can look into. `repeat` is how often it
    runs in a row, `branch` the bit of the batch without which it does not run. `same` is the number of an earlier cell
    of which this one is another use, `tie` that of one whose first weight it has. `inner` are the cells of a nest.
    With `collects` its input comes in a list, in which it leaves an auxiliary output.
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
    collects: bool = False


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
        "hidden weight": lambda: Plain(main, aux),
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
    "wide mlp": lambda width: MLP(width, 4224),  # of several blocks that are quantized, and a remainder
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
    "complex": Complex,
    "two precisions": TwoPrecisions,
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

    def forward(self, given: Any, control: Control = NO_FAULT, number: int = -1) -> Any:
        x = given[0]["x"] if isinstance(given, list) else given
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
        if isinstance(given, list):
            given.append({"aux": y.mean(-1, keepdim=True)})
        if self.layer.pack.endswith("weight"):  # a view of a parameter leaves the module
            weight = next(self.parameters()).flatten()[:1]
            return pack(self.layer.pack, y, weight.real.to(y.dtype) if weight.is_complex() else weight)
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
                given = [{"x": x}] if layer.collects else x
                output = cell(given, control, number)
                x = x + sum(each["aux"] for each in given[1:]) if layer.collects else x
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
        if not isinstance(module, (TwoDtypes, Complex)):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    module._buffers[name] = buffer.to(dtype)
    return model
