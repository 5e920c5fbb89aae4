"""Steps of optimizers on the local tensors of sharded parameters, and not on DTensors one by one.

Each parameter that is a DTensor gets a *twin*, a plain parameter over the same memory. A *substitute* runs the step: an
optimizer of the same class with the same attributes, which has the twins in place of the DTensors::

    the user's optimizer                     the substitute, for the length of a step
    param_groups[0]["params"]   DTensors     twins, with local gradients
    param_groups[0]["lr"], …        ────▶    the same values
    state[DTensor]["exp_avg"]   DTensors     state[twin]["exp_avg"]: the local tensors of these
    state[DTensor]["step"]          ────▶    the same tensor

In torch a hook before a step may replace the arguments of the step, and the first of them is the optimizer. So the
user's optimizer is never changed during a step, and an exception leaves nothing to repair. Before each step, everything
that a user may replace is compared by identity with the last step. Everything else is prepared once.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from fullshard import torch_private
from fullshard.group.owners import owner_of
from fullshard.group.parameter import ShardedParameter, local_tensor
from fullshard.optim.disk_step import DiskStep, is_on_disk, step_of, twin_of
from fullshard.ragged import is_ragged
from fullshard.torch_private import local_of, spec_of

#: The classes of torch that compute element by element. Exactly these: a subclass may do anything.
_ELEMENTWISE = {ASGD, Adadelta, Adagrad, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop, SGD}
NOT_ELEMENTWISE = (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Muon, torch.optim.SparseAdam)

#: Names of state that is one number for a parameter, also where the parameter is a scalar itself.
NUMBERS = {"step", "eta", "mu", "mu_product"}

O = TypeVar("O", bound=Optimizer)  # noqa: E741


def local_step(optimizer: O, whole: bool = False) -> O:
    """Make ``optimizer`` step on the local tensors of its sharded parameters. Call it for classes that are not torch's.

    torch's own Adam, AdamW, SGD and similar classes need no call.

    Args:
        optimizer: an optimizer whose class computes element by element: each part of a parameter is updated only from
            the same part of its gradient and state. It must not sum over a parameter, or use its shape. Inside of its
            ``step``, parameters, gradients and state are this rank's plain tensors. Outside, state of the shape of the
            part is a DTensor, and other state is as it is. A step with a closure or another argument runs on DTensors.
            ``state[param]`` must be a dict of values, without containers of sharded tensors.
        whole: the class may compute with whole parameters instead, as Shampoo does with matrices. Each parameter must
            lie on one rank: let ``shard_placement_fn`` return ``Ragged()``. A rank steps only on the parameters that it
            has, and has state only for these.

    Returns:
        ``optimizer``.

    Raises:
        TypeError: ``optimizer`` is not a ``torch.optim.Optimizer``.
        ValueError: none of its parameters is sharded, or it is LBFGS, Adafactor, Muon or SparseAdam of torch, which do
            not compute element by element. The first step raises it if ``whole`` is true and a parameter is cut.

    Ranks: each for itself, alike.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"local_step expects a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, NOT_ELEMENTWISE):
        raise ValueError(
            f"{type(optimizer).__name__} does not compute element by element: on parts of parameters its results would "
            f"be silently wrong. Do not call local_step for it, so that it steps on DTensors"
        )
    if not any(owner_of(param) for group in optimizer.param_groups for param in group["params"]):
        raise ValueError(
            f"this {type(optimizer).__name__} has no parameter of a sharded module: build it after fully_shard"
        )
    if optimizer not in _steps:
        _steps[optimizer] = _LocalStep(optimizer, whole)
    return optimizer


#: A parameter that a step sees as plain: the DTensor, its local tensor, the twin, and the spec of gradient and state.
_Link = tuple[DTensor, torch.Tensor, nn.Parameter, torch_private.DTensorSpec]
_OWN_ATTRIBUTES = ("param_groups", "state", *torch_private.STEP_HOOKS)  # attributes that a substitute does not share


