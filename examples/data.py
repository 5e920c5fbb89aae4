"""The text that the model learns: the source of Python's own standard library, so that nothing is downloaded.

Files are split into training and validation text by a hash of their path, so that no file is in both and the split
is the same on every machine. A batch depends on the seed and the step alone: a run that is resumed, or that continues
on another number of ranks, trains on the same bytes as an uninterrupted run.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
VALIDATION_SHARE = 0.05


@dataclass(frozen=True)
class Corpus:
    """The bytes of the text, as two 1-D uint8 tensors, and a fingerprint of both."""

    training: Tensor
    validation: Tensor
    fingerprint: str


def standard_library() -> Corpus:
    """Read the ``.py`` files of the standard library of the Python that is running, in the order of their paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = set(folders) - LEFT_OUT  # what is left out is not walked through
        names += [Path(folder, file).relative_to(root).as_posix() for file in files if file.endswith(".py")]
    training, validation, fingerprint = bytearray(), bytearray(), hashlib.sha256()
    for name in sorted(names):
        text = (root / name).read_bytes()
        (validation if _share(name) < VALIDATION_SHARE else training).extend(text)
        fingerprint.update(text)
    if not validation:
        raise RuntimeError(
            f"Found {len(names)} .py files under {root}, the standard library: too little text to train on."
        )
    return Corpus(
        torch.frombuffer(training, dtype=torch.uint8),
        torch.frombuffer(validation, dtype=torch.uint8),
        fingerprint.hexdigest()[:16],
    )


def training_batch(corpus: Corpus, seed: int, step: int, size: int, length: int) -> Tensor:
    """Return the global batch of one step: windows at random places, int64, of shape (size, length + 1).

    Every rank computes all of it and takes its slice; the extra byte is the target of the last position.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(corpus.training) - length, (size,), generator=generator)
    return _windows(corpus.training, starts, length)


def validation_batches(corpus: Corpus, count: int, size: int, length: int) -> list[Tensor]:
    """Return ``count`` global batches of windows spread evenly over the validation text, the same in every run."""
    starts = torch.linspace(0, len(corpus.validation) - length - 1, count * size).long()
    return [_windows(corpus.validation, some, length) for some in starts.split(size)]


def _windows(text: Tensor, starts: Tensor, length: int) -> Tensor:
    return text[starts[:, None] + torch.arange(length + 1)].long()


def _share(name: str) -> float:
    """Map a path to a number in [0, 1) that looks random and never changes."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) / 2**32
