"""What a sharded model holds outside of its groups: buffers, other parameters, and plain tensors in attributes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fullshard import tree
from fullshard.group.owners import owner_of
from fullshard.group.param_group import ParamGroup
from fullshard.strangers import known_to
from fullshard.torch_private import plain_parts, storage_id


def bytes_outside(model: nn.Module, groups: Sequence[ParamGroup]) -> int:
    """The bytes of the tensors that belong to no group, in attributes of the model's modules and in containers there.
    Tensors that share memory count once, with all of it: a view keeps the whole tensor of a parameter alive."""
    params = [param for group in groups for param in group.params]
    known = known_to(groups) | {id(param.hidden) for param in params}
    views = {(place.module, place.name) for param in params for place in param.locations}  # of a flat parameter
    values = [
        value
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, (torch.Tensor, list, tuple, dict)) and (module, name) not in views
    ]
    found = [each for each in tree.tensors(values) if id(each) not in known and owner_of(each) is None]
    parts = {storage_id(part): part for tensor in found for part in plain_parts(tensor)}
    return sum(part.untyped_storage().nbytes() for key, part in parts.items() if key)
