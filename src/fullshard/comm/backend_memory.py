"""Memory for collectives that a process group or the hardware brings: the backend then copies nothing.

Owns how it is allocated, and how ranks make it known to each other. It leaves the collectives to the transport.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fullshard.torch_private import CAN_SWAP_MEMORY, Collective, allocating_backend, symm_mem


class BackendMemory(NamedTuple):
    """Memory for the backend's own collectives; ``make_known`` tells the other ranks of tensors before their use."""

    allocate: Callable[..., torch.Tensor]
    make_known: Callable[..., object] = lambda *_: None

    def call(self, collective: Collective, output: torch.Tensor, source: torch.Tensor) -> dist.Work | None:
        self.make_known(output, source)
        return collective(output, source)


def process_group_memory(group: Any) -> BackendMemory:
    """Memory that ``group`` allocates; its backend must have an allocator for the device."""

    def allocate(size: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        backend = allocating_backend(group, device)
        assert backend is not None, f"{group} has no allocator for {device}"
        return backend.allocate_tensor(math.prod(size), dtype=dtype, device=device).view(tuple(size))

    return BackendMemory(allocate)


def symmetric_memory(group: Any, backend: str = "NCCL") -> BackendMemory:
    """Symmetric memory of NCCL, from now on that of the whole process. All ranks must call it."""
    if backend != "NCCL":
        raise ValueError(f"symmetric memory is supported with the NCCL backend, got {backend!r}")
    if not CAN_SWAP_MEMORY:
        raise NotImplementedError(
            "symmetric memory needs storages that exchange their memory, which torch has from 2.12 on: update torch"
        )
    symm_mem.set_backend("NCCL")
    if group is not None:
        dist.barrier(group)  # makes the communicator, which a rendezvous needs

    def allocate(size: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with torch.cuda.use_mem_pool(symm_mem.get_mem_pool(device)):
            return torch.empty(tuple(size), dtype=dtype, device=device)

    def make_known(*tensors: torch.Tensor) -> None:
        """Every rank makes its memory known to the others. Torch remembers what is, and forgets what is freed."""
        for tensor in tensors:
            symm_mem.rendezvous(tensor, group=group)

    return BackendMemory(allocate, make_known)
