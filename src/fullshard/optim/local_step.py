"""Steps of optimizers on the local tensors of sharded parameters, and not on DTensors one by one.

An optimizer whose arithmetic is element by element comes to the same on each rank's own part. Each of its parameters
that is a DTensor has a *twin* here, a plain parameter over the same memory, and a step is run by a *stand-in*: an
optimizer of the same class and the same attributes, whose ``param_groups`` hold the twins and whose ``state`` is keyed
by them::

    the user's optimizer                     the stand-in, for the length of a step
    param_groups[0]["params"]   DTensors     twins, with local gradients
    param_groups[0]["lr"], …        ────▶    the same values
    state[DTensor]["exp_avg"]   DTensors     state[twin]["exp_avg"]: the local tensors of these
    state[DTensor]["step"]          ────▶    the same tensor

Torch lets a hook before a step replace the arguments of the step, of which the optimizer itself is the first. So the
user's optimizer is never altered, and an exception inside of a step leaves nothing to put right. New state is shown as
DTensors over the same memory after the step.

What never changes between two steps is prepared once. What a user may change (parameters, what they hold, state,
gradients, options) is compared with what it was, by identity, before each step.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.group.owners import before_each_step, owner_of
from fullshard.policies import CPUOffloadPolicy
from fullshard.torch_private import (
    STEP_HOOKS,
    DTensorSpec,
    altered_spec,
    choose_grad_dtype,
    chosen_grad_dtype,
    lend_gradients,
    local_of,
    make_dtensor,
    reorder,
    spec_of,
)

#: The classes of torch that compute element by element. Exactly these: a subclass may do anything.
_ELEMENTWISE = {
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
}
_NOT_ELEMENTWISE = (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Muon, torch.optim.SparseAdam)

#: Names of state that is one number for a parameter, also where the parameter is a scalar itself.
_NUMBERS = {"step", "eta", "mu", "mu_product"}

O = TypeVar("O", bound=Optimizer)  # noqa: E741


def local_step(optimizer: O) -> O:
    """Let ``optimizer`` step on the local tensors of its sharded parameters. Needed for classes that are not torch's.

    Its class must compute element by element, so that a part of a parameter is updated from the same part of its
    gradient and state: nothing may be summed over a parameter or look at its shape. Inside of its ``step`` parameters,
    gradients and state are this rank's plain tensors; outside they are DTensors as ever. A step that is given a closure
    or another argument is run on DTensors.

    torch's own Adam, AdamW, SGD and the like do so by themselves. Returns the optimizer. Each rank calls it for itself.

    Raises:
        TypeError: not an optimizer.
        ValueError: none of its parameters is sharded, or it is one of torch's that are not element by element.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"local_step expects a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, _NOT_ELEMENTWISE):
        raise ValueError(
            f"{type(optimizer).__name__} does not compute element by element: on parts of parameters it would be wrong "
            f"without a sign of it. Leave it as it is, to step on DTensors"
        )
    if not any(owner_of(param) for group in optimizer.param_groups for param in group["params"]):
        raise ValueError(
            f"this {type(optimizer).__name__} has no parameter of a sharded module: build it after fully_shard"
        )
    _chosen.add(optimizer)
    return optimizer


class _Lent(NamedTuple):
    """A parameter that a step sees as plain."""

    param: DTensor
    local: torch.Tensor
    twin: nn.Parameter
    spec: DTensorSpec


