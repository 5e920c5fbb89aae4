"""The same training without sharding, in one process: what the sharded run has to agree with.

It takes the same global batches and walks through the ranks' slices of each, one after another, so that it computes
at a time what one rank computes at a time: its memory differs from a rank's by what sharding saves and by nothing else.
A process of its own runs it, which ends before anything of it could count as memory of a rank.
"""

from __future__ import annotations

import multiprocessing
import textwrap
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

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
    """The first steps of a run: their losses in nats per byte, and what one rank holds, in bytes.

    ``memory`` is what it holds after each step, ``peak`` the most that it held in one. Both count from ``start``, the
    moment before there was a model. ``activations`` is measured unsharded only: a rank keeps as much.
    """

    losses: list[float]
    memory: list[int]
    parameters: int
    gradients: int
    optimizer: int
    peak: int
    start: int
    activations: int = 0


def measure(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    losses: list[float],
    held: list[int],
    device: torch.device,
    start: int,
) -> Measurement:
    """Add up the tensors of this rank; ``start`` is the memory that was taken before there was a model, in bytes."""
    parameters = list(model.parameters())
    return Measurement(
        losses,
        held,
        parameters=memory.bytes_of(parameters),
        gradients=memory.bytes_of(parameter.grad for parameter in parameters),
        optimizer=memory.bytes_of(value for state in optimizer.state.values() for value in state.values()),
        peak=memory.peak(device) - start,
        start=start,
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
    losses, held = [], []
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
        held.append(memory.now(device) - start)
    found = measure(model, optimizer, losses, held, device, start)
    loss_of_part = partial(loss_of, _InPrecision(model, settings.precision), part)
    return replace(found, activations=memory.kept_for_backward(loss_of_part, model.parameters()))


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
            in_words(sharded, unsharded, ranks),
        )
    )


def in_words(sharded: Measurement, unsharded: Measurement, ranks: int) -> str:
    """Say what the numbers of :func:`table` mean."""
    state = sharded.parameters + sharded.gradients + sharded.optimizer
    whole = unsharded.parameters + unsharded.gradients + unsharded.optimizer
    written = memory.readable
    paragraphs = (
        "The losses are those of unsharded training. The sums are the same; ranks add them in another order, which "
        "changes the last digits.",
        "The state (parameters, gradients, optimizer) is what sharding divides: a rank holds "
        f"{state / whole:.2f} of the whole.",
        f"The peak is the most that a process took in one step, above the {written(sharded.start)} that it had taken "
        f"before there was a model. It is {sharded.peak / unsharded.peak:.2f} of the unsharded one, because only "
        f"{written(state)} of a rank's {written(sharded.peak)} are state. Nobody divides the rest. About "
        f"{written(unsharded.activations)} are activations of a rank's part of the batch, which forward keeps for "
        "backward; the unsharded run takes the parts one after the other, and keeps as much. The others are buffers "
        "for gradients, the parameters that are whole while they are used (on one host's CPU the ranks share them, and "
        "each counts them), and on a CPU work memory, and libraries that the first step loads.",
        "In a larger model (MODEL=base) the state is more of the whole. More ranks (RANKS=4) hold smaller parts.",
    )
    return "\n\n".join(textwrap.fill(paragraph, 100) for paragraph in paragraphs)
