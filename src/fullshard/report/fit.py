"""Whether a rank's memory fits into its device, and what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fullshard.report.meta_step import Phase
from fullshard.text import bytes_text


@dataclass(frozen=True)
class Fit:
    """Whether the largest phase of a step fits into the memory of a device. Sizes are in bytes.

    Attributes:
        device_memory: the memory of the device.
        needed: what the largest phase needs there.
        phase: the name of that phase.
        counts_activations: whether activations are in it.
    """

    device_memory: int
    needed: int
    phase: str
    counts_activations: bool

    @property
    def fits(self) -> bool:
        return self.needed <= self.device_memory

    @property
    def missing(self) -> int:
        """The bytes that are missing, 0 if it fits."""
        return max(0, self.needed - self.device_memory)

    def __str__(self) -> str:
        device = f"{self.device_memory / 1e9:.4g} GB ({bytes_text(self.device_memory)})"
        rest = bytes_text(abs(self.device_memory - self.needed))
        answer = f"yes, with {rest} left" if self.fits else f"no, short by {rest}"
        activations = "activations, " if not self.counts_activations else ""
        return (
            f"Fits in {device} of device memory: {answer}. The largest phase ({self.phase}) takes "
            f"{bytes_text(self.needed)}. Not counted: {activations}temporary memory of the optimizer, of kernels and "
            f"of the communication backend, the context of the device, fragmentation"
        )


def fit_into(device_memory: int, phases: Sequence[Phase], counts_activations: bool) -> Fit:
    """Compares the largest phase with the memory of a device."""
    largest = max(phases, key=lambda phase: phase.on_device)
    return Fit(device_memory, largest.on_device, largest.name, counts_activations)


def memory_of(device: torch.device) -> int | None:
    """The memory of an accelerator in bytes; ``None`` for the CPU, and for a GPU that is not here."""
    return None if device.type in ("cpu", "meta") else torch.accelerator.get_memory_info(device)[1]
