"""Checks before the first forward of a tree, for mistakes that would otherwise be silent.

Owns the checks that need the whole tree or the other ranks. They cost nothing in a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn as nn

from fullshard.group.param_group import ParamGroup
from fullshard.group.verify import compare
from fullshard.policies import warn
from fullshard.torch_private import non_persistent_buffers, version_of

#: A buffer with undefined contents, the module that had it, its name there, and its path.
Emptied = tuple[torch.Tensor | None, nn.Module, str, str]


def buffers_on_meta(module: nn.Module) -> list[tuple[nn.Module, str, str]]:
    """The buffers on the meta device that no state dict fills: their modules, names and paths."""
    return [
        (inner, name, f"{path}.{name}" if path else name)
        for path, inner in module.named_modules()
        for name, buffer in inner._buffers.items()
        if buffer is not None and buffer.is_meta and name in non_persistent_buffers(inner)
    ]


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


def warn_of_emptied(emptied: Sequence[Emptied]) -> None:
    """Warn of non-persistent buffers that ``to_empty()`` left undefined and that nobody has written since."""
    there = [(path, buffer) for buffer, module, name, path in emptied if module._buffers.get(name) is buffer]
    names = [path for path, each in there if each is not None and not each.is_meta and version_of(each) == 0]
    if names:
        warn(
            f"these buffers are in no state dict and were left uninitialized by to_empty(): {sorted(set(names))}. "
            f"Compute them again, for example with the module's reset_parameters()",
            UserWarning,
        )
