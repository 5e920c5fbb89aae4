"""How losses become gradients in a step: the patterns of forwards and backwards that programs of users have.

Each pattern is written once and runs on anything that can be called with a batch: the sharded model, and each copy of
the reference. It returns what is to be compared beside gradients: losses, and gradients of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.layers import VOCABULARY
from tests.fuzz.models import LENGTH, NO_FAULT, Control, ModelSpec, unpack


@dataclass(frozen=True)
class Batch:
    """What one rank sees in one micro-batch; `seed` is that of the random numbers of its forward."""

    seed: int
    x: Tensor
    tokens: Tensor
    bits: Tensor


def make_batch(spec: ModelSpec, dtype: torch.dtype, number: int, rank: int) -> Batch:
    """The batch of a rank. Ranks have batches of different sizes, and the same bits."""
    seed = number * 16 + rank
    generator = torch.Generator().manual_seed(seed)
    rows = 2 + rank % 2
    x = torch.randn(rows, LENGTH, spec.width, generator=generator, dtype=torch.float64).to(dtype)
    tokens = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
    bits = torch.randint(2, (4,), generator=torch.Generator().manual_seed(number)).bool()
    return Batch(seed, x, tokens, bits)


class Call:
    """A model to be called with a batch, always with the random numbers of that batch."""

    def __init__(self, model: Any, control: Control = NO_FAULT, autocast: bool = False) -> None:
        self.model, self.control, self.autocast = model, control, autocast

    def __call__(self, batch: Batch, x: Tensor | None = None) -> list[Tensor]:
        torch.manual_seed(batch.seed)
        inputs = batch.x if x is None else x, batch.tokens, batch.bits, self.control
        with torch.autocast("cpu", torch.bfloat16, self.autocast):
            return unpack(self.model(inputs) if isinstance(self.model, partial) else self.model(*inputs))


def objective(outputs: Sequence[Tensor]) -> Tensor:
    """The loss that most patterns have."""
    return sum((output.double().square().mean() for output in outputs), start=torch.zeros((), dtype=torch.float64))


def other_objective(outputs: Sequence[Tensor]) -> Tensor:
    """A loss of the first output alone.

    Terms of both losses have one sign: in a mean whose terms cancel, the last digit of bfloat16 may be the whole loss.
    """
    return outputs[0].double().square().log1p().mean()


def descend(loss: Tensor, retain_graph: bool = False) -> None:
    """A backward, unless everything is frozen."""
    if loss.requires_grad:
        loss.backward(retain_graph=retain_graph)


Interlude = Callable[[], list[Tensor]]
Pattern = Callable[[Call, Sequence[Batch], Interlude], list[Tensor]]


def one(call: Call, batches: Sequence[Batch], interlude: Interlude) -> list[Tensor]:
    loss = objective(call(batches[0]))
    seen = interlude()
    descend(loss)
    return [loss, *seen]


def first_output(call: Call, batches: Sequence[Batch], interlude: Interlude) -> list[Tensor]:
    """Some outputs have no part in the loss."""
    loss = other_objective(call(batches[0]))
    seen = interlude()
    descend(loss)
    return [loss, *seen]


def two_losses(call: Call, batches: Sequence[Batch], interlude: Interlude) -> list[Tensor]:
    outputs = call(batches[0])
    first, second = objective(outputs), other_objective(outputs)
    descend(first, retain_graph=True)
    seen = interlude()
    descend(second)
    return [first, second, *seen]


def backward_twice(call: Call, batches: Sequence[Batch], interlude: Interlude) -> list[Tensor]:
    loss = objective(call(batches[0]))
    descend(loss, retain_graph=True)
    seen = interlude()
    descend(loss)
    return [loss, *seen]


def two_forwards(call: Call, batches: Sequence[Batch], interlude: Interlude) -> list[Tensor]:
    loss = objective(call(batches[0])) + other_objective(call(batches[1]))
    seen = interlude()
    descend(loss)
    return [loss, *seen]


def in_order(call: Call, batches: Sequence[Batch], interlude: Interlude) -> list[Tensor]:
    """Two forwards, then their backwards in the same order."""
    first, second = objective(call(batches[0])), objective(call(batches[1]))
    descend(first)
    seen = interlude()
    descend(second)
    return [first, second, *seen]


def crossed(call: Call, batches: Sequence[Batch], interlude: Interlude) -> list[Tensor]:
    """Two forwards, then their backwards in the other order."""
    first, second = objective(call(batches[0])), objective(call(batches[1]))
    descend(second)
    seen = interlude()
    descend(first)
    return [first, second, *seen]


def chained(call: Call, batches: Sequence[Batch], interlude: Interlude) -> list[Tensor]:
    """The output of one forward is the input of the next."""
    outputs = call(batches[0])
    last = outputs[-1].to(batches[0].x.dtype)
    more = torch.tanh(last.mean(-1, keepdim=True)) if last.ndim == 3 else last.unsqueeze(-1)
    loss = objective(call(batches[0], batches[0].x + more))
    seen = interlude()
    descend(loss)
    return [loss, *seen]


def input_gradients(call: Call, batches: Sequence[Batch], interlude: Interlude) -> list[Tensor]:
    """Gradients of the inputs alone, and then those of the parameters, of one graph."""
    x = batches[0].x.clone().requires_grad_()
    loss = objective(call(batches[0], x))
    (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    seen = interlude()
    descend(loss)
    return [loss, grad, *seen] + ([] if x.grad is None else [x.grad])


def penalty(call: Call, batches: Sequence[Batch], interlude: Interlude) -> list[Tensor]:
    """The norm of the gradient of the inputs is part of the loss."""
    x = batches[0].x.clone().requires_grad_()
    loss = objective(call(batches[0], x))
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    seen = interlude()
    total = loss + grad.square().sum()
    descend(total)
    return [total, grad, *seen]


PATTERNS: dict[str, Pattern] = {
    "one": one,
    "first output": first_output,
    "two losses": two_losses,
    "backward twice": backward_twice,
    "two forwards": two_forwards,
    "in order": in_order,
    "crossed": crossed,
    "chained": chained,
    "input gradients": input_gradients,
    "penalty": penalty,
}


class Several(list[torch.optim.Optimizer]):
    """Optimizers that step together, each of which has parameters of its own."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> list[Any]:
        return [optimizer.state_dict() for optimizer in self]

    def load_state_dict(self, states: list[Any]) -> None:
        for optimizer, state in zip(self, states, strict=True):
            optimizer.load_state_dict(state)


