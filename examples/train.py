"""Train a small language model, sharded over several ranks: ``make train``, or torchrun on this file.

The path from text to a trained model, in order: :func:`shard` the model, :func:`train` it, :func:`compare` its first
steps with the same steps unsharded, and :func:`evaluate` it. Every rank runs this file; rank 0 prints and draws.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record

import data
import memory
import report
from fullshard import FullyShardedDataParallel, checkpoint, fully_shard
from fullshard.wrap import ModuleWrapPolicy
from model import GPT, MODELS, Block, loss_of

STEPS = {"small": 150, "base": 80}  # one to two minutes on two cores
COMPARED_STEPS = 5
WARM_UP_STEPS = 20
VALIDATION_BATCHES = 8


@dataclass(frozen=True)
class Settings:
    """One field for each flag; see :func:`parse`."""

    model: str
    steps: int
    batch_size: int
    seq_len: int
    lr: float
    seed: int
    api: str
    directory: Path
    checkpoint_every: int
    compare: bool


def parse() -> Settings:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node=RANKS examples/train.py",
        description="Train a byte-level GPT on the source of Python's standard library, sharded over the ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", choices=sorted(MODELS), default="base", help="how large a model")
    add("--steps", type=int, help=f"train up to this step (default: {STEPS})", default=argparse.SUPPRESS)
    add("--batch-size", type=int, default=8, help="sequences a step, over all ranks together")
    add("--seq-len", type=int, default=64, help="bytes of context")
    add("--lr", type=float, default=1e-3, help=f"learning rate, after a warm-up of {WARM_UP_STEPS} steps")
    add("--seed", type=int, default=0, help="decides the initial weights and the batches")
    add("--api", choices=["fully_shard", "wrapper"], default="fully_shard", help="which front end of fullshard")
    add("--directory", type=Path, help="for all that is written (default: runs/MODEL)", default=argparse.SUPPRESS)
    add("--checkpoint-every", type=int, default=100, help="steps between checkpoints; the last step has one")
    add("--compare", action=argparse.BooleanOptionalAction, default=True, help="run the first steps unsharded as well")
    flags = vars(parser.parse_args())
    flags.setdefault("steps", STEPS[flags["model"]])
    flags.setdefault("directory", Path("runs") / flags["model"])
    for name in ("steps", "batch_size", "seq_len", "checkpoint_every"):
        if flags[name] < 1:
            parser.error(f"--{name.replace('_', '-')} is {flags[name]}, and must be at least 1")
    return Settings(**flags)


def refuse(message: str) -> NoReturn:
    """End the program on every rank, with a message from rank 0. Every rank calls this."""
    dist.barrier()
    if dist.get_rank() == 0:
        raise SystemExit(message)
    raise SystemExit(1)


def shard(model: GPT, api: str) -> nn.Module:
    """Shard each block, then the rest: the embedding, which is the head too, and the last norm.

    From here on a rank holds its part of every parameter, and a block is whole only while it computes. ``fully_shard``
    changes the model; the wrapper puts modules around it and its blocks.
    """
    if api == "wrapper":
        return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def new_optimizer(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """Make the optimizer, after sharding: its state is then sharded as the parameters are."""
    return torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, settings: Settings, step: int) -> None:
    """Clip the gradients to norm 1 and step the optimizer.

    The learning rate depends on the step alone, so that a run that is given more steps later is the run that had them
    from the start.
    """
    if isinstance(model, FullyShardedDataParallel):  # torch's function does not know its gradients are sharded
        model.clip_grad_norm_(1.0)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = settings.lr * min(1.0, (step + 1) / WARM_UP_STEPS)
    optimizer.step()


def local_slice(batch: Tensor, device: torch.device) -> Tensor:
    """Return this rank's equal part of a global batch."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()].to(device)


