"""Checks before the first forward of a tree, for mistakes that would otherwise be silent.

Owns the checks that need the whole tree or the other ranks. They cost nothing in a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
import torch.nn as nn

from fullshard.group.full_buffer import State
from fullshard.group.param_group import ParamGroup
from fullshard.group.verify import compare
from fullshard.torch_private import version_of


def check_first_forward(modules: Sequence[nn.Module], groups: Sequence[ParamGroup]) -> None:
    """Raise RuntimeError if ``modules`` of a tree have buffers on the meta device, and ValueError if the ranks
    sharded its groups in different orders."""
    on_meta = [name for module in modules for name, buffer in module.named_buffers() if buffer.is_meta]
    if on_meta:
        raise RuntimeError(
            f"buffers are still on the meta device: {on_meta}. Materialize them before the first use, for example with "
            f"module.to_empty(device=...) and then reset_parameters() or load_state_dict()"
        )
    by_process_group: dict[dist.ProcessGroup, list[str]] = {}
    for group in sorted(groups, key=lambda group: group.tag):  # in the order in which they were sharded
        if group.data.shard_group is not None:
            names = ", ".join(f"'{param.name}'" for param in group.params)
            by_process_group.setdefault(group.data.shard_group, []).append(f"the group of {names} (tag {group.tag})")
    for process_group, described in by_process_group.items():
        compare(described, 0, process_group, "did not shard their modules in the same order")


def check_process_groups(groups: Sequence[dist.ProcessGroup]) -> None:
    """Raise an error if a process group was destroyed after modules were sharded over it."""
    for group in groups:
        try:
            dist.get_process_group_ranks(group)
        except (KeyError, ValueError, RuntimeError) as error:
            raise RuntimeError(
                "a process group over which parameters are sharded was destroyed (destroy_process_group): shard the "
                "model again after init_process_group"
            ) from error


def check_stale_writes(groups: Sequence[ParamGroup]) -> None:
    """Raise RuntimeError if an unsharded parameter that somebody kept was written in a pass while it was sharded."""
    for group in groups:
        full = group.full
        if full.state is State.SHARDED and full.versions_set != (*map(version_of, full.leaves),):
            full.refuse_stale_writes()