class Temporary(torch.optim.SGD):
    """Makes an optimizer for each parameter in each step, as layer-wise updates do, and keeps none."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                torch.optim.SGD([parameter], lr=group["lr"]).step()


def _muon(parameters: Iterable[nn.Parameter]) -> Several:
    """Muon for matrices, and AdamW for all other parameters."""
    every = list(parameters)
    others = [parameter for parameter in every if parameter.ndim != 2]
    optimizers: list[torch.optim.Optimizer] = []
    if len(others) < len(every):
        optimizers.append(torch.optim.Muon([parameter for parameter in every if parameter.ndim == 2], lr=1e-2))
    if others:
        optimizers.append(torch.optim.AdamW(others, lr=1e-2, eps=1e-2))
    return Several(optimizers)


def _low_bit(name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer of torchao."""
    import torchao.optim  # not above: it takes long

    return getattr(torchao.optim, name)(parameters, lr=1e-2, eps=1e-2)


ELEMENTWISE: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-2),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, eps=1e-2, foreach=False),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-2, fused=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-2, eps=1e-1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2, eps=1e-1),
    "temporary": lambda parameters: Temporary(parameters, lr=0.1),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-2, eps=1e-2),
}
#: Classes of torchao, if it is there.
LOW_BIT = ("Adam8bit", "AdamW4bit", "AdamFp8") if find_spec("torchao") else ()
#: Those that need ragged layouts. They magnify the last digit of a gradient: Muon makes all singular values alike, also
#: those that are only rounding, and quantized state falls into one of 16 or 256 buckets. So gradients are rounded
#: before a step, and both sides step with the same ones, to the bit: see :func:`round_gradient`.
BY_BLOCKS: dict[str, Callable[[Any], Any]] = {"muon": _muon, **{name: partial(_low_bit, name) for name in LOW_BIT}}
OPTIMIZERS = {**ELEMENTWISE, **BY_BLOCKS}
_DIGITS = 2.0**20


def round_gradient(gradient: Tensor) -> None:
    """Round a gradient, in place, to multiples of 1e-6, so that gradients that differ by 1e-16 become equal. They do
    not if a half lies between them, which is a matter of chance: once in 1e9 elements."""
    gradient.copy_((gradient * _DIGITS).round() / _DIGITS)
