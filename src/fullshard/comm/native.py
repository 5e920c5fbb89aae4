"""Collectives in memory that the process group or the hardware brings.

Zero-copy transfers need buffers that the communicator knows. Owns the two ways to get such memory, from the process
group's own allocator and as symmetric memory; how buffers move stays that of the plain collectives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm.collective import CollectiveTransport
from fullshard.policies import AllGather, Comm, ReduceScatter
from fullshard.torch_private import all_gather_single, allocating_backend, reduce_scatter_single, symm_mem


def process_group_memory(group: dist.ProcessGroup | None) -> CollectiveTransport:
    """Collectives in memory that ``group`` allocates.

    Raises:
        RuntimeError: at the first allocation, if the group has no allocator for the device.
    """
    memory = _ProcessGroupMemory(group)
    return CollectiveTransport(_GatherIn(memory), _ReduceIn(memory))


def symmetric_memory(group: dist.ProcessGroup | None, backend: str = "NCCL") -> CollectiveTransport:
    """Collectives in symmetric memory of ``backend``.

    Raises:
        ValueError: another backend than NCCL.
    """
    if backend != "NCCL":
        raise ValueError(f"symmetric memory is supported with the NCCL backend, got {backend!r}")
    memory = _SymmetricMemory(group)
    return CollectiveTransport(_GatherIn(memory), _ReduceIn(memory))


class _ProcessGroupMemory:
    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group: Any = group

    def allocate(self, size: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        backend = allocating_backend(self._group, device)
        if backend is None:
            raise RuntimeError(
                f"the process group has no allocator for {device}: set_allocate_memory_from_process_group_for_comm "
                f"needs a backend with one, such as NCCL"
            )
        return backend.allocate_tensor(math.prod(size), dtype=dtype, device=device).view(tuple(size))

    def make_known(self, *tensors: torch.Tensor) -> None:
        """Does nothing: the process group knows what it allocated."""


class _SymmetricMemory(_ProcessGroupMemory):
    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__(group)
        self._known: set[int] = set()

    def allocate(self, size: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with torch.cuda.use_mem_pool(symm_mem.get_mem_pool(device)):
            return torch.empty(tuple(size), dtype=dtype, device=device)

    def make_known(self, *tensors: torch.Tensor) -> None:
        """Every rank makes its memory known to the others, once for each piece."""
        for tensor in tensors:
            if tensor.data_ptr() not in self._known:
                symm_mem.rendezvous(tensor, group=self._group)
                self._known.add(tensor.data_ptr())


class _In(Comm):
    def __init__(self, memory: _ProcessGroupMemory) -> None:
        self._memory = memory

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._memory.allocate(size, dtype, device)


class _GatherIn(_In, AllGather):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._memory.make_known(output_tensor)
        return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class _ReduceIn(_In, ReduceScatter):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._memory.make_known(input_tensor, output_tensor)
        return reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
