"""What encodings have lost of gradients, in a checkpoint: a tensor for each parameter, cut as this is.

It is loaded on any number of ranks with any wire, and ignored where no gradients are encoded with error feedback. Owns
the names of these tensors. The groups know what they mean (:mod:`fullshard.group.feedback`).
"""

from __future__ import annotations

import torch

from fullshard.checkpoint.contents import Contents, Parameters, named
from fullshard.checkpoint.reader import Checkpoint
from fullshard.group.param_group import ParamGroup

Lost = dict[ParamGroup, dict[int, torch.Tensor]]


def collect_feedback(params: Parameters, contents: Contents) -> None:
    """Adds what encodings have lost of gradients. Ranks: all ranks of the model."""
    lost = {group: group.gradients.lost() for group in params.groups}
    for original, (layout, names) in params.known.items():
        if original.group is not None and original.index in (chunks := lost[original.group]):
            contents.add(named(("wire_feedback", names[0])), chunks[original.index], layout)


def new_feedback(params: Parameters, contents: Contents, checkpoint: Checkpoint) -> Lost:
    """Adds tensors to read the same into, for groups that need it. Returns them by group and index, for all groups."""
    found: Lost = {group: {} for group in params.groups}
    for original, (layout, names) in params.known.items():
        stored = [name for each in names if (name := f"wire_feedback.{each}") in checkpoint.tensors.positions]
        if stored and original.group is not None and original.group.has_feedback:
            value = torch.zeros_like(original.param.values, dtype=torch.bfloat16)
            contents.add({stored[0]: ("wire_feedback", names[0])}, value, layout)
            found[original.group][original.index] = value
    return found
