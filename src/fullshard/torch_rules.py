"""Private names of torch by which it places the results of operators on DTensors, and how others answer for it.

With :mod:`fullshard.torch_private` the only file that uses private names. It knows no placement of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import starmap
from typing import Any

import torch.utils._pytree as pytree  # a list of specs is one argument
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec  # what operators are told of a DTensor

from fullshard.torch_private import altered_spec, local_of, read_number


def on_scalar_read(tell: Callable[[DTensor], None]) -> None:
    """Call ``tell`` before ``item()``, ``float()`` or ``bool()`` reads a DTensor. Torch gives this rank's part, even of
    a sum that the ranks have yet to add up, and has no public way to notice this."""

    def read(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        tell(args[0])
        if args[0].device_mesh.get_coordinate() is None:
            return None  # this rank has no part: torch then refuses to make a number
        return op(local_of(args[0]))

    handlers = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", {})
    handlers.setdefault(read_number.default, read)


def replicate_between(is_needed: Callable[[Placement, Placement], bool]) -> None:
    """Let redistributions gather a dim of the mesh first where ``is_needed`` says so of the placements on it."""
    from torch.distributed.tensor import _redistribute as steps

    by_torch: Any = steps._gen_transform_infos_non_cached

    def plan(before: DTensorSpec, after: DTensorSpec, *options: Any, **more: Any) -> list[Any]:
        pairs = list(zip(before.placements, after.placements, strict=True))
        if not any(starmap(is_needed, pairs)):
            return by_torch(before, after, *options, **more)
        between = altered_spec(before, None, [Replicate() if is_needed(*pair) else pair[0] for pair in pairs])
        return [
            *by_torch(before, between, *options, **more),
            *by_torch(between, altered_spec(between, None, after.placements), *options, **more),
        ]

    steps._gen_transform_infos_non_cached = plan  # type: ignore[assignment]  # what caches the plan looks it up


def leave_unverified(is_unknown: Callable[[Sequence[Placement]], bool]) -> None:
    """Let specs have placements that ``is_unknown`` tells: some releases compare each with a plain ``Shard``."""
    by_torch = DTensorSpec._verify_shard_order

    def verify(spec: DTensorSpec, order: Any) -> None:
        if not is_unknown(spec.placements):
            by_torch(spec, order)

    DTensorSpec._verify_shard_order = verify  # type: ignore[assignment, method-assign]


def on_propagation(answer: Callable[[Any, Callable[[Any], Any]], Any]) -> None:
    """Ask ``answer`` for the placements of an operator's results before torch's rules, which it is given too."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    by_torch = propagator.propagate_op_sharding_non_cached

    def propagate(schema: Any) -> Any:
        found = answer(schema, by_torch)
        return by_torch(schema) if found is None else found

    propagator.propagate_op_sharding_non_cached = propagate
    propagator.propagate_op_sharding = type(propagator.propagate_op_sharding)(propagate)  # the cache before it


def copied_across(schema: Any) -> Any:
    """The placements of ``copy_`` for a source that is placed in another way, which is redistributed first."""
    from torch.distributed.tensor._op_schema import OutputSharding

    target, source, *others = schema.args_schema
    args = (target, altered_spec(source, None, target.placements), *others)
    changed = type(schema)(schema.op, args, schema.kwargs_schema, schema_info=schema.schema_info)
    return OutputSharding(target, changed, needs_redistribute=True)


def specs_in(arguments: Any) -> list[DTensorSpec]:
    """The specs in the arguments of an operator, also in lists."""
    found = pytree.tree_leaves(arguments, is_leaf=lambda each: isinstance(each, DTensorSpec))
    return [each for each in found if isinstance(each, DTensorSpec)]


def as_replicated(schema: Any) -> Any:
    """The arguments of an operator as they were on a single rank."""

    def whole(spec: Any) -> Any:
        return altered_spec(spec, None, [Replicate()] * spec.mesh.ndim) if isinstance(spec, DTensorSpec) else spec

    args, kwargs = pytree.tree_map(
        whole, (schema.args_schema, schema.kwargs_schema), is_leaf=lambda each: isinstance(each, DTensorSpec)
    )
    return type(schema)(schema.op, args, kwargs, schema_info=schema.schema_info)
