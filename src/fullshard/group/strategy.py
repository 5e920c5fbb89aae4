"""Where the parameters, gradients and optimizer state of a group lie at each time of a step.

A mesh has a dim over which a group is sharded, and one over which it is replicated; either may have one rank.
Parameters are sharded between steps, and replicated in the passes that use them::

    strategy              parameters after          gradients after a backward      optimizer
                          forward       backward    over shards   over replicas     state
    ZeRO-3, FULL_SHARD    sharded       sharded     sharded       replicated        sharded
      on a smaller mesh   sharded less  sharded     sharded       replicated        sharded
    ZeRO-2, SHARD_GRAD_OP replicated    sharded     sharded       replicated        sharded
    ZeRO-1                replicated    sharded     sharded       replicated        sharded
    HYBRID_SHARD          as FULL_SHARD, on a mesh with replicas
      outer stage 1       as any of these; what is replicated over replicas is sharded over them between steps
    ZeRO-0, NO_SHARD      as ZeRO-1, on a mesh of replicas only: what is sharded over one rank is whole

    without sync          -             -           partial       partial           -
      ZeRO-1              -             replicated  partial       partial           -
    without all-reduce    -             -           sharded       partial           -

What takes a tensor from one placement to the next:

    parameters   sharded → replicated      all-gather
                 replicated → sharded      nothing: the copy is dropped
                 replicated → sharded less a slice, and an all-gather over fewer ranks later
    gradients    partial → sharded         reduce-scatter, over the ranks that shard
                 partial → replicated      all-reduce, over the replicas
                 partial → sharded         reduce-scatter, over replicas that shard
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cached_property


class Placement(Enum):
    """What each rank has of a tensor."""

    REPLICATED = auto()  # all of it
    SHARDED = auto()  # its part
    SHARDED_LESS = auto()  # a larger part, over the smaller mesh between forward and backward (``post_forward_mesh``)
    PARTIAL = auto()  # one term of its sum


@dataclass(frozen=True)
class Strategy:
    """A row of the table. Users switch the columns of a group between steps, by the setters of ``FSDPModule``."""

    after_forward: Placement = Placement.SHARDED  # of parameters
    after_backward: Placement = Placement.SHARDED
    without_sync: Placement = Placement.SHARDED  # of parameters, after a backward that reduces nothing
    gradients: Placement = Placement.SHARDED  # after a backward, over the ranks that shard
    gradients_of_replicas: Placement = Placement.REPLICATED  # and over those that replicate

    def switched(self, **columns: bool) -> Strategy:
        """The row with some columns switched on, as in the first row, or off, as in the line of the switch."""
        return replace(self, **{name: getattr(FULL_SHARD, name) if on else _OFF[name] for name, on in columns.items()})

    @cached_property
    def reshards(self) -> bool:
        """Whether parameters are sharded again after a backward."""
        return self.after_backward is Placement.SHARDED and (self.reduces or self.without_sync is Placement.SHARDED)

    @cached_property
    def reduces(self) -> bool:
        """Whether a backward reduces gradients; otherwise they accumulate unsharded."""
        return self.gradients is not Placement.PARTIAL

    @cached_property
    def all_reduces(self) -> bool:
        """Whether a reduction includes the replicas; otherwise gradients accumulate sharded."""
        return self.gradients_of_replicas is not Placement.PARTIAL


#: What a column has when it is switched off.
_OFF = dict.fromkeys(("after_forward", "after_backward"), Placement.REPLICATED)
_OFF |= dict.fromkeys(("gradients", "gradients_of_replicas"), Placement.PARTIAL)
FULL_SHARD = Strategy()
SHARD_GRAD_OP = FULL_SHARD.switched(after_forward=False)
ZERO_1 = replace(SHARD_GRAD_OP, without_sync=Placement.REPLICATED)
#: The rows of the ZeRO stages.
ZERO = ZERO_1, ZERO_1, SHARD_GRAD_OP, FULL_SHARD
