"""Train a small language model, sharded over several ranks: ``make train``, or torchrun on this file.

The path from text to a trained model, in order: :func:`shard` the model, :func:`train` it, compare its first steps
with the same steps unsharded, :func:`evaluate` it, and let it :func:`write`. Every rank runs this file; what is printed
comes from rank 0.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from tqdm import tqdm

import checkpoint
import data
import memory
import optimizer as optimizers
import reference
from fullshard import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from fullshard.wrap import ModuleWrapPolicy
from model import GPT, MODELS, Block, loss_of
from settings import Refusal, Settings, parse

VALIDATION_BATCHES = 16


@dataclass(frozen=True)
class Place:
    """Where this process stands among the ranks, and the device that it computes on."""

    rank: int
    ranks: int
    device: torch.device

    def slice(self, batch: Tensor) -> Tensor:
        """Return this rank's equal part of a global batch, on its device."""
        return batch.chunk(self.ranks)[self.rank].to(self.device)

    def mean(self, value: Tensor) -> float:
        """Average a scalar over the ranks. A mean over equal slices is the mean over the global batch."""
        dist.all_reduce(value)
        return value.item() / self.ranks

    def say(self, text: str = "") -> None:
        """Print on rank 0, above the progress bar if there is one."""
        if self.rank == 0:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()


@dataclass(frozen=True)
class Run:
    """What is trained, on what, by which settings, and where."""

    settings: Settings
    place: Place
    corpus: data.Corpus
    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def identity(self) -> dict[str, str | int]:
        """What must be the same for this run to go on from a checkpoint."""
        return {**self.settings.identity, "text": self.corpus.fingerprint}


def shard(model: GPT, mesh: DeviceMesh, settings: Settings) -> nn.Module:
    """Shard each block, then the root, which takes what is left: the embedding, which is the head too, and the norm.

    From here on a rank holds its part of every parameter, and a block is whole only while it computes. Both front ends
    do the same: ``fully_shard`` changes the model, and the wrapper puts modules around it and its blocks.
    """
    low = torch.bfloat16 if settings.precision == "bf16" else None
    if settings.api == "wrapper":
        keeps = settings.reshard_after_forward is False
        return FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP if keeps else ShardingStrategy.FULL_SHARD,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            mixed_precision=MixedPrecision(low, torch.float32 if low else None, cast_forward_inputs=True),
            device_mesh=mesh,
        )
    apply = partial(
        fully_shard,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None),
        reshard_after_forward=settings.reshard_after_forward,
    )
    for block in model.blocks:
        apply(block)
    apply(model)
    return model


def train(run: Run, done: int, start_memory: int) -> reference.Measurement | None:
    """Train from step ``done`` to the last one. Returns the measurement of the first steps if they were among these."""
    settings, place = run.settings, run.place
    first, losses = None, []
    terminal = sys.stdout.isatty()
    every = 5 if terminal else 20
    bar = tqdm(
        total=settings.steps,
        initial=done,
        bar_format="{n_fmt}/{total_fmt} |{bar}| {remaining} left{postfix}",
        file=sys.stdout,
        disable=place.rank != 0 or not terminal,
    )
    clock, shown = time.perf_counter(), done
    for step in range(done, settings.steps):
        run.optimizer.zero_grad()
        batch = data.training_batch(run.corpus, settings.seed, step, settings.batch_size, settings.seq_len)
        loss = loss_of(run.model, place.slice(batch))
        loss.backward()
        norm = optimizers.update(run.model, run.optimizer, settings, step)
        losses.append(place.mean(loss.detach()))

        count = step + 1
        if done == 0 and count == min(reference.STEPS, settings.steps):
            first = reference.measure(run.model, run.optimizer, list(losses), place.device, start_memory)
        if count % every == 0 or count == settings.steps:
            speed = (count - shown) * settings.batch_size * settings.seq_len / (time.perf_counter() - clock)
            report = (
                f"loss {losses[-1]:.3f}  {speed:,.0f} tokens/s  gradient norm {norm.item():.2f}  "
                f"{memory.readable(memory.now(place.device))} a rank"
            )
            bar.set_postfix_str(report, refresh=False)
            if not terminal:
                place.say(f"step {count:4d}/{settings.steps}  {report}")
            clock, shown = time.perf_counter(), count
        bar.update()
        if count % settings.checkpoint_every == 0 or count == settings.steps:
            checkpoint.save(settings.checkpoint_dir, run.model, run.optimizer, count, run.identity)
    bar.close()
    return first


@torch.no_grad()
def evaluate(run: Run) -> float:
    """Return the loss on text that the model was not trained on, in nats per byte."""
    settings, place = run.settings, run.place
    batches = data.validation_batches(run.corpus, VALIDATION_BATCHES, settings.batch_size, settings.seq_len)
    return sum(place.mean(loss_of(run.model, place.slice(batch))) for batch in batches) / len(batches)