class _LocalStep:
    """Runs the steps of one optimizer on local tensors. The optimizer's hooks keep it alive."""

    def __init__(self, optimizer: Optimizer, whole: bool = False, by_blocks: bool = False) -> None:
        self._running: weakref.ref[Optimizer] | None = None
        self._needs_whole, self._name = whole, type(optimizer).__name__
        self._is_elementwise, self._is_torchs = not (whole or by_blocks), type(optimizer) in _ELEMENTWISE
        self._on_disk: dict[torch.Tensor, int] = {}  # parameters whose state is, and which group has each
        self._by_param: dict[Any, _Link] = {}
        self._on_device: list[list[torch.Tensor]] = []  # what steps first, where a part is on the CPU
        self._build([])
        self.handle = optimizer.register_step_pre_hook(self._begin)
        after = optimizer.register_step_post_hook(self._after)
        torch_private.reorder(after, last=False)  # the user's own hooks look at the state
        optimizer.register_load_state_dict_post_hook(self._forget)

    def _forget(self, optimizer: Optimizer | None = None) -> None:
        """Forget the state, to read it again at the next step. The memory of replaced state is freed now."""
        self._state: defaultdict[Any, Any] = defaultdict(dict)
        self._user_state: Mapping[Any, Any] | None = None
        self._seen: list[Any] = []  # the objects in the user's state, and in the local one, after the last step
        self._seen_local: list[Any] = []

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self._running is not None:
            self._end(optimizer)  # a step raised, and its exception keeps the substitute alive
        arguments = [*args[1:], *kwargs.values()]
        if args[0] is not optimizer or any(each is not None for each in arguments) or torch.compiler.is_compiling():
            return None
        if any(group.get("differentiable") or group.get("capturable") for group in optimizer.param_groups):
            return None
        if not self._lend(optimizer):
            self._take_back()
            return None
        if self._disk_step is not None:
            self._disk_step.run(optimizer)
        if self._on_device:  # its kernels run while the CPU updates the rest
            step_of(type(optimizer))(_substitute_for(optimizer, self._on_device, self._state))
        substitute = _substitute_for(optimizer, self._substitutes, self._state)
        # The substitute is freed after the step. If the step raises, that is what ends it.
        self._running = weakref.ref(substitute, partial(self._abandon, weakref.ref(optimizer)))
        return (substitute, *args[1:]), kwargs

    def _lend(self, optimizer: Optimizer) -> bool:
        """Give the parameters' gradients and state to the twins. Returns whether that is possible for all of them."""
        groups = [group["params"] for group in optimizer.param_groups]
        is_known = len(groups) == len(self._groups) and all(map(_same, groups, self._groups))
        if not is_known or not torch_private.lend_gradients(self._lent):
            self._build(groups)  # the parameters, or their local tensors, were replaced
            if not torch_private.lend_gradients(self._lent):
                return False
        if not self._by_param and not self._on_disk:
            return False
        known = optimizer.state is self._user_state and _same(_objects(optimizer.state), self._seen)
        return known or self._adopt_state(optimizer)

    def _build(self, groups: list[list[torch.Tensor]]) -> None:
        """Make the twins, or none at all if some parameter cannot have one."""
        self._take_back()
        self._forget()
        self._groups = [list(group) for group in groups]
        self._by_param, self._lent = {}, []
        twins: dict[Any, _Link] = {}
        self._on_disk = {each: at for at, group in enumerate(groups) for each in filter(is_on_disk, group)}
        self._disk_step = DiskStep(self._on_disk, _substitute_for) if self._on_disk else None
        if self._needs_whole:
            _check_parts(self._name, _sharded(groups), None)
        if self._on_disk and not self._is_elementwise:
            name = _sharded([[*self._on_disk]])[0].name
            raise ValueError(
                f"{self._name} does not compute element by element, and the state of '{name}' is on a disk, from which "
                f"a step reads parts: use CPUOffloadPolicy, or an optimizer such as AdamW"
            )
        for param in chain.from_iterable(groups):
            if isinstance(param, DTensor) and param not in twins and param not in self._on_disk:
                local, spec, owner = local_of(param), spec_of(param), owner_of(param)
                if type(local) is not torch.Tensor or any(placement.is_partial() for placement in spec.placements):
                    return
                if owner is not None:
                    if owner[0].offloaded.moves_state(owner[1]):  # after each step: nothing else may hold it
                        return
                    spec = owner[0].params[owner[1]].spec
                twins[param] = param, local, twin_of(param, local), spec
        self._by_param = twins
        self._lent = [link for link in twins.values() if link[1].numel() or not self._needs_whole]
        self._substitutes = [
            [twins[param][2] if param in twins else param for param in group if param not in self._on_disk]
            for group in groups
        ]
        self._on_device = []
        places = {param.is_cpu for param in chain.from_iterable(self._substitutes)}
        if len(places) == 2 and self._is_torchs:
            self._on_device = [[param for param in group if not param.is_cpu] for group in self._substitutes]
            self._substitutes = [[param for param in group if param.is_cpu] for group in self._substitutes]

    def _adopt_state(self, optimizer: Optimizer) -> bool:
        """Make the local state, keyed by twins. Returns whether that is possible for all state."""
        self._forget()
        for key, entry in optimizer.state.items():
            if key in self._on_disk:
                continue
            if key not in self._by_param:
                self._state[key] = entry
                continue
            if not isinstance(entry, dict):
                return False
            _, _, twin, spec = self._by_param[key]
            mine = self._state[twin]
            for name, value in entry.items():
                if isinstance(value, DTensor) and spec_of(value).placements != spec.placements:
                    if not is_ragged((*spec_of(value).placements, *spec.placements)):
                        return False
                    entry[name] = value = _cut_again(optimizer, name, value, spec)
                mine[name] = local_tensor(value)
        self._user_state, self._seen, self._seen_local = (
            optimizer.state,
            _objects(optimizer.state),
            _objects(self._state),
        )
        return True

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        substitute: Optimizer = args[0]
        if self._running is None or substitute is not self._running():
            return
        for group, mine in zip(optimizer.param_groups, substitute.param_groups, strict=True):
            group.update(mine, params=group["params"])
        own = {name: optimizer.__dict__[name] for name in _OWN_ATTRIBUTES}
        optimizer.__dict__.update(substitute.__dict__, **own)
        self._end(optimizer)

    def _abandon(self, optimizer: weakref.ref[Optimizer], substitute: weakref.ref[Optimizer]) -> None:
        alive = optimizer()
        if alive is not None and substitute is self._running:
            self._end(alive)

    def _end(self, optimizer: Optimizer) -> None:
        self._running = None
        self._take_back()
        was_replaced = optimizer.state is not self._user_state  # after an exception
        if not was_replaced and not _same(here := _objects(self._state), self._seen_local):
            self._localize_state(optimizer.state)
            self._seen, self._seen_local = _objects(optimizer.state), here

    def _take_back(self) -> None:
        """Remove the gradients from the twins, so that only the user keeps them alive."""
        for _, _, twin, _ in self._by_param.values():
            twin.grad = None

    def _localize_state(self, user_state: dict[Any, Any]) -> None:
        """Update the user's state after a step. What the step did not replace stays the same object."""
        before, by_twin = dict(user_state), {each[2]: each for each in self._by_param.values()}
        user_state.clear()
        user_state.update({each: before[each] for each in self._on_disk if each in before})
        for key, mine in self._state.items():
            if key not in by_twin:
                user_state[key] = mine
                continue
            param, *_ = link = by_twin[key]
            if isinstance(mine, dict):
                entry = before.get(param, {})
                shown = {name: _shown(name, value, entry.get(name), link) for name, value in mine.items()}
                entry.clear()
                entry.update(shown)
                user_state[param] = entry
            else:
                user_state[param] = _shown("", mine, before.get(param), link)


