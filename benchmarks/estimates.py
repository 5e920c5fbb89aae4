"""What ``fullshard.explain`` predicts beside what is measured, which ``docs/how-to/explain.md`` sums up.

    python -m benchmarks.estimates             # the time of a step
    python -m benchmarks.estimates memory      # the peaks of its memory, as the kernel counts them
    python -m benchmarks.estimates activations # activations alone, of the model of examples/train.py

Every number that an estimate is given is measured first, apart from the step: FLOP/s by the model without sharding on
as many ranks at once, bandwidth and latency by tensors sent both ways between two ranks, or, where ranks share memory,
by the sum of two tensors.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import fullshard
from benchmarks import resident
from benchmarks.contenders import ours
from benchmarks.memory import measure_contender
from benchmarks.models import Work
from benchmarks.ranks import run_ranks
from fullshard.text import bytes_text, seconds_text, table

_SIZES = (
    Work("small", blocks=4, width=256, sequence=64, vocabulary=512),
    Work("medium", blocks=4, width=512, sequence=128, vocabulary=512),
    Work("large", blocks=4, width=1024, sequence=64, vocabulary=512),
)
_ROUNDS = 15
_BYTES = 8 * 2**20


_EXAMPLES = Path(__file__).parents[1] / "examples"
#: Sequences and tokens of a batch of the example.
_BATCHES = ((4, 129), (16, 129), (8, 513))
#: Of blocks so large, and batches so small, that activations are next to nothing.
_HELD = Work("held", blocks=4, width=1024, sequence=4, vocabulary=64)


def main() -> None:
    if sys.argv[1:] == ["memory"]:
        return _memory()
    if sys.argv[1:] == ["activations"]:
        return _activations()
    rows = []
    for transport in ("p2p", "shm"):
        for work in _SIZES:
            found = max(run_ranks(_measure, 2, work, transport), key=lambda each: float(each["measured"]))
            rows.append(
                [
                    f"{transport}, {work.block_bytes / 2**20:.1f} MiB a block, {work.sequence} tokens",
                    f"{found['flops'] / 1e9:.1f} G/s",
                    f"{found['bandwidth'] / 1e9:.2f} GB/s",
                    seconds_text(found["latency"]),
                    seconds_text(found["computing"]),
                    seconds_text(found["estimated"]),
                    seconds_text(found["measured"]),
                    f"{found['estimated'] / found['measured']:.2f}",
                ]
            )
    head = ["W=2", "FLOP/s", "bandwidth", "latency", "alone", "estimated", "measured", "ratio"]
    print(table(head, rows))


def _memory() -> None:
    """What a step takes above what rests after ``free_buffers()``, of the rank that takes most."""
    rows = []
    for contender in run_ranks(ours, 2)[0]:
        found = measure_contender(contender, _HELD, 2)
        for phase in ("forward", "backward", "rest"):
            rows.append(_row(f"{contender.name}, {phase}", found[f"predicted_{phase}"], found[phase] - found["freed"]))
    print(table(["W=2", "predicted", "measured", "ratio"], rows))


def _activations() -> None:
    """The activations of an unsharded model, whose memory has nothing else in it that comes and goes."""
    rows = []
    for sequences, tokens in _BATCHES:
        for checkpointed in (False, True):
            ((predicted, measured),) = run_ranks(_measure_activations, 1, sequences, tokens, checkpointed)
            name = f"{sequences} x {tokens - 1} tokens{', checkpointed' * checkpointed}"
            rows += [_row(f"{name}, {phase}", predicted[phase], measured[phase]) for phase in predicted]
    print(table(["example", "predicted", "measured", "ratio"], rows))


def _row(name: str, predicted: float, measured: float) -> list[str]:
    return [name, bytes_text(predicted), bytes_text(measured), f"{predicted / measured:.3f}"]


def _measure_activations(sequences: int, tokens: int, checkpointed: bool) -> tuple[dict[str, float], dict[str, float]]:
    resident.return_what_is_freed()
    example = runpy.run_path(str(_EXAMPLES / "model.py"))

    def build() -> nn.Module:
        model: nn.Module = example["GPT"](example["MODELS"]["small"])
        for block in model.blocks if checkpointed else ():  # type: ignore[union-attr]
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        return model

    batch = torch.zeros(sequences, tokens, dtype=torch.long)
    found = fullshard.explain(fullshard.fully_shard_blocks(build()), batch=batch, loss=example["loss_of"]).activations
    assert found is not None
    model = build()
    example["loss_of"](model, batch[:1]).backward()  # from now on there are gradients to add to
    model.zero_grad(set_to_none=False)
    resident.settle()
    before = resident.bytes_now()
    with resident.Peak() as forward:
        loss = example["loss_of"](model, batch)
    kept = resident.bytes_now()
    with resident.Peak() as backward:
        loss.backward()
    measured = {"kept": kept, "forward": forward.bytes, "backward": backward.bytes}
    predicted: dict[str, float] = {"kept": found.kept, "forward": found.forward, "backward": found.backward}
    return predicted, {phase: nbytes - before for phase, nbytes in measured.items()}


def _measure(work: Work, transport: str) -> dict[str, Any]:
    os.environ["FULLSHARD_TRANSPORT"] = transport
    rank, tokens = dist.get_rank(), work.sequence
    alone = work.build()
    model = fullshard.fully_shard_blocks(work.build())
    explanation = fullshard.explain(model)
    matrices = sum(param.numel for group in explanation.groups for param in group.parameters if param.is_matrix)
    exchange = _added if transport == "shm" else _sent
    models = [lambda step, each=each: _train(each, work, rank, step) for each in (alone, model)]
    computing, measured, large, small = _quarters([*models, exchange(_BYTES), exchange(4096)])
    bandwidth = _BYTES / max(1e-9, large - small)
    flops = 6 * matrices * tokens / computing
    estimate = explanation.estimate(tokens=tokens, bandwidth=bandwidth, peak_flops=flops, latency=small)
    return {
        "flops": flops,
        "bandwidth": bandwidth,
        "latency": small,
        "computing": computing,
        "estimated": estimate.step,
        "measured": measured,
    }


def _quarters(do: list[Callable[[int], object]]) -> list[float]:
    """Seconds of each, which take turns: the lower quartile, after some rounds that do not count."""
    seconds: list[list[float]] = [[] for _ in do]
    for step in range(_ROUNDS + 3):
        for each, found in zip(do, seconds, strict=True):
            dist.barrier()
            begin = time.perf_counter()
            each(step)
            found.append(time.perf_counter() - begin)
    return [sorted(found[3:])[_ROUNDS // 4] for found in seconds]


def _train(model: nn.Module, work: Work, rank: int, step: int) -> None:
    model(work.batch(rank, step)).backward()
    model.zero_grad()


def _sent(nbytes: int) -> Callable[[int], object]:
    here, there = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
    peer = 1 - dist.get_rank()

    def exchange(_: int) -> None:
        receives = dist.irecv(there, peer)
        sends = dist.isend(here, peer)
        assert receives is not None
        assert sends is not None
        receives.wait()
        sends.wait()

    return exchange


def _added(nbytes: int) -> Callable[[int], object]:
    here, there = (torch.zeros(nbytes // 4) for _ in range(2))
    return lambda _: here.add_(there)


if __name__ == "__main__":
    main()
