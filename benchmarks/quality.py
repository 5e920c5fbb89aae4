"""What cheap communication does to training: the validation loss of the example, and the bytes that ranks send for it.

Trains the model of ``examples/train.py`` on its text, on two ranks, once for each way to communicate and each seed, and
draws the loss over the bytes::

    python -m benchmarks.quality --steps 600 --seeds 3 --picture docs/pictures/quality.png
    python -m benchmarks.quality --steps 20 --seeds 1            # to see that it runs
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.ranks import run_ranks
from benchmarks.traffic import Traffic
from fullshard import WirePolicy, fully_shard_blocks
from fullshard.optim import LocalSteps
from fullshard.wire_policy import EXACT

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import data
from model import GPT, MODELS, loss_of

WARM_UP, BATCH, LENGTH, VALIDATION = 20, 8, 64, 16
#: Steps between two measurements of the loss.
EVERY = 50


def _nesterov(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


@dataclass(frozen=True)
class Way:
    """A way to communicate: a wire of one replica, or how two replicas of a rank each meet."""

    wire: WirePolicy = EXACT
    local: dict[str, Any] = field(default_factory=dict)


_INT8 = WirePolicy("int8", "int8")
WAYS = {
    "exact": Way(),
    "int8": Way(_INT8),
    "int4 reductions": Way(WirePolicy("exact", "int4")),
    "int4 reductions without error feedback": Way(WirePolicy("exact", "int4", error_feedback=False)),
    "local steps, mean of 10": Way(_INT8, {"every": 10}),
    "local steps, mean of 50": Way(_INT8, {"every": 50}),
    "local steps, DiLoCo of 50": Way(_INT8, {"every": 50, "outer": _nesterov}),
}


def train(name: str, model_name: str, steps: int, seed: int) -> list[tuple[float, float]]:
    """Bytes that this rank has sent, and the validation loss, every so many steps."""
    way, corpus = WAYS[name], data.standard_library()
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")) if way.local else None
    model: Any = GPT(MODELS[model_name])
    fully_shard_blocks(model, mesh=mesh, wire_policy=EXACT if way.local else way.wire)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    local = LocalSteps(model, optimizer, wire_policy=way.wire, **way.local) if way.local else None
    period, counted, found = way.local.get("every", 1), 0.0, list[tuple[float, float]]()
    for step in range(steps):
        batch = data.training_batch(corpus, seed, step, BATCH, LENGTH)
        with Traffic() if period <= step < 2 * period else nullcontext() as traffic:
            loss_of(model, _own(batch)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * min(1.0, (step + 1) / WARM_UP)
            optimizer.step()
            optimizer.zero_grad()
        if traffic is not None:
            counted += traffic.asked / period
        if (step + 1) % EVERY == 0 or step + 1 == steps:
            with local.global_parameters() if local else nullcontext():
                found.append((counted * (step + 1), _evaluate(model, corpus)))
    return found


def _own(batch: torch.Tensor) -> torch.Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


@torch.no_grad()
def _evaluate(model: nn.Module, corpus: data.Corpus) -> float:
    total = torch.zeros(())
    batches = data.validation_batches(corpus, VALIDATION, BATCH, LENGTH)
    for batch in batches:
        total += loss_of(model, _own(batch)) / len(batches)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def draw(found: dict[str, list[list[tuple[float, float]]]], file: Path) -> None:
    """Draw the loss of each way over the bytes of a rank: the mean of the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from fullshard.report.pictures import RANKS

    figure, axes = plt.subplots(figsize=(7.5, 4.2))
    styles = ["-", "--", "-.", ":"]
    for number, (name, runs) in enumerate(found.items()):
        points = [[mean(each) for each in zip(*at, strict=True)] for at in zip(*runs, strict=True)]
        sent, losses = zip(*points, strict=True)
        style = styles[number % len(styles)]
        axes.plot([each / 2**30 for each in sent], losses, style, color=RANKS[number % len(RANKS)].color, label=name)
    axes.set(xscale="log", xlabel="GiB sent by a rank", ylabel="validation loss, nats a byte")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small", choices=sorted(MODELS))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    parser.add_argument("--picture", type=Path, help="a PNG of the curves; the numbers are written beside it")
    given = parser.parse_args()
    os.environ["FULLSHARD_TRANSPORT"] = "p2p"
    found: dict[str, list[list[tuple[float, float]]]] = {}
    print(f"{'':<42}{'loss':>8}{'of exact':>10}{'GiB sent':>10}   by seed")
    for name in given.ways:
        seeds = range(given.seeds)
        found[name] = [run_ranks(train, 2, name, given.model, given.steps, seed)[0] for seed in seeds]
        losses = [run[-1][1] for run in found[name]]
        share = mean(losses) / mean(run[-1][1] for run in found[given.ways[0]])
        sent = found[name][0][-1][0] / 2**30
        by_seed = " ".join(f"{loss:.4f}" for loss in losses)
        print(f"{name:<42}{mean(losses):>8.4f}{share:>10.4f}{sent:>10.3f}   {by_seed}", flush=True)
    if given.picture:
        given.picture.with_suffix(".json").write_text(json.dumps(found))
        draw(found, given.picture)


if __name__ == "__main__":
    main()