def _substitute_for(
    optimizer: Optimizer, params: Iterable[Sequence[torch.Tensor]], state: defaultdict[Any, Any]
) -> Optimizer:
    """An optimizer like ``optimizer``, without its hooks, that has other parameters in its groups, and their state."""
    substitute = object.__new__(type(optimizer))
    substitute.__dict__.update(optimizer.__dict__, **{name: {} for name in torch_private.STEP_HOOKS})
    substitute.state = state
    substitute.param_groups = [
        {**group, "params": own} for group, own in zip(optimizer.param_groups, params, strict=True)
    ]
    return substitute


def _cut_again(optimizer: Optimizer, name: str, value: DTensor, spec: torch_private.DTensorSpec) -> DTensor:
    """Cuts state like its parameter, if it was loaded from a model that cuts its ragged parameters differently. All
    ranks must call it. Raises ValueError if the state is quantized."""
    blocks = _blocks_of(optimizer)
    if blocks is not None and blocks.quantize(value.numel()):
        raise ValueError(
            f"the state '{name}' of {type(optimizer).__name__} for a parameter of shape {tuple(spec.shape)} was loaded "
            f"as {spec_of(value).placements}, and the parameter is {spec.placements}. It is quantized and cannot be "
            f"cut again: save and load with fullshard.checkpoint"
        )
    return value.redistribute(placements=spec.placements)


def _shown(name: str, value: Any, before: Any, link: _Link) -> Any:
    """A value of the local state as the user sees it: a DTensor if it has the shape of the local parameter."""
    param, local, twin, spec = link
    if value is local_tensor(before):
        return before
    if value is twin:
        return param
    if not isinstance(value, torch.Tensor) or value.shape != local.shape or (not value.ndim and name in NUMBERS):
        return value
    return torch_private.make_dtensor(value, torch_private.altered_spec(spec, dtype=value.dtype))


