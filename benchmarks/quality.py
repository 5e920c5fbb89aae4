"""What cheap communication does to training: the validation loss of the example, and the bytes that ranks send for it.

Trains the model of ``examples/train.py`` on its text, on two ranks, once for each way to communicate and each seed, and
draws the loss over the bytes::

    python -m benchmarks.quality --steps 600 --seeds 3 --pictures docs/pictures
    python -m benchmarks.quality --steps 20 --seeds 1            # to see that it runs

``docs/pictures/quality.json`` has the losses that the pictures show. Delete it to train again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
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

#: The losses of one training: the steps so far, the bytes that this rank has sent for them, and the validation loss.
Losses = list[tuple[int, float, float]]


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
    "local SGD, every 10 steps": Way(_INT8, {"every": 10}),
    "local SGD, every 50 steps": Way(_INT8, {"every": 50}),
    "DiLoCo, every 50 steps": Way(_INT8, {"every": 50, "outer": _nesterov}),
}
#: The ways that each picture shows, and the scale of its bytes. Replicas that train apart stand beside the exact run.
PICTURES = {
    "wires.png": ([name for name, way in WAYS.items() if not way.local], "linear"),
    "local-steps.png": ([name for name, way in WAYS.items() if way.local or name == "exact"], "log"),
}
#: The ways whose name is to the right of a point of their curve, as another curve is below its end: which point.
_NAMED_RIGHT = {"int4 reductions without error feedback": -1, "DiLoCo, every 50 steps": 0}


def train(name: str, model_name: str, steps: int, seed: int) -> Losses:
    """Trains, and measures the validation loss every so many steps."""
    way, corpus = WAYS[name], data.standard_library()
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")) if way.local else None
    model: Any = GPT(MODELS[model_name])
    fully_shard_blocks(model, mesh=mesh, wire_policy=EXACT if way.local else way.wire)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    local = LocalSteps(model, optimizer, wire_policy=way.wire, **way.local) if way.local else None
    period, sent, found = way.local.get("every", 1), 0.0, list[tuple[int, float]]()
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
            sent += traffic.asked / period
        if (step + 1) % EVERY == 0 or step + 1 == steps:
            with local.global_parameters() if local else nullcontext():
                found.append((step + 1, _evaluate(model, corpus)))
    return [(done, done * sent, loss) for done, loss in found]


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


def draw(runs: dict[str, list[Losses]], scale: str, file: Path) -> None:
    """Draws the loss of each way over the bytes of a rank: the mean of the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from fullshard.report.pictures import BLACK, BLUE, GREEN, VERMILION

    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    looks = zip((BLACK, BLUE, VERMILION, GREEN), ("-", "--", "-.", ":"), "osD^", strict=True)
    for (name, of_seeds), (color, line, mark) in zip(runs.items(), looks, strict=False):
        points = [[mean(each) for each in zip(*at, strict=True)] for at in zip(*of_seeds, strict=True)]
        sent, losses = [nbytes / 2**30 for _, nbytes, _ in points], [loss for _, _, loss in points]
        axes.plot(sent, losses, line, marker=mark, markersize=4, color=color)
        label, at = textwrap.fill(f"{name}: {losses[-1]:.2f}", 22), _NAMED_RIGHT.get(name, -1)
        offset, ha = ((8, 4), "left") if name in _NAMED_RIGHT else ((-5, -5), "right")
        va = "top" if at else "bottom"
        axes.annotate(
            label, (sent[at], losses[at]), offset, textcoords="offset points", ha=ha, va=va, color=color, fontsize=9
        )
    axes.margins(y=0.15)
    axes.set(xscale=scale, xlabel="GiB that a rank has sent", ylabel="validation loss (nats a byte)")
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small", choices=sorted(MODELS))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    parser.add_argument("--pictures", type=Path, help="a folder for pictures and quality.json, whose losses are kept")
    given = parser.parse_args()
    os.environ["FULLSHARD_TRANSPORT"] = "p2p"
    file = given.pictures and given.pictures / "quality.json"
    runs: dict[str, list[Losses]] = json.loads(file.read_text()) if file and file.exists() else {}
    for seed in range(given.seeds):
        for name in given.ways:
            if len(runs.setdefault(name, [])) > seed:
                continue
            runs[name].append(run_ranks(train, 2, name, given.model, given.steps, seed)[0])
            print(f"{name}, seed {seed}: {runs[name][-1][-1][2]:.4f}", flush=True)
            if file:
                file.write_text(json.dumps(runs))
    print(f"{'':<42}{'loss':>8}{'of exact':>10}{'GiB sent':>10}   by seed")
    for name in given.ways:
        losses, sent = [run[-1][2] for run in runs[name]], runs[name][0][-1][1] / 2**30
        share = mean(losses) / mean(run[-1][2] for run in runs[given.ways[0]])
        by_seed = " ".join(f"{loss:.4f}" for loss in losses)
        print(f"{name:<42}{mean(losses):>8.4f}{share:>10.4f}{sent:>10.3f}   {by_seed}")
    for picture, (names, scale) in PICTURES.items() if given.pictures else ():
        draw({name: runs[name] for name in names if name in runs}, scale, given.pictures / picture)


if __name__ == "__main__":
    main()