@torch.no_grad()
def write(run: Run) -> str:
    """Let the model go on from the prompt, byte by byte. Every rank takes part, and draws the same bytes."""
    settings = run.settings
    generator = torch.Generator().manual_seed(settings.seed)
    text = torch.tensor([list(settings.prompt.encode())], device=run.place.device)
    for _ in range(settings.sample_tokens):
        logits = run.model(text[:, -settings.seq_len :])[0, -1]
        drawn = torch.multinomial(torch.softmax(logits.cpu() / 0.8, dim=0), 1, generator=generator)
        text = torch.cat((text, drawn[None].to(text.device)), dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")


def resume(run: Run) -> int:
    """Load the checkpoint that the settings name, if there is one, and return the step that it was made at."""
    settings = run.settings
    path = checkpoint.latest(settings.checkpoint_dir)
    if path is None:
        if settings.resume == "always":
            raise Refusal(f"--resume always, and there is no checkpoint in {settings.checkpoint_dir}.")
        return 0
    if settings.resume == "never":
        raise Refusal(f"--resume never, and {path} is there already: remove it or name another --checkpoint-dir.")
    found = checkpoint.describe(path)
    for name, ours in run.identity.items():
        if found[name] != ours:
            raise Refusal(
                f"{path} was trained with {name} {found[name]}, and this run has {name} {ours}: give the same to go on "
                f"from it, or name another --checkpoint-dir to begin anew."
            )
    checkpoint.load(path, run.model, run.optimizer)
    run.place.say(f"Going on from {path}.")
    return int(found["step"])


def join(settings: Settings) -> Place:
    """Meet the other ranks that torchrun started, and take a device: one accelerator each, or the CPU."""
    if "RANK" not in os.environ:
        raise SystemExit("Start the ranks with torchrun --nproc-per-node=2 examples/train.py, or with make train.")
    device = torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    # An accelerator whose tensors would travel through the CPU all the same (Apple's) gains nothing here.
    if settings.device == "auto" and accelerator and dist.get_default_backend_for_device(accelerator) != "gloo":
        index, found = int(os.environ["LOCAL_RANK"]), torch.accelerator.device_count()
        if int(os.environ["LOCAL_WORLD_SIZE"]) > found:
            raise Refusal(
                f"{os.environ['LOCAL_WORLD_SIZE']} ranks were started on a machine with {found} {accelerator.type} "
                f"devices, and each needs its own: start {found}, or give --device cpu."
            )
        device = torch.device(accelerator.type, index)
        torch.accelerator.set_device_index(index)
    dist.init_process_group(dist.get_default_backend_for_device(device))
    return Place(dist.get_rank(), dist.get_world_size(), device)


def main(settings: Settings, place: Place) -> None:
    """Carry out the settings, from reading the text to writing some."""
    if settings.batch_size % place.ranks:
        raise Refusal(
            f"A global batch of {settings.batch_size} sequences cannot be divided equally among {place.ranks} ranks: "
            f"give a --batch-size that is a multiple of {place.ranks}."
        )
    corpus = data.standard_library()
    start_memory = memory.now(place.device)
    torch.manual_seed(settings.seed)  # the same first weights on every rank
    whole = GPT(MODELS[settings.model]).to(place.device)
    size = sum(parameter.numel() for parameter in whole.parameters())
    model = shard(whole, init_device_mesh(place.device.type, (place.ranks,)), settings)
    run = Run(settings, place, corpus, model, optimizers.build(model, settings))
    place.say(
        f"{settings.model}: {size / 1e6:.1f} million parameters on {place.device.type}, {settings.precision}, "
        f"{settings.api}; "
        f"number of ranks: {place.ranks}.\n"
        f"Text: Python's standard library, {len(corpus.training) / 1e6:.1f} MB to train on and "
        f"{len(corpus.validation) / 1e6:.1f} MB to validate with."
    )

    done = resume(run)
    if done >= settings.steps:
        place.say(
            f"No step left to do: {done} of {settings.steps} are done. For more, give --steps {2 * done} "
            f"(make train STEPS={2 * done}); to begin anew, remove {settings.checkpoint_dir}."
        )
    first = train(run, done, start_memory) if done < settings.steps else None
    if first and settings.compare:
        if place.rank == 0:
            unsharded = reference.run(settings, place.device, place.ranks, len(first.losses))
            place.say(f"\nThe first {len(first.losses)} steps, sharded and not:\n")
            place.say(reference.table(first, unsharded, place.ranks))
        dist.barrier()

    loss = evaluate(run)
    place.say(f"\nValidation loss: {loss:.3f} nats a byte. (Guessing costs 5.545.)")
    if settings.sample_tokens:
        place.say(f"\nWhat the model writes after {settings.prompt!r}:\n\n{write(run)}")


@record  # hands an error to torchrun, whose closing words then name it
def start() -> None:
    """Meet the other ranks and carry out what the command line says."""
    settings = parse()
    place = join(settings)
    try:
        main(settings, place)
    except Refusal:
        dist.barrier()
        if place.rank == 0:
            raise
        sys.exit(2)  # every rank refuses alike: it is enough that one says so
    dist.destroy_process_group()
    time.sleep(0.1)  # a thread of gloo needs the interpreter to drop the last tensor, and aborts if it has ended


if __name__ == "__main__":
    start()
