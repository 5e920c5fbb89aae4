"""The error for a backward whose parameters an optimizer has changed since the forward.

A backward gathers parameters anew, with the values that optimizers have given them meanwhile. Without sharding, torch
raises an error then, by the versions of what autograd has saved. Here optimizers number their steps, in
:mod:`fullshard.optim.steps`. Other writes to sharded parameters between a forward and its backward are seen by the
backward, as with torch's ``fully_shard``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fullshard.group.context import GroupContext
from fullshard.torch_private import running_node


def refuse_updated(groups: Sequence[GroupContext], before: int) -> None:
    """Raise RuntimeError if the backward that runs uses parameters that an optimizer has changed since the forward,
    which began after ``before`` updates."""
    updated = [param for group in groups for param in group.params if param.updated > before]
    leaves = _leaves_below(running_node()) if updated else ()
    if changed := [f"'{param.name}'" for param in updated if id(param.unsharded) in leaves]:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise RuntimeError(
            f"an optimizer has stepped on parameters {', '.join(changed[:3])}{more} since the forward whose backward "
            f"runs: it would compute gradients with their new values. Call backward() before the optimizer's step, or "
            f"run the forward again after it"
        )


def _leaves_below(node: Any) -> set[int]:
    """The ids of the leaves to which a backward comes from a node of autograd."""
    found, seen, left = set[int](), set[Any](), [node]
    while left:
        if (node := left.pop()) is not None and node not in seen:
            seen.add(node)
            found.add(id(getattr(node, "variable", None)))
            left += [below for below, _ in node.next_functions]
    return found
