"""Parameters that rest between forward and backward, sharded over a smaller mesh (``reshard_after_forward=<int>``).

Owns the small shard, what the modules show of it, and the way back: a gather over fewer and nearer ranks.
"""

from __future__ import annotations

import torch
import torch.nn as nn
from torch.distributed.tensor import Replicate, Shard

from fullshard.buffer.plan import make_plan
from fullshard.buffer.sections import Section, shard_bytes, shard_views
from fullshard.comm.transport import Transfer
from fullshard.device import Pending, mark_now
from fullshard.group.context import GroupContext
from fullshard.group.mesh import DataMesh
from fullshard.group.parameter import ShardedParameter, chunk_views
from fullshard.torch_private import make_dtensor, sharding_spec


class PostForwardShard:
    """The gathered values of ``group``, of which each rank of a smaller mesh keeps a part."""

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, group: GroupContext, mesh: DataMesh, full_views: tuple[torch.Tensor, ...]) -> None:
        self._group = group
        self._mesh = mesh
        sections = [
            Section(section.dtype, section.members, make_plan(section.plan.params, mesh.shard_size))
            for section in group.sections
        ]
        nbytes = shard_bytes(sections, group.compute_dtypes)
        views = shard_views(group.transport.private.allocate(nbytes, group.device), sections, group.compute_dtypes)
        transfers = []
        #: What the modules show of it, by index: beside tensor parallel the small mesh has no DTensor.
        self.shown: dict[int, nn.Parameter] = {}
        for section, full, shard in zip(sections, full_views, views, strict=True):
            transfers.append(Transfer(section.plan, full, shard))
            for index, local in chunk_views(group.params, section.members, section.plan, shard, mesh.shard_rank):
                param = group.params[index]
                assert param.unsharded_local is not None
                local.copy_(param.chunk_of(param.unsharded_local, mesh.shard_rank, mesh.shard_size))
                if param.unsharded_spec is None:
                    self.shown[index] = self._as_parameter(param, local)
        assert mesh.shard_group is not None
        self._route = group.transport.private.gather_route(transfers, mesh.shard_group, 2 * group.tag)
        #: A reader of the small shard waits for the copies that filled it.
        self.filled = mark_now(group.device)

    def _as_parameter(self, param: ShardedParameter, local: torch.Tensor) -> nn.Parameter:
        assert param.unsharded_local is not None
        placement = Replicate() if param.dim is None else Shard(param.dim)
        stride = param.unsharded_local.stride()
        spec = sharding_spec(self._mesh.mesh, (Replicate(), placement), param.shape, stride, local.dtype)
        return nn.Parameter(make_dtensor(local, spec), requires_grad=param.sharded.requires_grad)

    def gather(self) -> Pending:
        return self._route.start()
