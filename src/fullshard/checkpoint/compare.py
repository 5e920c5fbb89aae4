"""The differences between two checkpoints: names, shapes, dtypes, values. Holds one pair of tensors at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from fullshard.checkpoint import dcp
from fullshard.checkpoint.blocks import CorruptCheckpointError
from fullshard.checkpoint.display import value_of
from fullshard.checkpoint.reader import Checkpoint
from fullshard.text import dtype_name

#: Elements that are compared at a time.
_RUN = 1 << 22


def compare(a: Checkpoint, b: Checkpoint, report: Callable[[int], object] = lambda _: None) -> dict[str, Any]:
    """The differences between two checkpoints, the largest first. Tensors of a model are compared by their names in the
    model, whether fullshard or DCP wrote them. ``report`` is called with the bytes of each compared tensor."""
    names: list[dict[str, str]] = []
    for each in (a, b):
        model = {stored: f"model.{name}" for name, stored in each.model.items()}
        names.append({model.get(stored, stored): stored for stored in each.tensors})
    common = [
        (name, a.tensors[stored], b.tensors[names[1][name]]) for name, stored in names[0].items() if name in names[1]
    ]
    other_shape, differing = [], []
    for name, one, other in common:
        if one.shape != other.shape:
            other_shape.append({"name": name, "a": one.shape, "b": other.shape})
        else:
            most, mean = _difference(a.tensor(names[0][name]), b.tensor(names[1][name]))
            if most or one.dtype != other.dtype:
                dtypes = [dtype_name(one.dtype), dtype_name(other.dtype)]
                differing.append({"name": name, "dtypes": dtypes, "max": most, "mean": mean})
        report(one.nbytes)
    objects = a.manifest.objects, b.manifest.objects
    return {
        "only_in_a": sorted(({*names[0]} - {*names[1]}) | ({*objects[0]} - {*objects[1]})),
        "only_in_b": sorted(({*names[1]} - {*names[0]}) | ({*objects[1]} - {*objects[0]})),
        "other_shape": other_shape,
        "differing": sorted(differing, key=lambda each: -each["max"]),
        "values": [
            {"name": name, "a": value_of(a, name), "b": value_of(b, name)}
            for name in objects[0]
            if name in objects[1] and not _have_same(a, b, name)
        ],
        "equal": len(common) - len(other_shape) - len(differing),
    }


def _difference(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """The largest and the mean absolute difference. They are infinite if only one side has a NaN or an infinity."""
    most = total = 0.0
    for one, other in zip(a.reshape(-1).split(_RUN), b.reshape(-1).split(_RUN), strict=True):
        if one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
            continue
        differs = one != other if one.dtype == other.dtype == torch.int64 else torch.tensor(False)  # beyond 2 ** 53
        wide = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
        try:
            one, other = one.to(wide), other.to(wide)
        except NotImplementedError:  # bits, which are no numbers
            return math.inf, math.inf
        gaps = (one - other).abs().nan_to_num_(nan=math.inf, posinf=math.inf)
        gaps[(one == other) | (one.isnan() & other.isnan())] = 0
        gaps[differs & (gaps == 0)] = 1
        most, total = max(most, float(gaps.max())), total + float(gaps.sum())
    return most, total / max(1, a.numel())


def _have_same(a: Checkpoint, b: Checkpoint, name: str) -> bool:
    """Whether values are equal, even if different versions of torch wrote them as different bytes."""
    try:
        return dcp.saved(a.value(name), name) == dcp.saved(b.value(name), name)
    except (CorruptCheckpointError, TypeError):  # nested too deeply to be written
        return False
