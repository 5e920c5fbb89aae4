"""What a run is asked to do: the flags of the command line, and the defaults of each model.

The settings are the same on every rank and are decided before anything is built. What they ask for that cannot be done
is a :class:`Refusal`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from model import MODELS

#: Enough to see the loss fall: one to two minutes on two cores for ``small``, about ten for ``base``.
STEPS = {"small": 150, "base": 200}


class Refusal(Exception):
    """The settings ask for what cannot be done here. Every rank raises it alike."""


@dataclass(frozen=True)
class Settings:
    """One field for each flag; see :func:`parse`."""

    model: str
    steps: int
    batch_size: int
    seq_len: int
    lr: float
    seed: int
    precision: str
    api: str
    reshard_after_forward: bool | int | None
    device: str
    checkpoint_dir: Path
    report_every: int
    checkpoint_every: int
    resume: str
    compare: bool
    sample_tokens: int
    prompt: str

    @property
    def identity(self) -> dict[str, str | int]:
        """The settings that a run cannot change when it goes on from a checkpoint: those that decide model and data."""
        return {"model": self.model, "seq-len": self.seq_len, "batch-size": self.batch_size, "seed": self.seed}


def parse(arguments: list[str] | None = None) -> Settings:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node=RANKS examples/train.py",
        description="Train a byte-level GPT on the source of Python's standard library, sharded over the ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", choices=sorted(MODELS), default="small", help="how large a model")
    add("--steps", type=_positive, help=f"train up to this step (default: {STEPS})", default=argparse.SUPPRESS)
    add("--batch-size", type=_positive, default=16, help="sequences a step, over all ranks together")
    add("--seq-len", type=_positive, default=128, help="bytes of context")
    add("--lr", type=float, default=1e-3, help="learning rate, after a warm-up of 40 steps")
    add("--seed", type=int, default=0, help="decides the first weights, the batches and the sample")
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="of the forward and backward computation")
    add("--api", choices=["fully_shard", "wrapper"], default="fully_shard", help="which front end of fullshard")
    add(
        "--reshard-after-forward",
        type=_reshard,
        default="auto",
        metavar="{auto,yes,no,N}",
        help="give a block's weights back between forward and backward; N: keep them on N ranks each",
    )
    add("--device", choices=["auto", "cpu"], default="auto", help="auto: one accelerator a rank where there are any")
    add(
        "--checkpoint-dir",
        type=Path,
        help="for checkpoints, and the history of the run (default: runs/MODEL)",
        default=argparse.SUPPRESS,
    )
    add("--report-every", type=_positive, default=10, help="steps between two lines of the report")
    add("--checkpoint-every", type=_positive, default=100, help="steps between checkpoints; the last step has one")
    add("--resume", choices=["auto", "always", "never"], default="auto", help="go on from the checkpoint, if any")
    add("--compare", action=argparse.BooleanOptionalAction, default=True, help="run the first steps unsharded as well")
    add("--sample-tokens", type=int, default=200, help="bytes of text to write at the end")
    add("--prompt", default="def ", help="how that text begins")
    flags = vars(parser.parse_args(arguments))
    flags.setdefault("steps", STEPS[flags["model"]])
    flags.setdefault("checkpoint_dir", Path("runs") / flags["model"])
    if flags["api"] == "wrapper" and not isinstance(flags["reshard_after_forward"], bool | None):
        parser.error("--reshard-after-forward N is for --api fully_shard: the wrapper knows yes and no")
    return Settings(**flags)


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def _reshard(text: str) -> bool | int | None:
    words: dict[str, bool | None] = {"auto": None, "yes": True, "no": False}
    if text in words:
        return words[text]
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither auto, yes, no nor a number of ranks")
