"""Memory of one rank, in bytes: what its tensors hold, and what its process or its accelerator takes.

On an accelerator the numbers are those of PyTorch's allocator. On a CPU they are the process's resident memory, in
which PyTorch itself is included.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    """Add up what this rank holds of ``tensors``: of a DTensor, its own shard."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors if tensor is not None)
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def kept_for_backward(forward: Callable[[], Tensor], parameters: Iterable[Tensor]) -> int:
    """Return how much a call of ``forward`` keeps for its backward: the activations, without the parameters."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = forward()  # as long as there is an output, what was kept has its memory
    for parameter in parameters:
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    del output
    return sum(kept.values())


def now(device: torch.device) -> int:
    """Return the memory that is taken at this moment."""
    if device.type != "cpu":
        return torch.accelerator.memory_allocated(device)
    return _process("VmRSS")


def peak(device: torch.device) -> int:
    """Return the most that was taken since the process began."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    return _process("VmHWM")


def readable(size: float) -> str:
    """Write a number of bytes as MiB."""
    return f"{size / 2**20:,.1f} MiB"


def _process(field: str) -> int:
    """Read one line of the kernel's account of this process; elsewhere than on Linux, its peak stands for all of them.

    Not ``ru_maxrss`` on Linux: a process starts with its parent's there.
    """
    if (status := Path("/proc/self/status")).exists():
        for line in status.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
