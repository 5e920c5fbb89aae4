"""Train a small language model, sharded over several ranks: ``make train``, or torchrun on this file.

The path from text to a trained model, in order: :func:`shard` the model, :func:`train` it, :func:`compare` its first
steps with the same steps unsharded, :func:`evaluate` it, and let it :func:`write`. Every rank runs this file; what is
printed and what ``history.py`` writes comes from rank 0.
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

import data
import history
import memory
import optimizer as optimizers
import reference
from fullshard import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    checkpoint,
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

    def gather(self, value: int) -> list[int]:
        """Return a number of each rank."""
        values = torch.zeros(self.ranks, dtype=torch.int64, device=self.device)
        values[self.rank] = value
        dist.all_reduce(values)
        return values.tolist()

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
    start_memory: int

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


def train(run: Run, done: int, preempted: checkpoint.PreemptionHandler) -> reference.Measurement | None:
    """Train from step ``done`` to the last one. Returns the measurement of the first steps if they were among these.

    Checkpoints are written while the next steps run. There is no random state to keep in them: a batch is a function of
    seed and step (``data.py``). A run that is told to end saves what is done.
    """
    settings, place = run.settings, run.place
    first, losses, held = None, [], []
    bar = tqdm(
        total=settings.steps,
        initial=done,
        bar_format="{n_fmt}/{total_fmt} |{bar}| {remaining} left",
        file=sys.stdout,
        disable=place.rank != 0 or not sys.stdout.isatty(),
    )
    if place.rank == 0:
        history.begin(settings.checkpoint_dir, done)
    clock, seconds = time.perf_counter(), []
    for step in range(done, settings.steps):
        run.optimizer.zero_grad()
        batch = data.training_batch(run.corpus, settings.seed, step, settings.batch_size, settings.seq_len)
        loss = loss_of(run.model, place.slice(batch))
        loss.backward()
        norm = optimizers.update(run.model, run.optimizer, settings, step)
        losses.append(place.mean(loss.detach()))
        seconds.append(time.perf_counter() - clock)
        held.append(memory.now(place.device) - run.start_memory)

        count = step + 1
        if done == 0 and count == min(reference.STEPS, settings.steps):
            first = reference.measure(
                run.model, run.optimizer, list(losses), list(held), place.device, run.start_memory
            )
        report(run, count, losses[-1], norm.item(), seconds, place.gather(held[-1]))
        bar.update()
        ends = count == settings.steps or preempted()
        if ends or count % settings.checkpoint_every == 0:
            checkpoint.save(
                settings.checkpoint_dir,
                run.model,
                run.optimizer,
                step=count,
                keep_last=2,
                wait=False,
                state={"run": run.identity},
            )
        if ends:
            break
        clock = time.perf_counter()
    checkpoint.wait_until_finished()
    bar.close()
    return first


def report(run: Run, count: int, loss: float, norm: float, seconds: list[float], held: list[int]) -> None:
    """Write a line of the history for a step, and print one every so many steps: its speed is that of these steps."""
    settings, place = run.settings, run.place
    tokens = settings.batch_size * settings.seq_len
    if place.rank == 0:
        history.add(
            settings.checkpoint_dir,
            step=count,
            loss=loss,
            gradient_norm=norm,
            tokens_per_second=tokens / seconds[-1],
            memory_bytes=held,
        )
    if count % settings.report_every == 0 or count == settings.steps:
        some = seconds[-settings.report_every :]
        place.say(
            f"step {count:4d}/{settings.steps}  loss {loss:.3f}  {tokens * len(some) / sum(some):,.0f} tokens/s  "
            f"gradient norm {norm:.2f}  memory of a rank {memory.readable(max(held))}"
        )


def compare(run: Run, first: reference.Measurement) -> None:
    """Train the first steps unsharded on rank 0, and say how the two runs differ. Every rank calls this."""
    settings, place = run.settings, run.place
    ranks: list[reference.Measurement] = [first] * place.ranks
    dist.all_gather_object(ranks, first)
    if place.rank == 0:
        unsharded = reference.run(settings, place.device, place.ranks, len(first.losses))
        history.compare(settings.checkpoint_dir, ranks, unsharded)
        place.say(f"\nThe first {len(first.losses)} steps, sharded and not:\n")
        place.say(reference.table(first, unsharded, place.ranks))
    dist.barrier()


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
    newest = checkpoint.latest(settings.checkpoint_dir)
    if newest is None:
        if settings.resume == "always":
            raise Refusal(f"--resume always, and there is no checkpoint in {settings.checkpoint_dir}.")
        return 0
    if settings.resume == "never":
        raise Refusal(
            f"--resume never, and {newest.path} is there already: remove it or name another --checkpoint-dir."
        )
    found = newest.state()["run"]
    for name, ours in run.identity.items():
        if found[name] != ours:
            raise Refusal(
                f"{newest.path} was trained with {name} {found[name]}, and this run has {name} {ours}: give the same "
                f"to go on from it, or name another --checkpoint-dir to begin anew."
            )
    state = checkpoint.load(settings.checkpoint_dir, run.model, run.optimizer)
    assert state is not None
    run.place.say(f"Going on from step {state['step']}, {newest.path}.")
    return int(state["step"])


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
    run = Run(settings, place, corpus, model, optimizers.build(model, settings), start_memory)
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
    with checkpoint.PreemptionHandler() as preempted:
        first = train(run, done, preempted) if done < settings.steps else None
        if preempted():
            place.say("Told to end: the same command goes on from here.")
            return
    if first and settings.compare:
        compare(run, first)
    loss = evaluate(run)
    place.say(f"\nValidation loss: {loss:.3f} nats a byte. (Guessing costs 5.545.)")
    if settings.sample_tokens:
        place.say(f"\nWhat the model writes after {settings.prompt!r}:\n\n{write(run)}")
    if place.rank == 0 and history.read(settings.checkpoint_dir):
        picture = history.draw(settings.checkpoint_dir)
        place.say(f"\nThe history of the run: {picture.with_name('metrics.jsonl')}, a line for each step.")
        place.say(f"Its curves:             {picture}")
    dist.barrier()


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


if __name__ == "__main__":
    start()