def mean(value: Tensor) -> float:
    """Average a scalar over the ranks. A mean over equal slices is the mean over the global batch."""
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    corpus: data.Corpus,
    settings: Settings,
    done: int,
    device: torch.device,
    meter: memory.PeakMeter,
) -> tuple[bool, list[float], memory.Usage | None]:
    """Train from step ``done`` to the last one, or until the process is told to end.

    Returns whether it was told to end, the losses, and the memory that the first steps took if they were among these.
    Checkpoints are written while the next steps run. They need no random state: a batch depends on seed and step.
    """
    losses: list[float] = []
    usage = None
    log = report.RunLog(settings.directory, done, settings.steps) if dist.get_rank() == 0 else None
    with log or nullcontext(), checkpoint.PreemptionHandler() as preempted:
        for step in range(done, settings.steps):
            clock = time.perf_counter()
            optimizer.zero_grad()
            batch = data.training_batch(corpus, settings.seed, step, settings.batch_size, settings.seq_len)
            loss = loss_of(model, local_slice(batch, device))
            loss.backward()
            update(model, optimizer, settings, step)
            losses.append(mean(loss.detach()))
            if log:
                log.add(step + 1, losses[-1], settings.batch_size * settings.seq_len / (time.perf_counter() - clock))
            if done == 0 and step + 1 == min(COMPARED_STEPS, settings.steps):
                usage = memory.usage(model, optimizer, meter.stop())
            stops = preempted()
            if stops or step + 1 == settings.steps or (step + 1) % settings.checkpoint_every == 0:
                state = {"run": identity(settings, corpus)}
                directory, count = settings.directory, step + 1
                checkpoint.save(directory, model, optimizer, step=count, keep_last=2, wait=False, state=state)
            if stops:
                break
        checkpoint.wait_until_finished()
        return preempted(), losses, usage


def train_unsharded(settings: Settings, device: torch.device, ranks: int) -> dict[str, Any]:
    """Train the first steps in this process alone, and return their losses and the memory that they took.

    Takes the ranks' slices of each global batch one after another, so that its activations need as much memory as
    a rank's: it holds more than a rank by what sharding saves.
    """
    corpus = data.standard_library()
    meter = memory.PeakMeter(device)
    torch.manual_seed(settings.seed)
    model = GPT(MODELS[settings.model]).to(device)
    optimizer = new_optimizer(model, settings)
    losses = []
    for step in range(min(COMPARED_STEPS, settings.steps)):
        optimizer.zero_grad()
        batch = data.training_batch(corpus, settings.seed, step, settings.batch_size, settings.seq_len)
        total = 0.0
        for part in batch.to(device).chunk(ranks):
            loss = loss_of(model, part) / ranks
            loss.backward()
            total += loss.item()
        update(model, optimizer, settings, step)
        losses.append(total)
    return {"losses": losses, "usage": asdict(memory.usage(model, optimizer, meter.stop()))}


def compare(settings: Settings, device: torch.device, losses: list[float], usage: memory.Usage) -> None:
    """Train the first steps unsharded in a new process of rank 0, and show both runs. Every rank calls this."""
    ranks = dist.get_world_size()
    usages: list[Any] = [None] * ranks
    dist.all_gather_object(usages, asdict(usage))
    if dist.get_rank() == 0:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            unsharded = pool.submit(train_unsharded, settings, device, ranks).result()
        comparison = {"ranks": usages, "unsharded": unsharded}
        (settings.directory / "comparison.json").write_text(json.dumps(comparison, indent=1))
        highest = max(usages, key=lambda each: each["peak"])
        whole = memory.Usage(**unsharded["usage"])
        console = Console(file=sys.stdout, highlight=False)
        console.print()
        console.print(report.memory_table(memory.Usage(**highest), whole, ranks))
        print("The peak includes activations and buffers, which sharding does not divide.")
        gap = max(abs(ours - theirs) for ours, theirs in zip(losses, unsharded["losses"], strict=False))
        print(f"Same training: in the first {len(unsharded['losses'])} steps the losses differ by {gap:.1e} at most.")
    dist.barrier()


@torch.no_grad()
def evaluate(model: nn.Module, corpus: data.Corpus, settings: Settings, device: torch.device) -> float:
    """Return the loss on text that the model was not trained on, in nats per byte."""
    batches = data.validation_batches(corpus, VALIDATION_BATCHES, settings.batch_size, settings.seq_len)
    return sum(mean(loss_of(model, local_slice(batch, device))) for batch in batches) / len(batches)


