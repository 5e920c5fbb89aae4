"""The options that a user chose for a group, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fullshard.group.mesh import DataMesh
from fullshard.policies import MixedPrecisionPolicy, OffloadPolicy


@dataclass
class GroupOptions:
    """The options that a user chose for a group; each may be changed between steps by the setters of ``FSDPModule``."""

    mp_policy: MixedPrecisionPolicy
    offload: OffloadPolicy
    reshard_after_forward: bool = True
    post_forward_mesh: DataMesh | None = None
    reshard_after_backward: bool = True
    keep_unsharded_storage: bool = False
    reduce_gradients: bool = True
    all_reduce_gradients: bool = True
    reduce_unused: bool = False
    divide_factor: float | None = None
    sum_only: bool = False
    keep_computed_dtype: bool = False
    unshard_in_backward: bool = True
    max_gradient_buffers: int | None = None
    #: A function that sums over replicas in place of the process group's all-reduce.
    all_reduce: Callable[[torch.Tensor], None] | None = None
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    all_reduce_hook_stream: torch.Stream | None = None
