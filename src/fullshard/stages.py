"""What arguments of ``fully_shard`` mean together: the strategy of a ZeRO stage, and what makes no sense with it."""

from __future__ import annotations

from fullshard import policies
from fullshard.group.mesh import DataMesh
from fullshard.group.strategy import FULL_SHARD, SHARD_GRAD_OP, ZERO, Placement, Strategy
from fullshard.meshes import smaller_mesh
from fullshard.wire_policy import WirePolicy


def check_stage(stage: int, after_forward: bool | int | None) -> int:
    """The stage, if there is one of this number and it fits ``reshard_after_forward``."""
    is_stage = type(stage) is int and stage in range(4)
    policies.expect(is_stage, "zero_stage", stage, "0, 1, 2 or 3", TypeError if type(stage) is not int else ValueError)
    if stage < 3 and after_forward not in (None, False):
        raise ValueError(
            f"zero_stage={stage} keeps parameters whole from forward to backward, and "
            f"reshard_after_forward={after_forward!r} does not: leave out one of the two"
        )
    return stage


def check_threshold(threshold: int, stage: int, after_forward: bool | int | None) -> None:
    """Raise an error unless it is a number of bytes, and groups are freed after forward."""
    given = type(threshold) is int and threshold >= 0, "persistence_threshold", threshold
    policies.expect(*given, "a number of bytes of 0 or more", ValueError)
    if threshold and (stage < 3 or after_forward is False):
        why = f"zero_stage={stage}" if stage < 3 else "reshard_after_forward=False"
        raise ValueError(f"persistence_threshold={threshold} has no effect with {why}, which keeps every group whole")


def check_wires(wire: WirePolicy, outer: WirePolicy, data: DataMesh) -> None:
    """Raise an error unless there is something on the mesh that the wires encode."""
    policies.expect(isinstance(wire, WirePolicy), "wire_policy", wire, "a WirePolicy")
    policies.expect(isinstance(outer, WirePolicy), "outer_wire_policy", outer, "a WirePolicy")
    if data.shard_group is None and not wire.is_exact:
        raise ValueError(
            f"wire_policy={wire} encodes gathers and reduce-scatters, but here whole gradients are all-reduced "
            f"(zero_stage=0, or a mesh that only replicates): use zero_stage=1, which sends as many bytes"
        )
    if not data.shards_replicas and not outer.is_exact:
        raise ValueError(
            f"outer_wire_policy={outer} encodes what replicas gather and reduce-scatter, but here they have whole "
            f"shards, or there are none: use outer_zero_stage=1 on a mesh with replicas"
        )


def shards_replicas(outer_stage: int) -> bool:
    """Whether replicas shard again what they have."""
    is_int = type(outer_stage) is int
    error = ValueError if is_int else TypeError
    policies.expect(is_int and outer_stage in (0, 1), "outer_zero_stage", outer_stage, "0 or 1", error)
    return outer_stage == 1


def strategy_of(stage: int, choice: bool | int, data: DataMesh) -> tuple[Strategy, DataMesh | None]:
    """The strategy of a stage and ``reshard_after_forward``, and the post-forward mesh, if there is one."""
    what, size = "reshard_after_forward", data.shard_size
    policies.expect(isinstance(choice, int), what, choice, "a bool, an int (how many ranks) or None", ValueError)
    if stage < 3 or data.shard_group is None:
        return ZERO[stage if data.shard_group is not None else 0], None
    if isinstance(choice, bool):
        return FULL_SHARD if choice else SHARD_GRAD_OP, None
    is_factor = choice > 0 and size % choice == 0
    policies.expect(is_factor, what, choice, f"a factor of the {size} ranks that shard parameters", ValueError)
    if 1 < choice < size:
        return Strategy(after_forward=Placement.SHARDED_LESS), smaller_mesh(data, choice)
    return FULL_SHARD if choice > 1 else SHARD_GRAD_OP, None