def identity(settings: Settings, corpus: data.Corpus) -> dict[str, str | int]:
    """Return what must be the same for a run to resume from a checkpoint."""
    same = {name: getattr(settings, name) for name in ("model", "seq_len", "batch_size", "seed")}
    return {**same, "text": corpus.fingerprint}


def resume(model: nn.Module, optimizer: torch.optim.Optimizer, settings: Settings, corpus: data.Corpus) -> int:
    """Load the newest checkpoint, if there is one, and return the step that it was made at."""
    newest = checkpoint.latest(settings.directory)
    if newest is None:
        if dist.get_rank() == 0:
            (settings.directory / "comparison.json").unlink(missing_ok=True)
        return 0
    found = newest.state()["run"]
    for name, ours in identity(settings, corpus).items():
        if found[name] != ours:
            refuse(
                f"{newest.path} was trained with {name} {found[name]}, and this run has {name} {ours}: give the same "
                f"to resume, or another --directory to start again."
            )
    state = checkpoint.load(settings.directory, model, optimizer)
    assert state is not None
    if dist.get_rank() == 0:
        print(f"Resumes from step {state['step']}, {newest.path}.", flush=True)
    return int(state["step"])


def start_ranks() -> torch.device:
    """Join the ranks that torchrun started, and return this rank's device: an accelerator, or the CPU."""
    if "RANK" not in os.environ:
        raise SystemExit("Start the ranks with torchrun --nproc-per-node=2 examples/train.py, or with make train.")
    device = torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    # Tensors of an accelerator without collectives of its own (Apple's) would travel through the CPU.
    if accelerator and dist.get_default_backend_for_device(accelerator) != "gloo":
        device = torch.device(accelerator.type, int(os.environ["LOCAL_RANK"]))
        if int(os.environ["LOCAL_WORLD_SIZE"]) > torch.accelerator.device_count():
            raise SystemExit(
                f"{os.environ['LOCAL_WORLD_SIZE']} ranks were started on a machine with "
                f"{torch.accelerator.device_count()} {accelerator.type} devices, and each needs its own: start fewer."
            )
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group(dist.get_default_backend_for_device(device))
    return device


@record  # hands an error to torchrun, whose closing words then name it
def main() -> None:
    """Carry out what the command line says."""
    settings = parse()
    device = start_ranks()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if settings.batch_size % ranks:
        refuse(
            f"A global batch of {settings.batch_size} sequences cannot be divided equally among {ranks} ranks: "
            f"give a --batch-size that is a multiple of {ranks}."
        )
    corpus = data.standard_library()
    meter = memory.PeakMeter(device)
    torch.manual_seed(settings.seed)  # the same initial weights on every rank
    whole = GPT(MODELS[settings.model]).to(device)
    size = sum(parameter.numel() for parameter in whole.parameters())
    if rank == 0:
        kind = f"{ranks} ranks on {device.type}"
        print(f"GPT, {size / 1e6:.1f} million parameters, sharded over {kind}; learns Python's standard library.")
        sys.stdout.flush()
    model = shard(whole, settings.api)
    del whole
    optimizer = new_optimizer(model, settings)

    done = resume(model, optimizer, settings, corpus)
    if done:
        meter.stop()
    if done < settings.steps:
        ended, losses, usage = train(model, optimizer, corpus, settings, done, device, meter)
        if ended:
            if rank == 0:
                print("Told to end: the same command resumes from here.")
            return
        if usage and settings.compare:
            compare(settings, device, losses, usage)
    elif rank == 0:
        print(
            f"All {done} steps are done already. For more: make train STEPS={2 * done} (--steps {2 * done}). "
            f"To start again, remove {settings.directory}."
        )
    loss = evaluate(model, corpus, settings, device)
    if rank == 0:
        print(f"Validation loss: {loss:.3f} nats a byte. Guessing would cost 5.545.")
        file = settings.directory / "comparison.json"
        picture = report.draw(settings.directory, json.loads(file.read_text()) if file.exists() else None)
        print(f"Written: {picture}, metrics.jsonl beside it, and checkpoints.")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