class _LocalStep:
    """What the steps of one optimizer need. Lives as long as the optimizer, whose hooks hold it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._running: weakref.ref[Optimizer] | None = None
        self._build([])
        self.handle = optimizer.register_step_pre_hook(self._begin)
        reorder(optimizer.register_step_post_hook(self._after), last=False)  # the user's own hooks look at the state
        optimizer.register_load_state_dict_post_hook(self._forget)

    def _forget(self, optimizer: Optimizer | None = None) -> None:
        """Take the state anew at the next step. Memory of state that was replaced is not kept until then."""
        self._state: defaultdict[Any, Any] = defaultdict(dict)
        self._theirs: Mapping[Any, Any] | None = None
        self._seen = self._seen_here = _Seen({})

    # -- before a step -----------------------------------------------------------------------------------------------

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self._running is not None:
            self._end(optimizer)  # an exception, which is still held, left it open
        given = [*args[1:], *kwargs.values()]
        if args[0] is not optimizer or any(each is not None for each in given) or torch.compiler.is_compiling():
            return None
        if any(group.get("differentiable") or group.get("capturable") for group in optimizer.param_groups):
            return None
        if not self._lend(optimizer):
            self._take_back()
            return None
        stand_in = object.__new__(type(optimizer))
        stand_in.__dict__.update(optimizer.__dict__, **{name: {} for name in STEP_HOOKS})
        stand_in.state = self._state
        stand_in.param_groups = [
            {**group, "params": params} for group, params in zip(optimizer.param_groups, self._stand_ins, strict=True)
        ]
        # It lives no longer than the step, so its end tells of a step that raised.
        self._running = weakref.ref(stand_in, partial(self._abandon, weakref.ref(optimizer)))
        return (stand_in, *args[1:]), kwargs

    def _lend(self, optimizer: Optimizer) -> bool:
        """Give the twins what the parameters have; returns whether all of it can be given."""
        groups = [group["params"] for group in optimizer.param_groups]
        if list(map(len, groups)) != self._sizes or not _same(chain.from_iterable(groups), self._params):
            self._build(groups)
        if not self._lent:
            return False
        if not lend_gradients(self._lent):
            self._take_back()
            self._build(groups)  # what they hold was replaced, if it is not that a gradient is no such DTensor
            if not lend_gradients(self._lent):
                return False
        known = optimizer.state is self._theirs and self._seen.is_still(optimizer.state)
        return known or self._take_state(optimizer)

    def _build(self, groups: list[list[torch.Tensor]]) -> None:
        """Make the twins; none if one of the parameters can have none."""
        self._sizes, self._params = list(map(len, groups)), list(chain.from_iterable(groups))
        self._stand_ins: list[list[torch.Tensor]] = []
        self._by_param: dict[Any, _Lent] = {}
        self._by_twin: dict[Any, _Lent] = {}
        self._lent: list[tuple[Any, ...]] = []
        self._forget()
        lent: dict[Any, _Lent] = {}
        for param in self._params:
            if isinstance(param, DTensor) and param not in lent:
                local, spec, owner = local_of(param), spec_of(param), owner_of(param)
                if type(local) is not torch.Tensor or any(place.is_partial() for place in spec.placements):
                    return
                if owner is not None:
                    if _offloads_state(owner[0].options.offload):
                        return
                    spec = owner[0].params[owner[1]].spec
                twin = nn.Parameter(local, requires_grad=param.requires_grad)
                twin.__dict__.update(param.__dict__)
                choose_grad_dtype(twin, chosen_grad_dtype(param))
                lent[param] = _Lent(param, local, twin, spec)
        self._stand_ins = [[lent[param].twin if param in lent else param for param in group] for group in groups]
        self._lent = [tuple(each) for each in lent.values()]  # these are unpacked faster than named tuples
        self._by_param = lent
        self._by_twin = {each.twin: each for each in lent.values()}

    def _take_state(self, optimizer: Optimizer) -> bool:
        """Key the optimizer's state by twins; returns whether all of it can be given."""
        self._forget()
        for key, entry in optimizer.state.items():
            lent = self._by_param.get(key)
            if lent is None:
                self._state[key] = entry
                continue
            if not isinstance(entry, dict):
                return False
            mine = self._state[lent.twin] = {}
            for name, value in entry.items():
                if isinstance(value, DTensor) and spec_of(value).placements != lent.spec.placements:
                    return False
                mine[name] = local_of(value) if isinstance(value, DTensor) else value
        self._theirs, self._seen, self._seen_here = optimizer.state, _Seen(optimizer.state), _Seen(self._state)
        return True

    # -- after a step ------------------------------------------------------------------------------------------------

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        stand_in = self._running() if self._running is not None else None
        if stand_in is None or args[0] is not stand_in:
            return
        for group, mine in zip(optimizer.param_groups, stand_in.param_groups, strict=True):
            _write_back(mine, group, ("params",))
        _write_back(stand_in.__dict__, optimizer.__dict__, ("state", "param_groups", *STEP_HOOKS))
        self._end(optimizer)

    def _abandon(self, optimizer: weakref.ref[Optimizer], stand_in: weakref.ref[Optimizer]) -> None:
        alive = optimizer()
        if alive is not None and stand_in is self._running:
            self._end(alive)

    def _end(self, optimizer: Optimizer) -> None:
        self._running = None
        self._take_back()
        if optimizer.state is not self._theirs:  # replaced after an exception
            return
        # Torch's own classes only add to their state.
        known = type(optimizer) in _ELEMENTWISE
        if self._seen_here.has_grown(self._state) if known else not self._seen_here.is_still(self._state):
            self._bring_home(optimizer.state)
            self._seen, self._seen_here = _Seen(optimizer.state), _Seen(self._state)

    def _take_back(self) -> None:
        """Take the gradients from the twins: they live as long as the user keeps them, and no longer."""
        for twin in self._by_twin:
            twin.grad = None

    def _bring_home(self, theirs: dict[Any, Any]) -> None:
        """Show what the step changed in the state."""
        for key, mine in self._state.items():
            lent = self._by_twin.get(key)
            if lent is None:
                theirs[key] = mine
                continue
            if not isinstance(mine, dict):
                theirs[lent.param] = _shown("", mine, lent)
                continue
            entry = theirs.setdefault(lent.param, {})
            for name, value in mine.items():
                shown = entry.get(name)
                if (local_of(shown) if isinstance(shown, DTensor) else shown) is not value or name not in entry:
                    entry[name] = _shown(name, value, lent)
            for name in entry.keys() - mine.keys():
                del entry[name]
        for key in list(theirs):
            lent = self._by_param.get(key)
            if (key if lent is None else lent.twin) not in self._state:
                del theirs[key]


