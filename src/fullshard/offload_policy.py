"""What lies elsewhere than on the device while it is not used: settings that users pass to ``fully_shard``."""

from __future__ import annotations

import os
from dataclasses import dataclass

from fullshard.policies import Checked, expect, local_path

#: The names that :mod:`fullshard` exports.
__all__ = ["CPUOffloadPolicy", "DiskOffloadPolicy", "OffloadPolicy"]


@dataclass(frozen=True)
class OffloadPolicy:
    """Offloads nothing. The default, and the base of policies that offload."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy, Checked):
    """Keeps parameters, gradients and optimizer state in CPU memory while they are not used.

    ``parameters=False``, which PyTorch's policy lacks, offloads the optimizer's state alone: it is copied to the device
    for a step and back after it. A number offloads a part: the first parameters of a group that have at least this
    share of its bytes. The optimizer steps on the CPU for these.

    Args:
        pin_memory: whether this memory is page-locked, so that copies are faster and overlap with computation. Other
            processes cannot use locked pages: set ``False`` where CPU memory is scarce.
        parameters: whether to keep sharded parameters and their gradients on the CPU, or the share to keep there.
        optimizer_state: whether to keep the optimizer's state on the CPU, or of which share of the parameters. That of
            parameters on the CPU is there too.

    Raises:
        TypeError: a field is neither ``True`` nor ``False``, nor a share where one may be given.
        ValueError: a share is not between 0 and 1; or it would offload nothing, or parameters without their
            optimizer's state. From ``fully_shard``, a process group without a CPU backend on an accelerator.

    Ranks: each for itself, alike.
    """

    pin_memory: bool = True
    parameters: bool | float = True
    optimizer_state: bool | float = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_shares(self)


@dataclass(frozen=True)
class DiskOffloadPolicy(OffloadPolicy, Checked):
    """Keeps parameters, gradients and optimizer state in a file while they are not used. It needs no accelerator.

    Parameters are read ahead in the order in which the last step used them. An optimizer steps on a part of them at a
    time, while threads read the next part and write the last one back. Every block is compared with its checksum when
    it is read. The idea is ZeRO-Infinity (https://arxiv.org/abs/2104.07857).

    The file has no name: the system removes it when the process ends, also if it is killed. Parameters of less than
    64 KiB stay in memory. Ranks of one host do not share the memory of parameters that are on a disk.

    Args:
        directory: where each rank makes its file; made if it is missing. A disk of the host, not one that others share,
            and not a file system in memory.
        parameters: whether sharded parameters and their gradients are on the disk, or which share: the first
            parameters of a group that have at least this share of its bytes.
        optimizer_state: whether the optimizer's state is on the disk, or of which share of the parameters. That of
            parameters on the disk is there too.
        staging_bytes: memory for what the optimizer's step has read and not yet written back. It holds at least two
            blocks of 4 MiB of each tensor that a step reads. The heap may keep as much of what was freed.
        direct: whether reads and writes bypass the page cache, where the file system can do that.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a share is not between 0 and 1, or it would offload nothing, or parameters without their
            optimizer's state; ``staging_bytes`` is below 1. From ``fully_shard``, what cannot be on a disk: parameters
            with a gather of their own, or whose shards replicas shard again.
        DiskError: (an OSError) from ``fully_shard``, steps and all that reads a parameter: the file cannot be made,
            the disk is full or fails, or what is read is not what was written.

    Ranks: each for itself, alike but for the directory.
    """

    directory: str | os.PathLike[str]
    parameters: bool | float = True
    optimizer_state: bool | float = True
    staging_bytes: int = 1 << 26
    direct: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        name = "DiskOffloadPolicy"
        expect(isinstance(self.directory, (str, os.PathLike)), f"{name}.directory", self.directory, "a path")
        object.__setattr__(self, "directory", local_path(self.directory, f"{name}.directory"))
        what = "a number of bytes of at least 1"
        expect(type(self.staging_bytes) is int, f"{name}.staging_bytes", self.staging_bytes, what)
        expect(self.staging_bytes > 0, f"{name}.staging_bytes", self.staging_bytes, what, ValueError)
        _check_shares(self)


def _check_shares(policy: CPUOffloadPolicy | DiskOffloadPolicy) -> None:
    name, what = type(policy).__name__, "True, False, or a share from 0 to 1"
    for field in ("parameters", "optimizer_state"):
        share = getattr(policy, field)
        expect(isinstance(share, (bool, float, int)), f"{name}.{field}", share, what)
        expect(0 <= share <= 1, f"{name}.{field}", share, what, ValueError)
    if policy.optimizer_state < policy.parameters or not policy.optimizer_state:
        does = "parameters without the state of their optimizer" if policy.parameters else "nothing"
        raise ValueError(
            f"{name}(parameters={policy.parameters}, optimizer_state={policy.optimizer_state}) offloads {does}: the "
            f"optimizer runs where the parameters are. Leave optimizer_state=True, or use OffloadPolicy()"
        )
