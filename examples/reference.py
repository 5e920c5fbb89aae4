"""The same training without sharding, in one process: what the sharded run has to agree with.

It takes the same global batches and walks through the ranks' slices of each, one after another, so that it computes
at a time what one rank computes at a time: its memory differs from a rank's by what sharding saves and by nothing else.
A process of its own runs it, which ends before anything of it could count as memory of a rank.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
from tabulate import tabulate
from torch import nn
from torch.func import functional_call

import data
import memory
import optimizer as optimizers
from model import GPT, MODELS, loss_of
from settings import Settings

#: How many steps are compared, unless the run is shorter.
STEPS = 5

RIGHT = ("left", "right", "right", "right")


@dataclass(frozen=True)
class Measurement:
    """The first steps of a run: their losses in nats per byte, and after them what one rank holds, in bytes."""

    losses: list[float]
    parameters: int
    gradients: int
    optimizer: int
    peak: int


def measure(
    model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[float], device: torch.device, start: int
) -> Measurement:
    """Add up the tensors of this rank; ``start`` is the memory that was taken before there was a model, in bytes."""
    parameters = list(model.parameters())
    return Measurement(
        losses,
        parameters=memory.bytes_of(parameters),
        gradients=memory.bytes_of(parameter.grad for parameter in parameters),
        optimizer=memory.bytes_of(value for state in optimizer.state.values() for value in state.values()),
        peak=memory.peak(device) - start,
    )


def run(settings: Settings, device: torch.device, ranks: int, steps: int) -> Measurement:
    """Train unsharded for ``steps`` steps in a new process, wait for it, and return what it measured."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_train, settings, device, ranks, steps).result()


def _train(settings: Settings, device: torch.device, ranks: int, steps: int) -> Measurement:
    corpus = data.standard_library()
    start = memory.now(device)
    torch.manual_seed(settings.seed)
    model = GPT(MODELS[settings.model]).to(device)
    optimizer = optimizers.build(model, settings)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        batch = data.training_batch(corpus, settings.seed, step, settings.batch_size, settings.seq_len).to(device)
        total = torch.zeros((), device=device)
        for part in batch.chunk(ranks):
            loss = loss_of(_InPrecision(model, settings.precision), part) / ranks
            loss.backward()
            total += loss.detach()
        optimizers.update(model, optimizer, settings, step)
        losses.append(total.item())
    return measure(model, optimizer, losses, device, start)


class _InPrecision(nn.Module):
    """Runs a model on its parameters as sharding with mixed precision would show them to it."""

    def __init__(self, model: nn.Module, precision: str) -> None:
        super().__init__()
        self.model = model
        self.precision = precision

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.precision == "fp32":
            return self.model(tokens)
        low = {name: parameter.bfloat16() for name, parameter in self.model.named_parameters()}
        return functional_call(self.model, low, (tokens,))


def table(sharded: Measurement, unsharded: Measurement, ranks: int) -> str:
    """Set the two runs side by side, memory first and losses below."""
    rows = [
        ("parameters", sharded.parameters, unsharded.parameters),
        ("gradients", sharded.gradients, unsharded.gradients),
        ("optimizer state", sharded.optimizer, unsharded.optimizer),
        ("peak, with activations", sharded.peak, unsharded.peak),
    ]
    held = [
        (name, memory.readable(ours), memory.readable(theirs), f"{ours / theirs:.2f}") for name, ours, theirs in rows
    ]
    gaps = [abs(ours - theirs) for ours, theirs in zip(sharded.losses, unsharded.losses, strict=True)]
    losses = [
        (step, f"{ours:.6f}", f"{theirs:.6f}", f"{gap:.1e}")
        for step, (ours, theirs, gap) in enumerate(zip(sharded.losses, unsharded.losses, gaps, strict=True), start=1)
    ]
    over = f"sharded over {ranks}"
    return "\n\n".join(
        (
            tabulate(held, ["a rank holds", over, "unsharded", "ratio"], disable_numparse=True, colalign=RIGHT),
            tabulate(losses, ["loss of step", over, "unsharded", "difference"], disable_numparse=True, colalign=RIGHT),
            f"Largest difference of a loss: {max(gaps):.1e}.",
        )
    )
