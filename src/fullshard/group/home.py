"""Where the chunks of a group's parameters lie between uses, with their gradients and the optimizer's state.

    home          chunks                        before a gather            ``param.grad``
    Home          memory of the device          cast, if dtypes differ     the reduced chunk
    HostHome      memory of the CPU             copied to the device       copied to the CPU
    DiskHome      a file                        read, also ahead           written while the backward goes on

A policy offloads all parameters of a group, or a share of them; the others stay on the device. Owns which these are.
Memory that the ranks of a host share is laid out as the full buffer, see :class:`~fullshard.group.shard.SharedChunks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from fullshard.comm.transport import Transport
from fullshard.device import CPU, host_memory, is_host
from fullshard.disk.file import DiskFile, file_in
from fullshard.disk.tensor import DiskTensor
from fullshard.group.mesh import DataMesh
from fullshard.group.parameter import ShardedParameter
from fullshard.offload_policy import CPUOffloadPolicy, DiskOffloadPolicy, OffloadPolicy

#: Bytes of a parameter from which it is worth a file.
_LEAST_ON_DISK = 1 << 16


@dataclass(eq=False)
class Home:
    """Memory of the device that computes."""

    device: torch.device
    parameters: frozenset[int]  # those that lie here with their gradients, by their index in the group
    state: frozenset[int]  # those whose optimizer state lies here
    pins: bool = False  # whether memory of the CPU is page-locked
    #: Whether gradients are copied, so that a small one does not keep the memory of all that were reduced with it.
    copies: bool = False
    disk: DiskFile | None = None  # the file in which all of it is
    may_share: ClassVar[bool] = True  # whether chunks may lie in memory that ranks share
    is_remote: bool = False  # whether the CPU has parameters, and a device computes: gradients arrive later

    def moves_state(self, index: int) -> bool:
        """Whether the optimizer's state of a parameter comes to the device for each step, and its values stay there."""
        return False

    def allocate(self, nbytes: int, transport: Transport) -> torch.Tensor:
        """Zeros for sections (1-D, uint8), or a tensor on meta if their values do not lie in memory."""
        return transport.private.allocate(nbytes, self.device).zero_()

    def chunk(self, param: ShardedParameter, view: torch.Tensor) -> torch.Tensor:
        """The chunk of a parameter, which has a ``view`` of what was allocated."""
        return view

    def store(self, param: ShardedParameter, gradient: torch.Tensor) -> torch.Tensor:
        """A reduced gradient as it is kept here: a copy, or the gradient itself if no copy is needed."""
        return gradient.clone() if self.copies else gradient


class HostHome(Home):
    """Memory of the CPU."""

    def moves_state(self, index: int) -> bool:
        return index in self.state and index not in self.parameters and not is_host(self.device)

    def allocate(self, nbytes: int, transport: Transport) -> torch.Tensor:
        return host_memory((nbytes,), torch.uint8, self.device, self.pins).zero_()


class DiskHome(Home):
    """A file."""

    may_share = False

    def allocate(self, nbytes: int, transport: Transport) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    def chunk(self, param: ShardedParameter, view: torch.Tensor) -> torch.Tensor:
        assert self.disk is not None
        return DiskTensor.like(self.disk, view, f"parameter '{param.name}'")

    def store(self, param: ShardedParameter, gradient: torch.Tensor) -> torch.Tensor:
        assert self.disk is not None
        if isinstance(gradient, DiskTensor):
            return gradient
        return DiskTensor.holding(self.disk, gradient.to(CPU), f"the gradient of '{param.name}'")


def homes_of(
    policy: OffloadPolicy, params: Sequence[ShardedParameter], data: DataMesh, device: torch.device
) -> tuple[Home, Home]:
    """The home on the device of a group's parameters, and that of what a policy offloads.

    Raises:
        ValueError: a parameter cannot be on a disk.
        DiskError: there is none.
    """
    away, everything = Home(device, frozenset(), frozenset()), frozenset(range(len(params)))
    if isinstance(policy, (CPUOffloadPolicy, DiskOffloadPolicy)):
        least = _LEAST_ON_DISK if isinstance(policy, DiskOffloadPolicy) else 0
        offloaded, state = _first(params, policy.parameters, least), _first(params, policy.optimizer_state, least)
        if isinstance(policy, DiskOffloadPolicy):
            file = file_in(Path(policy.directory), policy.direct, policy.staging_bytes)
            away = DiskHome(device, offloaded, state, disk=file)
            for param in (params[index] for index in state if data.shards_replicas or params[index].extends):
                why = "outer_zero_stage=1 shards again" if data.shards_replicas else "has a gather of its own"
                raise ValueError(
                    f"DiskOffloadPolicy cannot offload parameter '{param.name}', which {why}: use CPUOffloadPolicy, or "
                    f"OffloadPolicy() for its module"
                )
        else:
            is_remote = bool(offloaded) and not is_host(device)
            away = HostHome(device, offloaded, state, policy.pin_memory, is_remote=is_remote)
    return Home(device, everything - away.parameters, everything - away.state, copies=away.disk is not None), away


def _first(params: Sequence[ShardedParameter], share: float, least: int) -> frozenset[int]:
    """The first parameters of ``least`` bytes or more that have at least a ``share`` of the bytes of all such ones."""
    sizes = {index: param.shape.numel() * param.dtype.itemsize for index, param in enumerate(params)}
    sizes = {index: size for index, size in sizes.items() if size >= least}
    chosen, room = set[int](), share * sum(sizes.values())
    for index, size in sizes.items():
        if room > 0:
            chosen.add(index)
            room -= size
    return frozenset(chosen)
