"""Train a small language model that survives the loss of processes, on CPUs.

Start the processes one by one, so that the end of one leaves the others alone, and kill any of them::

    for each in 1 2 3 4; do python examples/elastic.py & done

The last lines have the same digests, whatever was killed. The same command joins the running job; SIGTERM lets a
process finish its step and leave. ``torchrun --nnodes=1:4 -m fullshard.elastic.keep examples/elastic.py`` restarts it.
"""

from __future__ import annotations

import argparse
import hashlib
from functools import partial
from pathlib import Path

import torch
from torch import nn

import data
from fullshard import checkpoint, fully_shard
from fullshard.elastic import Elastic, MicroBatch
from model import GPT, MODELS, loss_of

SEQUENCES, LENGTH = 2, 64  # of a micro-batch


def batch_of(corpus: data.Corpus, micro_batch: MicroBatch, micro_batches: int) -> torch.Tensor:
    """Return a micro-batch, int64, of shape (sequences, length + 1): it belongs to a logical rank, not to a process."""
    parts = micro_batch.size * micro_batches
    whole = data.training_batch(corpus, 0, micro_batch.step, parts * SEQUENCES, LENGTH)
    return whole.chunk(parts)[micro_batch.rank * micro_batches + micro_batch.number]


def digest_of(model: nn.Module) -> str:
    """Return a digest of all bits of this process's shard."""
    shard = b"".join(values.to_local().numpy().tobytes() for values in model.state_dict().values())
    return hashlib.sha256(shard).hexdigest()[:16]


def main() -> None:
    """Train, whatever happens to other processes."""
    parser = argparse.ArgumentParser(description="Trains a small language model that survives the loss of processes.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--micro-batches", type=int, default=2, help="of each logical rank in a step")
    parser.add_argument("--directory", type=Path, default=Path("runs/elastic"), help="where a new process finds others")
    parser.add_argument("--save-every", type=int, help="steps; a job that begins goes on from the last checkpoint")
    parser.add_argument("--processes", type=int, default=4, help="that begin the job")
    options = parser.parse_args()

    elastic = Elastic(replicas=2, directory=options.directory, processes=options.processes)
    corpus = data.standard_library()
    torch.manual_seed(0)  # the same initial weights on every process
    model = GPT(MODELS["small"])
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after sharding
    saved = options.directory / "checkpoints", model, optimizer
    load = partial(checkpoint.load, *saved, state={"elastic": elastic}) if options.save_every else None
    elastic.begin(model, optimizer, micro_batches=options.micro_batches, load=load)

    for step in elastic.steps(options.steps):
        with step:
            for micro_batch in step:
                loss = loss_of(model, batch_of(corpus, micro_batch, options.micro_batches))
                (loss / options.micro_batches).backward()  # gradients of micro-batches add up
                where = f"process {elastic.rank}, step {step.number + 1}, logical rank {micro_batch.rank}"
                print(f"{where}: {loss:.4f}", flush=True)
            step.clip_grad_norm_(1.0)
            optimizer.step()
        if options.save_every and elastic.step % options.save_every == 0:
            elastic.save(partial(checkpoint.save, *saved, step=elastic.step, keep_last=2, state={"elastic": elastic}))
    print(f"process {elastic.rank}, step {elastic.step}, shard {elastic.shard} has the digest {digest_of(model)}")
    elastic.close()


if __name__ == "__main__":
    main()
