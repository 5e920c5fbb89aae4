"""Checks before the first forward of a tree, for mistakes that would otherwise be silent.

Owns the checks that need the whole tree or the other ranks. They cost nothing in a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
import torch.nn as nn

from fullshard.group.param_group import ParamGroup
from fullshard.group.verify import compare


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