def _shown(name: str, value: Any, lent: _Lent) -> Any:
    """State as the user sees it: a DTensor where it has an element for each of the parameter's."""
    if value is lent.twin:
        return lent.param
    if not isinstance(value, torch.Tensor) or value.shape != lent.local.shape or (not value.ndim and name in _NUMBERS):
        return value
    meta = lent.spec.tensor_meta
    assert meta is not None
    return make_dtensor(value, lent.spec if value.dtype == meta.dtype else altered_spec(lent.spec, dtype=value.dtype))


def _offloads_state(policy: Any) -> bool:
    """Whether state goes to the CPU after each step: then nothing else may hold it."""
    return isinstance(policy, CPUOffloadPolicy) and not policy.parameters


def _write_back(source: dict[str, Any], target: dict[str, Any], besides: tuple[str, ...]) -> None:
    """Write back what the step wrote to options or attributes."""
    for name, value in source.items():
        if name not in besides and (name not in target or target[name] is not value):
            target[name] = value


class _Seen:
    """The objects that were in a state, to tell whether one was replaced."""

    def __init__(self, state: Mapping[Any, Any]) -> None:
        self._all = list(state.values())
        self._entries = [entry for entry in self._all if isinstance(entry, dict)]
        self._values = [value for entry in self._entries for value in entry.values()]
        self._has_gaps = any(value is None for value in self._values)

    def is_still(self, state: Mapping[Any, Any]) -> bool:
        if not _same(state.values(), self._all):
            return False
        return _same(chain.from_iterable(map(dict.values, self._entries)), self._values)

    def has_grown(self, state: Mapping[Any, Any]) -> bool:
        """Whether something was added; half the time of ``is_still`` where nothing else can have happened."""
        return len(state) != len(self._all) or sum(map(len, self._entries)) != len(self._values) or self._has_gaps


def _same(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Whether two iterables give the same objects. Not a line of Python is run for each: it is asked in every step."""
    return all(map(is_, chain(one, _END), chain(other, _END)))


_END = (object(),)

_chosen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_steps: weakref.WeakKeyDictionary[Optimizer, _LocalStep] = weakref.WeakKeyDictionary()


def _serve(optimizer: Optimizer) -> None:
    """Is called before each step of an optimizer that has parameters of groups."""
    step = _steps.get(optimizer)
    if step is None and (type(optimizer) in _ELEMENTWISE or optimizer in _chosen):
        step = _steps[optimizer] = _LocalStep(optimizer)
    if step is not None:
        reorder(step.handle, last=True)  # the user's own hooks may change gradients and options


before_each_step(_serve)
