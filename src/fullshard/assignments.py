"""What ``param.data = values`` does to a sharded parameter: it gets these values.

Torch changes only the size and the dtype of a DTensor there, silently. A DTensor that belongs to no group, as after
``load_state_dict(assign=True)``, gets the values too if they are sharded alike. Owns the property ``data`` of DTensors,
which is there once a model was sharded.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.group.owners import owner_of
from fullshard.schedule.hooks import when_sharded
from fullshard.torch_private import local_of, set_local, spec_of


@when_sharded
def follow_assignments(_: object) -> None:
    """Replace the property, once."""
    _replace_property()


@cache
def _replace_property() -> None:
    by_torch: Any = torch.Tensor.data

    def assign(tensor: DTensor, data: Any) -> None:
        owner, local, expected = owner_of(tensor), local_of(tensor), spec_of(tensor).placements
        is_owned = owner is not None and id(tensor) == id(owner[0].params[owner[1]].sharded)
        name = owner[0].params[owner[1]].name if owner is not None else ""
        is_alike = isinstance(data, DTensor) and spec_of(data).placements == expected
        if is_owned and not is_alike:
            placed = spec_of(data).placements if isinstance(data, DTensor) else "a plain tensor"
            raise RuntimeError(
                f"parameter '{name}' was given data that is {placed} where {expected} is expected: give it a DTensor "
                f"with the same placements, such as a copy of its own data"
            )
        has_shape = is_alike and local_of(data).shape == local.shape
        if is_owned and not has_shape:
            raise RuntimeError(
                f"parameter '{name}' was given data of shape {tuple(data.shape)} where {tuple(tensor.shape)} is "
                f"expected"
            )
        by_torch.__set__(tensor, data)
        if has_shape:
            # A copy: ``data`` may lie in the shard of a group, as when two models exchange their parameters. The next
            # forward copies the values to the shard.
            set_local(tensor, local_of(data).detach().clone(), spec_of(data))

    DTensor.data = property(by_torch.__get__, assign)  # type: ignore[assignment]
