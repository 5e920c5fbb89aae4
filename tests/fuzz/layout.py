"""What each rank should hold of a sharded model, worked out from torch's definitions.

That is `torch.chunk` for `Shard`, and torch's cut of flat parameters for the wrapper. Nothing here communicates: each
rank compares its own part, and all of them together compare everything. Nothing asks the library but for the cuts of
ragged parameters, which are checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from fullshard import Ragged
from fullshard.ragged import RaggedShard
from tests.fuzz.sharding import Sharding, Unit, dtype_of, placement_of, plain_name, units_of

Values = Mapping[str, Tensor | None]


class Layout:
    """The cut of a plain model.

    Args:
        model: plain, as it was built.
        sharding: how it is cut.
    """

    def __init__(self, model: nn.Module, sharding: Sharding) -> None:
        self.sharding = sharding
        self.units: list[Unit] = units_of(model, sharding)
        parameters = dict(model.named_parameters())
        self.orders = {name: _memory_order(parameter) for name, parameter in parameters.items()}
        every = model.named_parameters(remove_duplicate=False)  # state dicts have all names of a tied parameter
        placements = {name: placement_of(parameter, sharding) for name, parameter in every}
        self.ragged = {name: each for name, each in placements.items() if isinstance(each, Ragged)}
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self.sections = [
            (unit, tuple(name for name in unit.names if parameters[name].dtype == dtype))
            for unit in self.units
            for dtype in dict.fromkeys(parameters[name].dtype for name in unit.names)
        ]
        self.aligned = {
            name: 16 // (dtype_of(sharding.param_dtype) or parameter.dtype).itemsize if sharding.original else 1
            for name, parameter in parameters.items()
        }

    def section_of(self, name: str) -> tuple[str, ...]:
        """The parameters of one unit and dtype that are laid end to end with this one."""
        return next(names for _, names in self.sections if name in names)

    def flat_parameters(self) -> dict[str, tuple[str, ...]]:
        """The parameters that each flat one holds, by its plain name: one for each dtype of a unit."""
        flats: dict[str, tuple[str, ...]] = {}
        for unit, names in self.sections:
            name = plain = f"{unit.paths[0]}._flat_param" if unit.paths[0] else "_flat_param"
            number = 0
            while name in flats:
                number += 1
                name = f"{plain}_{number}"
            flats[name] = names
        return flats

    def expected(self, shown: Mapping[str, Tensor], whole: Values) -> Iterator[tuple[str, Tensor | None]]:
        """For each parameter that a sharded model shows, the part of the whole values that this rank should hold.

        What no parameter fills of a flat one is NaN. A parameter that is shown whole is compared whole.
        """
        flats = self.flat_parameters()
        for name, parameter in shown.items():
            if name in flats:
                yield name, self._flat(flats[name], whole)
            elif (value := whole[name]) is None:
                yield name, None
            elif isinstance(parameter, DTensor):
                yield name, chunk_of(value, parameter, self.ragged.get(name))
            elif parameter.shape == value.shape:
                yield name, value
            else:
                yield name, self._run(name, value)

    def _run(self, name: str, value: Tensor) -> Tensor:
        """This rank's run of a parameter."""
        index, count = self._place()
        if count == 1:
            return value
        begins, size = self._cut(self.section_of(name), count)
        start, stop = (min(max(at * size - begins[name], 0), value.numel()) for at in (index, index + 1))
        return self._line(name, value)[start:stop]

    def _flat(self, names: Sequence[str], whole: Values) -> Tensor | None:
        """This rank's part of a flat parameter, or none if no parameter in it has a value."""
        index, count = self._place()
        begins, size = self._cut(names, count)
        values = {name: value for name in names if (value := whole[name]) is not None}
        if not values:
            return None
        flat = next(iter(values.values())).new_full((size * count,), math.nan)
        for name in names:
            numel = math.prod(self.shapes[name])
            flat[begins[name] : begins[name] + numel] = self._line(name, values[name]) if name in values else 0
        return flat[index * size : (index + 1) * size]

    def _line(self, name: str, value: Tensor) -> Tensor:
        """The elements of a parameter as they lie in memory."""
        return value.permute(self.orders[name]).reshape(-1)

    def _cut(self, names: Sequence[str], count: int) -> tuple[dict[str, int], int]:
        """Where each parameter of a section begins among the elements of all, and the number of elements of a rank."""
        begins: dict[str, int] = {}
        at = 0
        for name in names:
            begins[name] = math.ceil(at / self.aligned[name]) * self.aligned[name]
            at = begins[name] + math.prod(self.shapes[name])
        return begins, math.ceil(at / count)

    def _place(self) -> tuple[int, int]:
        """The place of this rank among those that it shards with, and their number."""
        rank, size = dist.get_rank(), dist.get_world_size()
        if self.sharding.strategy == "NO_SHARD":
            return 0, 1
        if len(self.sharding.mesh) == 2:
            size = self.sharding.mesh[1]
        return rank % size, size


def shown_parameters(model: Any) -> dict[str, nn.Parameter]:
    """The parameters of a sharded model by plain names."""
    return {plain_name(name): parameter for name, parameter in model.named_parameters()}


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def chunk_of(whole: Tensor, like: DTensor, ragged: Ragged | None) -> Tensor:
    """The part of a whole tensor that this rank has of a DTensor."""
    for dim, placement in enumerate(like.placements):
        if isinstance(placement, Shard):
            count, index = like.device_mesh.size(dim), like.device_mesh.get_local_rank(dim)
            if ragged is not None:
                start, stop = _cuts_of(placement, whole, ragged)[index : index + 2]
                whole = whole.narrow(0, start, stop - start)
                continue
            chunks = whole.chunk(count, placement.dim)
            whole = chunks[index] if index < len(chunks) else whole.narrow(placement.dim, 0, 0)
    return whole


def _cuts_of(placement: Shard, whole: Tensor, ragged: Ragged) -> tuple[int, ...]:
    """Where a ragged DTensor says that it is cut, which must be between blocks."""
    assert isinstance(placement, RaggedShard), f"{placement} is not ragged"
    rows, numel = whole.shape[0], math.prod(whole.shape[1:])
    every = ragged.block or numel * (ragged.rows or (ragged.tile[0] if ragged.tile else max(1, rows)))
    assert list(placement.cuts) == sorted(placement.cuts), placement
    assert (placement.cuts[0], placement.cuts[-1]) == (0, rows), placement
    assert all(cut * numel % every == 0 for cut in placement.cuts if cut < rows), f"{placement} cuts blocks of {ragged}"
    return placement.cuts


def _memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The dims of a tensor from the slowest to the fastest."""
    if tensor.is_contiguous():
        return tuple(range(tensor.ndim))
    return tuple(sorted(range(tensor.ndim), key=lambda dim: (-tensor.stride()[dim], dim)))
