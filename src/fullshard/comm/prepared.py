"""What transports work out once for the tensors of a call and use again in every later one.

Owns the memory of it, :class:`PreparedCache`, which forgets what was prepared as soon as one of the tensors is gone,
and the check of what a caller hands over, which is therefore made once and not at every call. What is prepared is up
to each transport.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import torch

from fullshard.comm.transport import Transfer

Value = TypeVar("Value")

#: Targets and sources, for one call that copies all of them.
Copies = tuple[list[torch.Tensor], list[torch.Tensor]]


class PreparedCache(Generic[Value]):
    """Values that live as long as all the objects that they were prepared for.

    Keys are made of ``id()``: looking at shapes or comparing plans would cost more than the work that is saved.
    """

    def __init__(self) -> None:
        self._values: dict[Hashable, Value] = {}
        self._subjects: dict[Hashable, list[weakref.ref[Any]]] = {}
        self.get = self._values.get

    def __len__(self) -> int:
        return len(self._values)

    def values(self) -> list[Value]:
        return list(self._values.values())

    def put(self, key: Hashable, value: Value, subjects: Sequence[object]) -> None:
        """Keep ``value`` until the first of ``subjects``, whose ids make up ``key``, is gone."""
        forget = _forget(self._values, self._subjects, key)
        self._values[key] = value
        self._subjects[key] = [weakref.ref(subject, forget) for subject in subjects]


def _forget(values: dict[Hashable, Any], subjects: dict[Hashable, Any], key: Hashable) -> Callable[[Any], object]:
    """A callback that does not hold the cache."""
    return lambda _: (values.pop(key, None), subjects.pop(key, None))


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the same storage that does not keep ``tensor`` alive and counts its versions apart.

    Views of ``tensor`` itself would keep it alive as their base, and so what is cached would never be forgotten; and a
    copy into such a view would look to autograd like a change of what it saved from ``tensor``.
    """
    return tensor.data


def check_transfers(transfers: Sequence[Transfer], world_size: int, one_dtype: bool) -> None:
    """Refuse tensors that do not fit their plan, or of two dtypes in one transfer if there is to be ``one_dtype``.

    Raises:
        ValueError: names the first parameter of the plan, what was found and what the plan asks for.
    """
    for transfer in transfers:
        plan, full, shard = transfer.plan, transfer.full, transfer.shard
        where = f"of the group of parameter '{plan.params[0].name}'" if plan.params else "of a group without parameters"
        if plan.world_size != world_size:
            raise ValueError(
                f"the plan {where} is for {plan.world_size} ranks, but the process group has {world_size}: "
                f"make a plan for {world_size} ranks"
            )
        for what, tensor, numel in (("full buffer", full, plan.full_numel), ("shard", shard, plan.shard_numel)):
            if tensor.ndim != 1 or tensor.numel() != numel or not tensor.is_contiguous():
                raise ValueError(
                    f"the {what} {where} must be a contiguous 1-D tensor of {numel} elements, "
                    f"got shape {tuple(tensor.shape)} with strides {tensor.stride()}"
                )
        if full.device != shard.device:
            raise ValueError(f"the full buffer {where} is on {full.device}, but its shard is on {shard.device}")
        if one_dtype and full.dtype != shard.dtype:
            raise ValueError(
                f"an all-gather {where} moves bytes and casts nothing, but its full buffer has dtype {full.dtype} and "
                f"its shard {shard.dtype}: cast the shard first"
            )
