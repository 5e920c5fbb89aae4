"""The parameters that modules show of a group, and the changes that users make to them between steps.

Owns the prepared updates that put sharded or unsharded parameters in their locations, one dict for each module. Before
each step it checks whether the parameters in these locations are still the group's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any, TypeGuard

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from fullshard import torch_private as private
from fullshard.buffer.plan import BufferPlan
from fullshard.group.context import GroupContext
from fullshard.group.owners import owner_of
from fullshard.group.parameter import IndexedTensor, Location, ShardedParameter, chunk_views, local_tensor

_requires_grad = attrgetter("requires_grad")

Updates = Sequence[tuple[nn.Module, dict[str, Any]]]


@dataclass(eq=False)
class Presentation:
    """Tensors for the locations of parameters: by name where these are registered, by path where modules keep them."""

    registered: Updates
    apart: Sequence[tuple[nn.Module, tuple[Any, ...], Any]]
    is_unsharded: bool = False
    found: Any = None  # what state dicts know of the parameters


class ModuleParameters:
    """The locations of a group's parameters in the module tree, and the tensors that are there."""

    def __init__(self, group: GroupContext) -> None:
        self._group = group
        self.substituted: set[tuple[int, str]] = set()  # locations where users put something instead of a parameter
        self._shown = Presentation((), ())  # what is in the locations of parameters
        #: Versions and addresses of the leaves that modules show between two passes; ``None`` if they show none.
        self.left: list[tuple[int, int]] | None = None
        self.trainable: tuple[bool, ...] = ()  # which of the parameters require gradients, as of the last check
        self.prepare()

    @property
    def shows_unsharded(self) -> bool:
        return self._shown.is_unsharded

    def gradient_views(
        self, indices: Sequence[int], plan: BufferPlan, shard: torch.Tensor, rank: int
    ) -> Iterable[IndexedTensor]:
        """Which parts of the reduced ``shard`` of ``rank`` are the gradients of which parameters."""
        return chunk_views(self._group.params, indices, plan, shard, rank)

    def prepare(self) -> None:
        """Prepare the updates anew: parameters, leaves or locations have changed."""
        params = self._group.params
        self._group.sharded = [param.sharded for param in params]
        self.unsharded = [param.unsharded for param in params if param.unsharded is not None]
        self._locals = [param.local for param in params]
        self.trainable = tuple(map(_requires_grad, self._group.sharded))
        if not self.shows_unsharded:
            self._train_leaves()
        self._prepare_updates()

    def _prepare_updates(self) -> None:
        """Prepare the updates, without the locations where users put something instead of a parameter."""
        self._apart = apart = [
            (i, param, module, path)
            for i, param in enumerate(self._group.params)
            for module, path in param.kept_apart
            if not any((id(module), at.name) in self.substituted for at in param.locations)
        ]
        self._free = free = [at for at in self._indexed() if (id(at[2]), at[3]) not in self.substituted]
        self.as_sharded = Presentation(
            updates([(module, name, param.sharded) for _, param, module, name in free]),
            [(module, path, at.sharded if at.hidden is None else at.hidden) for _, at, module, path in apart],
        )
        self.as_unsharded = Presentation(
            updates([(module, name, param.unsharded) for _, param, module, name in free]),
            [(module, path, param.unsharded) for _, param, module, path in apart],
            is_unsharded=True,
        )

    def _indexed(self) -> list[tuple[int, ShardedParameter, nn.Module, str]]:
        params = enumerate(self._group.params)
        return [(index, param, at.module, at.name) for index, param in params for at in param.locations]

    def accumulate_gradients(self, grads: Iterable[IndexedTensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Set ``param.grad`` to the reduced parts. Return the gradients that are set already, with what to add."""
        params, more = self._group.params, []
        with private.PlainAttributes():
            for index, local in grads:
                param, dtype = params[index], local.dtype
                if not param.sharded.requires_grad:
                    continue  # frozen since the forward
                if param.sharded.grad is None:
                    spec = param.spec if dtype is param.dtype else private.altered_spec(param.spec, dtype=dtype)
                    param.sharded.grad = private.make_dtensor(local, spec)
                elif (before := param.gradient) is not None:
                    more.append((before, local))
        return more

    def show_post_forward(self, small: Mapping[int, nn.Parameter]) -> None:
        """Show parameters, by index, as they are sharded over a smaller mesh, and all others as sharded ones."""
        self.show_sharded()
        shown = [(module, name, small.get(i, param.sharded)) for i, param, module, name in self._free]
        self.show(Presentation(updates(shown), self.as_sharded.apart))

    def show_sharded(self) -> None:
        """Show the sharded parameters, also where users have removed what replaced one for a while."""
        if self.substituted:
            for _, param, module, name in self._indexed():
                if self._was_shown(module._parameters.get(name), param):
                    self.substituted.discard((id(module), name))
            self._prepare_updates()
        self.show(self.as_sharded)

    def show(self, what: Presentation) -> None:
        """Put tensors in the locations of parameters.

        The dict of a module is updated and never swapped: what users add to it (LoRA, parametrizations) stays.
        Assigning through the module is for classes that watch their attributes. A module that is still being copied
        gets copies of what its original shows.
        """
        self._shown, self.left = what, None
        for module, tensors in what.registered:
            if "_modules" not in module.__dict__:
                continue
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters.update(tensors)
            else:
                for name, tensor in tensors.items():
                    setattr(module, name, tensor)
        for module, path, tensor in what.apart:
            put(module, path, tensor)

    def show_full(self, full: Mapping[int, nn.Parameter]) -> None:
        """Show full copies of parameters, by index, until something else is shown."""
        shown = [(module, name, full[index]) for index, _, module, name in self._indexed() if index in full]
        apart = [(module, path, full[index]) for index, _, module, path in self._apart if index in full]
        ModuleParameters.show(self, Presentation(updates(shown), apart))

    def are_unchanged(self) -> bool:
        """Whether the modules have what the group left there, as it left it. Called before each step."""
        with private.PlainAttributes():
            trainable = tuple(map(_requires_grad, self._group.sharded))
        if not trainable == self.trainable == tuple(map(_requires_grad, self.unsharded)):
            self._agree_on_training()
        if [*filter(private.gradient_hooks, self._group.sharded)]:
            for param in self._group.params:
                param.follow_hooks()
        for module, tensors in self._shown.registered:
            if not all(map(is_, map(module._parameters.get, tensors), tensors.values())):
                return False
        return not self.substituted and self._keeps_chunks()

    def note_left(self) -> None:
        """Note how a pass leaves the unsharded parameters, if modules show them until the next one."""
        if self.shows_unsharded:
            self.left = list(map(_version_and_address, self.unsharded))

    @torch.no_grad()
    def keep_writes(self, wholes: Callable[[], Mapping[int, torch.Tensor]]) -> None:
        """Copy to the shard this rank's part of what users wrote to unsharded parameters since the last pass. A leaf
        whose ``data`` was replaced gets its memory back: its tensor in ``wholes``, by index."""
        assert self.left is not None
        left, now = self.left, list(map(_version_and_address, self.unsharded))
        moved = list[tuple[int, Any]]()
        self._agree_on_training()
        for index, (param, before, after) in enumerate(zip(self._group.params, left, now, strict=True)):
            if before == after:
                continue
            if param.extends:
                raise RuntimeError(
                    f"parameter '{param.name}' was written while its module showed it unsharded. It defines how it is "
                    f"gathered, so fullshard cannot keep what was written: call reshard() on its module and write then"
                )
            leaf: Any = param.unsharded
            part, chunk = param.chunk_of(local_tensor(leaf.detach())).to(param.values.device), param.values
            if part.shape != chunk.shape:
                raise RuntimeError(
                    f"parameter '{param.name}' was given data of shape {tuple(leaf.shape)} where {tuple(param.shape)} "
                    f"is expected: give it data of its shape"
                )
            if part.data_ptr() == chunk.data_ptr():
                continue
            if part.dtype != chunk.dtype:  # elements that nobody wrote keep their precision
                part = torch.where(part == chunk.to(part.dtype), chunk, part.to(chunk.dtype))
            chunk.copy_(part)
            self._group.writes += 1
            if before[1] != after[1]:
                moved.append((index, leaf))
        memory = wholes() if moved else {}
        for index, leaf in moved:
            private.set_data(local_tensor(leaf), memory[index])
        self.left = list(map(_version_and_address, self.unsharded))

    def _agree_on_training(self) -> None:
        """Let sharded and unsharded parameters require gradients alike. Users may have changed either."""
        with private.PlainAttributes():
            sharded, leaves = (tuple(map(_requires_grad, each)) for each in (self._group.sharded, self.unsharded))
        if leaves and leaves != self.trainable:
            for param, before, leaf in zip(self._group.params, self.trainable, leaves, strict=True):
                if leaf is not before and param.hidden is None:
                    param.sharded.requires_grad_(leaf)
            sharded = tuple(map(_requires_grad, self._group.sharded))
        self.trainable = sharded
        if leaves != sharded:
            self._train_leaves()

    def _train_leaves(self) -> None:
        """Let unsharded parameters require gradients if their sharded ones do."""
        for trained, leaf in zip(self.trainable, self.unsharded, strict=bool(self.unsharded)):
            leaf.requires_grad_(trained)

    def _keeps_chunks(self) -> bool:
        """Whether the parameters still have their chunks of the shard."""
        return all(map(is_, map(private.local_of, self._group.sharded), self._locals))  # type: ignore[arg-type]

    def adopt_replaced(self) -> bool:
        """Find parameters that users replaced, moved or covered; returns whether there are new values to copy.

        Parameters that were replaced (``load_state_dict(assign=True)``, ``to()``, ``to_empty()``) are the group's from
        now on, those that moved (parametrization) are followed, and full tensors that stand in for a parameter
        (``torch.func.functional_call``) are left alone.
        """
        self.substituted.clear()
        replaced = [self._adopt(param) for param in self._group.params]
        self._prepare_updates()
        return any(replaced)

    def _adopt(self, param: ShardedParameter) -> bool:
        for location in list(param.locations):
            shown = location.module._parameters.get(location.name)
            if shown is None:
                self._follow(param, location)
            elif shown is param.sharded or self._was_shown(shown, param):
                continue
            elif self._replaces(shown, param):
                param.sharded = shown
            else:
                self.substituted.add((id(location.module), location.name))
        param.update_grad_dtype()
        return not param.lies_at(param.local)

    @staticmethod
    def _was_shown(shown: torch.Tensor | None, param: ShardedParameter) -> bool:
        """Whether ``shown`` is a tensor that the group once showed for ``param``, and that is there again."""
        owner = owner_of(shown)
        return owner is not None and owner[0].params[owner[1]] is param

    def _replaces(self, shown: torch.Tensor, param: ShardedParameter) -> TypeGuard[nn.Parameter]:
        """Whether what was found in a parameter's location is a new value for it, or replaces it for a while. Raises
        RuntimeError if it is neither."""
        if not isinstance(shown, DTensor):
            return False
        if not isinstance(shown, nn.Parameter):
            raise RuntimeError(
                f"parameter '{param.name}' is a sharded tensor in its module, not a Parameter, because "
                f"functional_call put it there: give functional_call full tensors, for example p.full_tensor()"
            )
        expected = tuple(param.rows_of(torch.empty(param.shape, device="meta")).shape)
        found = tuple(private.local_of(shown).shape)
        if found != expected:
            raise RuntimeError(
                f"parameter '{param.name}' was replaced by a DTensor whose local shape is {found} where {expected} is "
                f"expected: distribute it over the same mesh along the same dim"
            )
        return True

    def _follow(self, param: ShardedParameter, location: Location) -> None:
        """Find the new location of a parameter that was moved in the module tree."""
        known = {(id(other.module), other.name) for other in param.locations}
        for root in self._group.modules:
            for module in root.modules():
                for name, found in module._parameters.items():
                    mine = found is not None and (found is param.sharded or found is param.unsharded)
                    if mine and (id(module), name) not in known:
                        location.module, location.name = module, name
                        return
        param.locations.remove(location)


def _version_and_address(leaf: torch.Tensor) -> tuple[int, int]:
    return private.version_of(leaf), 0 if private.is_traceable_subclass(leaf) else leaf.data_ptr()


def put(module: nn.Module, path: tuple[Any, ...], tensor: torch.Tensor | None) -> None:
    """Put a parameter at a path in a module's attributes, if the module still keeps one there."""
    holder: Any = module.__dict__
    with suppress(LookupError):
        for key in path[:-1]:
            holder = holder[key]
        if isinstance(holder[path[-1]], torch.Tensor):
            holder[path[-1]] = tensor


def updates(locations: Sequence[tuple[nn.Module, str, Any]]) -> Updates:
    """One dict of names for each module."""
    modules: dict[int, tuple[nn.Module, dict[str, Any]]] = {}
    for module, name, tensor in locations:
        modules.setdefault(id(module), (module, {}))[1][name] = tensor
    return list(modules.values())
