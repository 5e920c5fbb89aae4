"""The memory of one process, in bytes: what its tensors hold, and its peak.

On an accelerator the peak is that of PyTorch's allocator. On Linux it is sampled while the steps run; memory that the
ranks of a host share is divided among them, so that the ranks' figures add up to the memory of the host.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

ACCOUNT = Path("/proc/self/smaps_rollup")
PARTS = ("Pss_Anon:", "Pss_Shmem:")  # without the pages of program files
SECONDS = 0.01


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    """Add up what this process holds of ``tensors``: of a DTensor, its own shard."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors if tensor is not None)
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def now(device: torch.device) -> int:
    """Return the memory that this process holds at this moment."""
    if device.type != "cpu":
        return torch.accelerator.memory_allocated(device)
    if ACCOUNT.exists():
        fields = (line.split() for line in ACCOUNT.read_text().splitlines())
        return 1024 * sum(int(field[1]) for field in fields if field[0] in PARTS)
    if sys.platform == "win32":
        return 0
    import resource

    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # elsewhere the peak of the process so far
    return highest if sys.platform == "darwin" else 1024 * highest


@dataclass(frozen=True)
class Usage:
    """What one process holds of a model at the end of a step, and its peak, in bytes."""

    parameters: int
    gradients: int
    optimizer_state: int
    peak: int


def usage(model: nn.Module, optimizer: torch.optim.Optimizer, peak: int) -> Usage:
    """Add up the tensors that this process holds; call it while there are gradients."""
    parameters = list(model.parameters())
    return Usage(
        bytes_of(parameters),
        bytes_of(parameter.grad for parameter in parameters),
        bytes_of(value for state in optimizer.state.values() for value in state.values()),
        peak,
    )


class PeakMeter:
    """Measures the most memory that this process takes, beyond what it held when the meter was made.

    On a CPU a thread reads the kernel's account of the process 100 times a second.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self._highest = now(device)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        if device.type == "cpu":
            self._thread.start()
        else:
            torch.accelerator.reset_peak_memory_stats(device)

    def _sample(self) -> None:
        while not self._stopped.wait(SECONDS):
            self._highest = max(self._highest, now(self._device))

    def stop(self) -> int:
        """End the measurement and return the peak in bytes."""
        if self._device.type != "cpu":
            return torch.accelerator.max_memory_allocated(self._device) - self._start
        self._stopped.set()
        self._thread.join()
        return self._highest - self._start
