"""What of a group is offloaded: which parameters, the state of which, and where to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fullshard.disk.file import DiskFile, file_in
from fullshard.group.mesh import DataMesh
from fullshard.group.parameter import ShardedParameter
from fullshard.offload_policy import CPUOffloadPolicy, DiskOffloadPolicy, OffloadPolicy

#: Bytes of a parameter from which it is worth a file.
_LEAST_ON_DISK = 1 << 16


class Offloaded:
    """What a policy offloads of a group. Raises ValueError if it cannot be on a disk, and DiskError if there is none.

    Attributes:
        parameters: the parameters, by their index in the group, that are offloaded with their gradients.
        state: those of which the optimizer's state is offloaded.
        disk: the file in which that is; ``None`` if it is on the CPU.
        pins_memory: whether memory on the CPU is page-locked.
    """

    def __init__(self, policy: OffloadPolicy, params: Sequence[ShardedParameter], data: DataMesh) -> None:
        self.parameters = self.state = frozenset[int]()
        self.disk: DiskFile | None = None
        self.pins_memory = bool(getattr(policy, "pin_memory", False))
        if not isinstance(policy, (CPUOffloadPolicy, DiskOffloadPolicy)):
            return
        if isinstance(policy, DiskOffloadPolicy):
            self.disk = file_in(Path(policy.directory), policy.direct, policy.staging_bytes)
        least = _LEAST_ON_DISK if self.disk is not None else 0
        self.parameters = _first(params, policy.parameters, least)
        self.state = _first(params, policy.optimizer_state, least)
        if self.disk is not None:
            for index in self.state:
                _refuse(params[index], data)

    @property
    def reads_parameters(self) -> bool:
        """Whether parameters are on a disk."""
        return self.disk is not None and bool(self.parameters)

    def on_disk(self, index: int) -> DiskFile | None:
        """The file that a parameter lies in."""
        return self.disk if index in self.parameters else None


def _refuse(param: ShardedParameter, data: DataMesh) -> None:
    """Raise ValueError for a parameter that cannot be on a disk."""
    if data.shards_replicas or param.extends:
        why = "outer_zero_stage=1 shards again" if data.shards_replicas else "has a gather of its own"
        raise ValueError(
            f"DiskOffloadPolicy cannot offload parameter '{param.name}', which {why}: use CPUOffloadPolicy, or "
            f"OffloadPolicy() for its module"
        )


def _first(params: Sequence[ShardedParameter], share: float, least: int) -> frozenset[int]:
    """The first parameters of at least ``least`` bytes that have at least a share of the bytes of all of these."""
    sizes = {index: param.shape.numel() * param.dtype.itemsize for index, param in enumerate(params)}
    sizes = {index: size for index, size in sizes.items() if size >= least}
    chosen, room = set[int](), share * sum(sizes.values())
    for index, size in sizes.items():
        if room > 0:
            chosen.add(index)
            room -= size
    return frozenset(chosen)
