"""The shard of a replica and its reduced gradients during a step, for groups that are sharded over replicas too.

Between steps each rank has a part of its replica's shard. :class:`ReplicaShard` is that shard, gathered over the
replicas once for each optimizer step. :class:`ReplicaGradients` are the gradients that the ranks of a replica have
reduced, on their way to the parts. Both take place inside the communication of the ranks that shard together, and
leave to it when that is. The idea is that of the hybrid sharding of optimizer state in Megatron-FSDP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fullshard.buffer.plan import Plan
from fullshard.buffer.sections import shard_bytes, shard_views, starts, views
from fullshard.buffer.slots import SlotBuffer
from fullshard.comm.transport import PLAIN_SUM, Feedback, Route, Transfer
from fullshard.device import Pending
from fullshard.group.context import GroupContext


class ReplicaShard:
    """The shard of a replica, in the dtype in which it computes.

    Attributes:
        views: its sections, once it was gathered.
        accumulates: whether it stays for the next forward, because gradients accumulate and no optimizer steps before.
    """

    def __init__(self, group: GroupContext) -> None:
        self._group = group
        self.accumulates = False
        self.views: tuple[torch.Tensor, ...] = ()
        pool = group.comm.pool(f"replica {group.tag}", group.transport.private)  # its own: the values stay
        self._buffer = SlotBuffer(pool, shard_bytes(group.sections, group.compute_dtypes))
        self._values: tuple[int, int] | None = None
        self._pending: Pending | None = None
        self._route: Route | None = None

    def has(self, values: tuple[int, int]) -> bool:
        """Whether it has the ``values`` of a forward and of a version of the shard, or they are on their way."""
        if self._values is None or self._buffer.slot is None:
            return False
        return self._values[1] == values[1] and (self.accumulates or self._values[0] == values[0])

    def start(self, parts: Sequence[torch.Tensor], values: tuple[int, int]) -> None:
        """Start to gather the parts of all replicas."""
        self.finish()
        group, self._values = self._group, None
        self._buffer.take().wait()
        try:
            if self._route is None:
                with torch.inference_mode(False):
                    self.views = shard_views(self._buffer.memory, group.sections, group.compute_dtypes)
                transfers = map(Transfer, [each.plan for each in group.own_sections], self.views, parts)
                over, wire = group.data.replicate_group, group.wire("gather", outer=True)
                self._route = group.transport.private.gather_route([*transfers], over, group.tag, wire)
            self._pending = self._route.start()
        except BaseException:
            self._buffer.give_back()
            raise
        self._values = values

    def finish(self) -> None:
        """Complete the gather, if one was started."""
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.finish()
            except BaseException:
                self._values = None
                raise
            finally:
                self._buffer.give_back()


@dataclass(eq=False)
class ReplicaGradients:
    """The gradients of a replica, in ``dtypes``, as the shards of ``plans``; ``own`` cuts these over the replicas. They
    are of parameters with these ``indices``. ``kept`` has what encodings have lost of each, where that lay last."""

    group: GroupContext
    plans: Sequence[Plan]
    own: Sequence[Plan]
    dtypes: Sequence[torch.dtype]
    indices: Sequence[Sequence[int]]
    kept: dict[int, torch.Tensor]
    _lost: dict[int, torch.Tensor] = field(default_factory=dict)
    _views: tuple[torch.Tensor, ...] = ()
    _route: Route | None = None
    buffer: SlotBuffer = field(init=False)

    def __post_init__(self) -> None:
        self._numels = [plan.shard_numel for plan in self.plans]
        pool = self.group.comm.pool("sums", self.group.transport.private)
        self.buffer = SlotBuffer(pool, starts(self._numels, self.dtypes)[-1])
        pool.ordinary = max(pool.ordinary, self.buffer.nbytes)

    @torch.inference_mode(False)
    def take(self) -> Sequence[torch.Tensor]:
        """Memory for the gradients of one reduction."""
        if self.buffer.in_use:  # modules of one group may run at different times
            self.group.comm.reductions.wait_for_oldest()
        self.buffer.take().wait()
        self._views = self._views or views(self.buffer.memory, self._numels, self.dtypes)
        return self._views

    def start(self, outputs: Sequence[torch.Tensor]) -> Pending:
        """Start to add up the replicas' gradients; this rank's part goes to ``outputs``."""
        if self._route is None:
            transfers = map(Transfer, self.own, self._views, outputs)
            transport, over = self.group.reduce_transport.private, self.group.data.replicate_group
            wire = self.group.wire("reduce", outer=True)
            if wire is not None and self.group.options.outer_wire.error_feedback:
                lost = [torch.zeros_like(view, dtype=torch.bfloat16) for view in self._views]
                wire = wire._replace(feedback=Feedback(lost))
                for indices, plan, memory in zip(self.indices, self.own, lost, strict=True):
                    for index, start, param in zip(indices, plan.full_offsets, plan.params, strict=True):
                        self._lost[index] = memory[start : start + param.numel]
            self._route = transport.reduce_route([*transfers], over, self.group.tag, wire)
        for index, own in self._lost.items():
            if (before := self.kept.get(index)) is not None and before is not own:
                own.copy_(before)  # another set of parameters was reduced last
            self.kept[index] = own
        return self._route.start(outputs, PLAIN_SUM)
