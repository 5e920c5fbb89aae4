"""The layout *ragged*: rows are cut only between blocks, so that ranks have uneven numbers of them.

:class:`Ragged` asks for it, and :func:`balance` gives the blocks to ranks. The placement :class:`RaggedShard` answers
the questions by which torch redistributes and saves a DTensor. Torch's rules for operators take every shard along a dim
for one that ``torch.chunk`` cut, and would compute with wrong sizes. So this file also replaces these rules for ragged
DTensors: element by element, operators run on the local tensors; those that need no sizes follow torch's rule; all
others raise an error. It knows no groups.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise, repeat
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from fullshard import torch_private as private
from fullshard import torch_rules as rules
from fullshard.comm.process_group import StartedAllGather
from fullshard.comm.waits import Wait
from fullshard.policies import Placed, RowPlacement, expect

#: Operators that compute element by element, or copy, and lack torch's tag for it.
_ELEMENTWISE = {"detach", "alias", "clone", "copy_", "_to_copy", "zero_", "fill_", "lerp", "lerp_"}
_ELEMENTWISE |= {"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"}
_ELEMENTWISE |= {"normal_", "uniform_", "bernoulli_", "exponential_"}
#: Operators of lists of tensors that compute element by element. None has the tag.
_LISTS_ELEMENTWISE = re.compile(
    "(_fused_(adam|adamw|sgd|adagrad)|_foreach_(abs|acos|add|addcdiv|addcmul|asin|atan|ceil|clamp_max|clamp_min|copy|"
    "cos|cosh|div|erf|erfc|exp|expm1|floor|frac|lerp|lgamma|log|log10|log1p|log2|maximum|minimum|mul|neg|pow|"
    "reciprocal|round|rsqrt|sigmoid|sign|sin|sinh|sqrt|sub|tan|tanh|trunc|zero))_?"
)
_OF_LISTS = ("_foreach_", "_fused_")
#: Reductions for which neither the sizes of the parts matter nor whether a rank has none.
_REDUCTIONS = {"sum", "any", "all"}
#: The same of these, unless their order is infinite or negative: then every rank needs a part.
_NORMS = {"_foreach_norm", "_foreach_powsum", "linalg_vector_norm"}


@dataclass(frozen=True)
class Ragged(RowPlacement):
    """Cuts a parameter only between blocks: what a ``shard_placement_fn`` may return.

    Each rank gets a run of whole rows, perhaps none, such that no block is on two ranks and the ranks have nearly the
    same numbers of bytes. So optimizers that quantize by blocks, or need whole matrices, compute on shards what they
    compute on the whole::

        fully_shard(model, shard_placement_fn=lambda param: Ragged(block=4096))  # torchao's 8-bit Adam
        fully_shard(model, shard_placement_fn=lambda param: Ragged() if param.ndim == 2 else None)  # Muon

    The idea is RaggedShard of veScale (https://github.com/volcengine/veScale). Without arguments the block is the whole
    parameter. Elements that are left over belong to the last block.

    Args:
        block: elements of a block, counted through the rows.
        rows: rows (indices along the first dim) of a block.
        tile: rows and columns of a block; columns are never cut.

    Raises:
        TypeError: a size is not an ``int``.
        ValueError: a size is below 1, or there are several. From ``fully_shard``, naming the parameter: ``tile`` for a
            parameter of less than two dims, or a parameter that is distributed by tensor parallelism or defines its
            own gather.

    Ranks: each for itself, alike, which is checked when a module is sharded.
    """

    block: int | None = None
    rows: int | None = None
    tile: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        given = {name: size for name, size in vars(self).items() if size is not None}
        for name, size in given.items():
            sizes = size if name == "tile" and isinstance(size, tuple) and len(size) == 2 else (size,)
            what = "two numbers" if name == "tile" else "a number"
            is_number = len(sizes) == 1 + (name == "tile") and all(type(each) is int for each in sizes)
            expect(is_number, f"Ragged.{name}", size, f"{what} of at least 1")
            expect(min(sizes) > 0, f"Ragged.{name}", size, f"{what} of at least 1", ValueError)
        if len(given) > 1:
            raise ValueError(f"Ragged was given {' and '.join(given)}: give one of block, rows and tile, or none")

    def block_rows(self, shape: Sequence[int], name: str) -> int:
        """The rows of a block of a parameter, at least 1. Raises ValueError, with its name, if it has no tiles."""
        if self.tile is not None and len(shape) < 2:
            raise ValueError(
                f"shard_placement_fn returned {self} for parameter '{name}' of shape {tuple(shape)}, which has no "
                f"columns: return Ragged(rows=...), or None"
            )
        if self.block is not None:
            return self.block // math.gcd(self.block, math.prod(shape[1:]))
        return self.rows or (self.tile[0] if self.tile is not None else max(1, shape[0]))

    @staticmethod
    def cut(params: Sequence[Placed], ranks: int, turn: int) -> list[tuple[int, ...]]:
        rows = [each.placement.block_rows(each.shape, each.name) for each in params]
        counts = [max(1, each.shape[0] // size) for each, size in zip(params, rows, strict=True)]
        nbytes = [each.shape.numel() * each.dtype.itemsize for each in params]
        found = balance([(n, all_of // n) for n, all_of in zip(counts, nbytes, strict=True)], ranks, turn)
        return [
            tuple(each.shape[0] if number == numbers[-1] else number * size for number in numbers)
            for each, size, numbers in zip(params, rows, found, strict=True)
        ]

    def placement(self, cuts: tuple[int, ...], name: str) -> RaggedShard:
        return RaggedShard(0, cuts, name)


def balance(blocks: Sequence[tuple[int, int]], world_size: int, first: int = 0) -> list[tuple[int, ...]]:
    """Give the blocks of parameters to ranks so that these have nearly the same numbers of bytes.

    The parameters with the largest blocks are first, and each block goes to the rank that has least so far. So no rank
    has more than the mean by a block. Among equal ranks, ``first`` is the first.

    Args:
        blocks: of each parameter the number of blocks, and the bytes of one.

    Returns:
        of each parameter, the numbers of the blocks at which the part of each rank begins, and where the last ends.
    """
    cuts: list[tuple[int, ...]] = [()] * len(blocks)
    loads, turns = [0] * world_size, [(first + turn) % world_size for turn in range(world_size)]
    for index in sorted(range(len(blocks)), key=lambda index: -blocks[index][1]):
        count, nbytes = blocks[index]
        level, above = 0, max(loads) + (count + 1) * max(nbytes, 1)  # every rank is filled up to a level
        while above - level > 1:
            middle = (level + above) // 2
            fits = sum(max(0, middle - load) // max(nbytes, 1) for load in loads) <= count
            level, above = (middle, above) if fits else (level, middle)
        counts = [max(0, level - load) // max(nbytes, 1) for load in loads]
        loads = [load + number * nbytes for load, number in zip(loads, counts, strict=True)]
        for _ in range(count - sum(counts)):
            least = min(turns, key=loads.__getitem__)
            counts[least] += 1
            loads[least] += nbytes
        cuts[index] = tuple(accumulate(counts, initial=0))
    return cuts


class RaggedShard(Shard):
    """Rows of a tensor, cut at any places: rank r has the rows from ``cuts[r]`` to ``cuts[r + 1]``.

    ``distribute_tensor`` takes it for ``Shard(0)``: redistribute a replicated DTensor instead.
    """

    def __init__(self, dim: int = 0, cuts: Sequence[int] = (), name: str = "") -> None:
        super().__init__(dim)
        self.cuts, self.name = tuple(cuts), name  # of the parameter, for errors
        follow_ragged()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaggedShard) and (self.dim, self.cuts) == (other.dim, other.cuts)

    def __hash__(self) -> int:
        return hash((RaggedShard, self.dim, self.cuts))

    def __repr__(self) -> str:
        return f"RaggedShard(dim={self.dim}, cuts={self.cuts})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        return RaggedShard, (self.dim, self.cuts, self.name)

    def part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """The rows that ``rank`` has, as a view. Raises ValueError for a tensor of another number of rows."""
        self._local_shard_size_and_offset(whole.shape[self.dim], len(self.cuts) - 1, rank)
        return whole.narrow(self.dim, self.cuts[rank], self.cuts[rank + 1] - self.cuts[rank])

    def _local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: Any) -> tuple[int, int]:
        if (curr_local_size, num_chunks) != (self.cuts[-1], len(self.cuts) - 1):
            raise ValueError(
                f"{self!r} cuts {self.cuts[-1]} rows over {len(self.cuts) - 1} ranks, and was asked to cut "
                f"{curr_local_size} over {num_chunks}: call full_tensor() first, or redistribute to Shard({self.dim})"
            )
        rank = int(rank)
        return self.cuts[rank + 1] - self.cuts[rank], self.cuts[rank]

    def _split_tensor(self, tensor: torch.Tensor, num_chunks: int, **_: Any) -> tuple[list[torch.Tensor], list[int]]:
        raise self._refused("a split into equal parts")

    _reduce_shard_tensor = _shard_tensor = _split_tensor  # type: ignore[assignment]

    def _to_replicate_tensor(
        self, local_tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, current_logical_shape: Sequence[Any]
    ) -> torch.Tensor:
        shape, size = list(current_logical_shape), mesh.size(mesh_dim)
        self._local_shard_size_and_offset(shape[self.dim], size, 0)
        shape[self.dim] = max(stop - start for start, stop in zip(self.cuts, self.cuts[1:], strict=False))
        sent = local_tensor.new_zeros(shape)
        sent.narrow(self.dim, 0, local_tensor.shape[self.dim]).copy_(local_tensor)
        wait = Wait(f"all rows of parameter '{self.name}'", mesh.get_group(mesh_dim))
        parts = StartedAllGather(sent, wait).finish()
        counts = (stop - start for start, stop in zip(self.cuts, self.cuts[1:], strict=False))
        return torch.cat([part.narrow(self.dim, 0, rows) for part, rows in zip(parts, counts, strict=True)], self.dim)

    def _replicate_to_shard(
        self, local_tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, shard_index: Any
    ) -> torch.Tensor:
        return self.part(local_tensor, int(shard_index)).clone()

    def _to_new_shard_dim(self, *_: Any) -> torch.Tensor:
        raise self._refused("an exchange for another dim")

    def _refused(self, what: str) -> NotImplementedError:
        return NotImplementedError(f"{what} of parameter '{self.name}', which is {self!r}: call full_tensor() first")


torch.serialization.add_safe_globals([RaggedShard])  # so that torch.load(weights_only=True) knows it


def is_ragged(placements: Sequence[Placement]) -> bool:
    return any(isinstance(placement, RaggedShard) for placement in placements)


@cache
def follow_ragged() -> None:
    """Let torch follow ragged DTensors from now on. Called when the first placement is made."""
    rules.leave_unverified(is_ragged)
    rules.replicate_between(_needs_whole)
    rules.on_propagation(_propagate)


def _needs_whole(before: Placement, after: Placement) -> bool:
    """Whether torch would take both for the same cut, or exchange equal parts."""
    return is_ragged((before, after)) and before.is_shard() and after.is_shard() and before != after


def _propagate(schema: Any, by_torch: Callable[[Any], Any]) -> Any:
    """What torch is to know of the results of an operator; ``None`` if no argument is ragged."""
    specs = rules.specs_in([*schema.args_schema, *schema.kwargs_schema.values()])
    ragged = [spec for spec in specs if is_ragged(spec.placements)]
    if not ragged:
        return None
    name = schema.op.name().partition("::")[2].partition(".")[0]
    lists = (rules.specs_in(arg) for arg in schema.args_schema if isinstance(arg, (list, tuple)))
    is_foreach = name.startswith(_OF_LISTS)
    rows = list(zip(*filter(None, lists), strict=False)) if is_foreach else [tuple(specs)]  # of tensors used together
    are_alike = all(len({(spec.placements, spec.shape) for spec in row if spec.ndim}) <= 1 for row in rows)
    are_numbers_known = all(spec.is_replicated() for spec in specs if not spec.ndim)
    if are_alike and (name in _REDUCTIONS or (name in _NORMS and _is_norm_of_parts(schema, ragged))):
        result = by_torch(schema)
        wanted = rules.specs_in(result.redistribute_schema.args_schema if result.needs_redistribute else ())
        stays = any(is_ragged(spec.placements) for spec in wanted)  # some releases want all of each
        if not stays and not any(map(_is_cut, rules.specs_in(result.output_spec))):
            return result
    elif are_alike and are_numbers_known and _is_elementwise(schema.op, name):
        result = by_torch(rules.as_replicated(schema))
        like = rows if is_foreach else repeat(tuple(specs))  # frexp has two results
        placed = [_placed(spec, row) for spec, row in zip(rules.specs_in(result.output_spec), like, strict=False)]
        if result.output_spec is not None:
            one = placed[0] if isinstance(result.output_spec, private.DTensorSpec) else tuple(placed)
            result = dataclasses.replace(result, output_spec=one)
        return result
    elif name == "copy_" and len({(spec.mesh, spec.shape) for spec in specs}) == 1 and ragged[0].ndim:
        return rules.copied_across(schema)
    placement = next(each for each in ragged[0].placements if isinstance(each, RaggedShard))
    whose = f"parameter '{placement.name}'" if placement.name else "a parameter"
    raise NotImplementedError(
        f"{schema.op} cannot be computed with {whose} of shape {tuple(ragged[0].shape)}, its gradient or its state, "
        f"which are {placement!r}: call full_tensor() first, redistribute to Shard({placement.dim}), or compute with "
        f"to_local()"
    )


def _is_norm_of_parts(schema: Any, ragged: Sequence[private.DTensorSpec]) -> bool:
    """Whether each rank can compute the norm of its part."""
    order = next((each for each in schema.args_schema if isinstance(each, (int, float))), 2)
    cuts = (each.cuts for spec in ragged for each in spec.placements if isinstance(each, RaggedShard))
    return 0 <= order < math.inf or all(start < stop for each in cuts for start, stop in pairwise(each))


def _is_elementwise(op: Any, name: str) -> bool:
    is_listed = name in _ELEMENTWISE or _LISTS_ELEMENTWISE.fullmatch(name) is not None
    return is_listed or torch.Tag.pointwise in op.tags


def _is_cut(spec: private.DTensorSpec) -> bool:
    return any(placement.is_shard() for placement in spec.placements)


def _placed(spec: private.DTensorSpec, row: Sequence[private.DTensorSpec]) -> private.DTensorSpec:
    """The result of an operator that computes element by element, placed like its arguments."""
    like = next((each for each in row if each.ndim), None)  # every rank has all of a scalar
    return spec if like is None or spec.shape != like.shape else private.altered_spec(spec, None, like.placements)