def _objects(state: Mapping[Any, Any]) -> list[Any]:
    """All objects in a state, to notice replaced ones. Called twice in every step."""
    entries = list(state.values())
    return [*entries, *chain.from_iterable([entry.values() for entry in entries if isinstance(entry, dict)])]


def _same(one: Collection[Any], other: Collection[Any]) -> bool:
    """Whether two collections have the same objects in the same order. Runs no Python code for each object."""
    return len(one) == len(other) and all(map(is_, one, other))


_steps: weakref.WeakKeyDictionary[Optimizer, _LocalStep] = weakref.WeakKeyDictionary()


class _Blocks(NamedTuple):
    """How an optimizer quantizes its state."""

    size: int  # elements of a block
    least: int  # elements from which it quantizes the state of a parameter
    has_rest: bool  # whether the last block may be smaller; otherwise it quantizes whole blocks only

    def quantize(self, numel: int) -> bool:
        """Whether the state of a tensor is quantized."""
        return numel >= self.least and (self.has_rest or numel % self.size == 0)

    def are_whole(self, parts: list[int], numel: int) -> bool:
        """Whether the parts of a parameter, in their order, are quantized like all of it."""
        is_quantized = self.quantize(numel)
        is_cut_inside = is_quantized and any(part % self.size for part in parts[:-1])
        return not is_cut_inside and all(self.quantize(part) == is_quantized for part in parts)


def _blocks_of(optimizer: Any) -> _Blocks | None:
    """How an optimizer of torchao or bitsandbytes quantizes its state; ``None`` for all others. Imports nothing."""
    module = type(optimizer).__module__
    if module == "torchao.optim.adam" and hasattr(optimizer, "block_size"):
        return _Blocks(int(optimizer.block_size), 4096, has_rest=False)
    if module.startswith("bitsandbytes.optim.") and optimizer.args.optim_bits == 8 and not optimizer.args.max_unorm:
        params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        if any(id(param) in optimizer.mng.pid2config for param in params) or optimizer.mng.module_weight_config_triple:
            return None  # options of single parameters, which it finds by identity: a twin would have none
        return _Blocks(256, int(optimizer.args.min_8bit_size), has_rest=True)
    return None


def _computes_on_blocks(optimizer: Optimizer) -> bool:
    """Whether an optimizer that needs whole matrices, or quantizes its state by blocks, gets them on local tensors:
    placements choose the rows of some. Raises ValueError if others of its parameters are cut inside of their blocks."""
    blocks = _blocks_of(optimizer)
    if blocks is None and type(optimizer) is not getattr(torch.optim, "Muon", None):
        return False
    params = _sharded(group["params"] for group in optimizer.param_groups)
    if not any(param.placement for param in params):
        return False
    _check_parts(type(optimizer).__name__, params, blocks)
    return True


def _sharded(groups: Iterable[list[torch.Tensor]]) -> list[ShardedParameter]:
    """The sharded ones of an optimizer's parameters."""
    owners = map(owner_of, chain.from_iterable(groups))
    return [owner[0].params[owner[1]] for owner in owners if owner is not None]


def _check_parts(name: str, params: list[ShardedParameter], blocks: _Blocks | None) -> None:
    """Raise ValueError if a parameter of an optimizer is cut inside of its blocks, or, without blocks, at all."""
    for param in params:
        numel, ranks = param.shape.numel(), range(param.data.shard_size if param.dim is not None else 1)
        parts = [part for rank in ranks if (part := math.prod(param.cut.chunk_shape(rank)))]
        if blocks is None:
            is_right, needs = {*parts} <= {numel}, "whole matrices, placed by Ragged()"
        else:
            least = -(-blocks.least // blocks.size) * blocks.size
            is_right = blocks.are_whole(parts, numel)
            needs = f"parts that it quantizes like the whole, placed by Ragged(block={least})"
        if not is_right:
            raise ValueError(
                f"{name} needs {needs}. But '{param.name}' of shape {tuple(param.shape)} is cut into parts of "
                f"{sorted({*parts})} elements: let shard_placement_fn return this for the parameter, for example "
                f"fully_shard(model, shard_placement_fn=lambda param: Ragged())"
            )


def prepare_step(optimizer: Optimizer) -> None:
    """Make the step that begins now run on local tensors, if possible. The optimizer has parameters of groups."""
    if optimizer not in _steps:
        if type(optimizer) in _ELEMENTWISE:
            _steps[optimizer] = _LocalStep(optimizer)
        elif _computes_on_blocks(optimizer):
            _steps[optimizer] = _LocalStep(optimizer, by_blocks=True)
    if (step := _steps.get(optimizer)) is not None:
        torch_private.reorder(step.handle, last=True)  # the user's own hooks may change gradients and options
