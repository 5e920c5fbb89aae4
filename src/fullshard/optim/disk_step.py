"""Steps of optimizers on what is on a disk: a part of the parameters is in memory at a time.

The class's own step runs several times, each time for an optimizer that has only one part: parameters, or pieces of
large ones, as 1-D tensors in memory, with their gradients and state. Meanwhile threads read the next part, and write
the one before. For an optimizer that computes element by element, this is the step on all of them.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeGuard, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.disk.file import BLOCK, DiskFile, DiskWork
from fullshard.disk.tensor import DiskTensor, in_memory_order
from fullshard.group.owners import owner_of
from fullshard.group.parameter import ShardedParameter, local_tensor
from fullshard.torch_private import (
    altered_spec,
    choose_grad_dtype,
    chosen_grad_dtype,
    make_dtensor,
    spec_of,
)

SubstituteFor = Callable[[Optimizer, Iterable[Sequence[torch.Tensor]], defaultdict[Any, Any]], Optimizer]
#: Tensors that a step has of each parameter: the value, the gradient, and the state of AdamW.
_TENSORS = 4


@dataclass(eq=False)
class _DiskPiece:
    """Elements of a parameter, and what a step needs of them."""

    param: DTensor
    known: ShardedParameter
    disk: DiskFile
    group: int  # which of the optimizer's groups has it
    start: int
    stop: int
    twin: nn.Parameter = field(init=False)
    state: dict[str, Any] = field(init=False, default_factory=dict)
    reads: list[DiskWork] = field(init=False, default_factory=list)
    memory: list[torch.Tensor] = field(init=False, default_factory=list)
    sources: list[tuple[object, int]] = field(init=False, default_factory=list)

    @property
    def span(self) -> tuple[int, int, int]:
        return id(self.param), self.start, self.stop

    def load(self, state: Mapping[str, Any]) -> None:
        """Start to read the value, and the state that has an element for each of the parameter's."""
        local = local_tensor(self.param.detach())
        self.sources = _sources(self.param, state)
        self.twin = twin_of(self.param, self._part(local))
        self.state = {k: self._part(local_tensor(v)) for k, v in state.items() if _is_elementwise(v, local)}

    def begin(self, state: dict[str, Any], before: dict[str, Any]) -> None:
        """Start to read the gradient, and take the rest of the state, such as the number of steps. It belongs to the
        whole parameter: all pieces but the first take it from ``before`` the step."""
        self.twin.grad = self._part(local_tensor(self.param.grad))
        numbers = {k: _copied(v) if self.start else state[k] for k, v in before.items() if k not in self.state}
        self.state.update(numbers)

    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DiskTensor):
            return in_memory_order(tensor)[self.start : self.stop]
        part = self.disk.staging.take(self.stop - self.start, tensor.dtype)
        self.memory.append(part)
        self.reads.append(tensor.region.read(part, self.start))
        return part

    def store(self, state: dict[str, Any]) -> None:
        """Start to write what the step has changed, and give the memory back."""
        local, numel, writes = local_tensor(self.param.detach()), self.stop - self.start, list[DiskWork]()
        if isinstance(local, DiskTensor):
            writes.append(local.region.write(self.twin.detach(), self.start))
        for name, value in self.state.items():
            if not isinstance(value, torch.Tensor) or value.shape != (numel,):
                if not self.start:
                    state[name] = value
                continue
            if name not in state:
                state[name] = _zeros(self.param, value.dtype, f"'{name}' ")
            place = local_tensor(state[name])
            if isinstance(place, DiskTensor):
                writes.append(place.region.write(value, self.start))
            else:
                in_memory_order(place)[self.start : self.stop] = value
        memory, self.memory = self.memory, []
        del self.twin, self.state
        work = DiskWork.of(writes)
        self.disk.staging.give_back(memory, work)
        self.disk.bound(work, len(writes) * numel * local.itemsize)


def _sources(param: DTensor, state: Mapping[str, Any]) -> list[tuple[object, int]]:
    """What a step reads of a parameter beside its gradient: the memory or the region, and how often it was written."""
    parts = [local_tensor(value) for value in (param.detach(), *state.values()) if isinstance(value, DTensor)]
    return [(p.region, p.region.writes) if isinstance(p, DiskTensor) else (p.data_ptr(), p._version) for p in parts]


def _is_elementwise(value: Any, local: torch.Tensor) -> bool:
    """Whether state has an element for each of the parameter's. Other state, such as the number of steps, is whole."""
    return isinstance(value, DTensor) and local_tensor(value).shape == local.shape


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


class DiskStep:
    """The steps of one optimizer on parameters whose state is on a disk.

    Several optimizers may step one after another, for example one for each parameter, in a backward. Then each reads
    ahead for the optimizer that followed it the last time. At most one optimizer has values that were read ahead.

    Args:
        params: the parameters, each with the index of its group in the optimizer.
        substitute_for: makes an optimizer like another that has other parameters, and their state.
    """

    _last: ClassVar[weakref.ref[DiskStep] | None] = None  # the one that stepped last
    _reader: ClassVar[weakref.ref[DiskStep] | None] = None  # the one for which something is read ahead

    def __init__(self, params: Mapping[torch.Tensor, int], substitute_for: SubstituteFor) -> None:
        self._params, self._substitute_for = params, substitute_for
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._following: weakref.ref[DiskStep] | None = None
        self._ahead: list[_DiskPiece] = []

    def run(self, optimizer: Optimizer) -> None:
        """Make a step. Raises DiskError; the step is then lost, and perhaps made in part."""
        offload_state(optimizer)
        self._optimizer = weakref.ref(optimizer)
        buckets = list(_buckets(_pieces(self._params, with_grad=True)))
        step, states = step_of(type(optimizer)), optimizer.state
        before = {param: _numbers_copied(states.get(param, {}), local_tensor(param.detach())) for param in self._params}
        following = self._follow()
        if buckets:
            buckets[0] = self._take_ahead(buckets[0], states) or _load(buckets[0], before)
        for number, bucket in enumerate(buckets):
            for piece in bucket:
                piece.begin(states[piece.param], before[piece.param])
            if number + 1 < len(buckets):
                _load(buckets[number + 1], before)
            elif following is not None:
                following._read_ahead()
            for piece in bucket:
                DiskWork.of(piece.reads).wait()
            groups = range(len(optimizer.param_groups))
            params = [[piece.twin for piece in bucket if piece.group == at] for at in groups]
            state = defaultdict[Any, Any](dict, {piece.twin: piece.state for piece in bucket})
            step(self._substitute_for(optimizer, params, state))
            for piece in bucket:
                piece.store(states[piece.param])

    def _follow(self) -> DiskStep | None:
        """Note which optimizer this one follows. Returns the one that followed this one the last time, if any."""
        last, DiskStep._last = _alive(DiskStep._last), weakref.ref(self)
        if last is not None and last is not self:
            last._following = weakref.ref(self)
        return _alive(self._following)

    def _read_ahead(self) -> None:
        """Start to read what the next step needs first, without gradients."""
        if (reader := _alive(DiskStep._reader)) is not None:
            reader._drop()
        optimizer, bucket = _alive(self._optimizer), next(_buckets(_pieces(self._params, with_grad=False)), [])
        if optimizer is not None:
            self._ahead, DiskStep._reader = _load(bucket, optimizer.state), weakref.ref(self)

    def _take_ahead(self, wanted: Sequence[_DiskPiece], states: Mapping[Any, Any]) -> list[_DiskPiece]:
        """What was read ahead, if it is what the step wants and nobody has written to it since."""
        found = self._ahead
        is_same = [each.span for each in found] == [each.span for each in wanted] and all(
            each.sources == _sources(each.param, states.get(each.param, {})) for each in found
        )
        if not is_same:
            self._drop()
            return []
        self._ahead = []
        return found

    def _drop(self) -> None:
        """Give back what was read ahead and not used."""
        pieces, self._ahead = self._ahead, []
        for piece in pieces:
            memory, piece.memory = piece.memory, []
            piece.disk.staging.give_back(memory, DiskWork.of(piece.reads))


_T = TypeVar("_T")


def _alive(reference: weakref.ref[_T] | None) -> _T | None:
    return None if reference is None else reference()


def offload_state(optimizer: Optimizer) -> None:
    """Move state that was made or loaded in memory to the disk, if its parameter's state is to be there. It is cut like
    the parameter. All ranks must call it."""
    for param, state in optimizer.state.items():
        if not (isinstance(param, DTensor) and isinstance(state, dict) and is_on_disk(param)):
            continue
        known, _ = _place_of(param)
        for name, value in state.items():
            if isinstance(value, DTensor) and value.shape == param.shape and value.placements != param.placements:
                value = state[name] = value.redistribute(placements=param.placements)  # of a model with other cuts
            local = local_tensor(value)
            if isinstance(value, DTensor) and local.shape == known.local.shape and not isinstance(local, DiskTensor):
                state[name] = _zeros(param, local.dtype, f"'{name}' ")
                local_tensor(state[name]).copy_(local)


def state_like(param: DTensor, dtype: torch.dtype) -> DTensor:
    """Zeros with the layout of a parameter: on the disk, if its state is there."""
    if is_on_disk(param):
        return _zeros(param, dtype)
    local = torch.zeros_like(local_tensor(param.detach()), dtype=dtype)
    return make_dtensor(local, altered_spec(spec_of(param), dtype=dtype))


def _zeros(param: DTensor, dtype: torch.dtype, name: str = "") -> DTensor:
    """Zeros on the disk with the layout of a parameter, as the user sees state."""
    known, disk = _place_of(param)
    local = DiskTensor.like(disk, known.local, f"the state {name}of '{known.name}'", dtype)
    return make_dtensor(local, altered_spec(spec_of(param), dtype=dtype))


def twin_of(param: DTensor, values: torch.Tensor) -> nn.Parameter:
    """What a step sees as the parameter: a plain one over ``values``, with the same attributes."""
    twin = nn.Parameter(values, requires_grad=param.requires_grad)
    twin.__dict__.update(param.__dict__)
    choose_grad_dtype(twin, chosen_grad_dtype(param))
    return twin


def is_on_disk(param: object) -> TypeGuard[DTensor]:
    """Whether the optimizer's state of a parameter is on a disk."""
    owner = owner_of(param) if isinstance(param, DTensor) else None
    return owner is not None and owner[0].offloaded.disk is not None and owner[1] in owner[0].offloaded.state


def _place_of(param: DTensor) -> tuple[ShardedParameter, DiskFile]:
    owner = owner_of(param)
    assert owner is not None
    assert owner[0].offloaded.disk is not None
    return owner[0].params[owner[1]], owner[0].offloaded.disk


def _pieces(params: Mapping[torch.Tensor, int], with_grad: bool) -> list[_DiskPiece]:
    """The pieces of parameters: of all, or of those that have gradients."""
    pieces: list[_DiskPiece] = []
    for param, at in params.items():
        if isinstance(param, DTensor) and (param.grad is not None or not with_grad):
            known, disk = _place_of(param)
            _lay_gradient(param, known)
            numel, most = known.local.numel(), BLOCK // known.dtype.itemsize
            starts = range(0, max(numel, 1), most)
            pieces += [_DiskPiece(param, known, disk, at, start, min(start + most, numel)) for start in starts]
    return pieces


def _lay_gradient(param: DTensor, known: ShardedParameter) -> None:
    """Give a gradient in memory the strides of its parameter: a piece is a run of elements in memory."""
    grad: Any = param.grad
    local = None if grad is None else local_tensor(grad)
    if local is None or isinstance(local, DiskTensor) or local.stride() == known.local.stride():
        return
    laid = torch.empty_strided(known.local.shape, known.local.stride(), dtype=local.dtype, device=local.device)
    param.grad = make_dtensor(laid.copy_(local), spec_of(grad))


def _buckets(pieces: Sequence[_DiskPiece]) -> Iterator[list[_DiskPiece]]:
    """The pieces in buckets. A bucket is read while the one before it steps, and half of the memory is for buckets that
    are written."""
    bucket, taken = list[_DiskPiece](), 0
    for piece in pieces:
        size = _TENSORS * (piece.stop - piece.start) * piece.known.dtype.itemsize
        if bucket and taken + size > piece.disk.staging_bytes // 4:
            yield bucket
            bucket, taken = [], 0
        bucket.append(piece)
        taken += size
    if bucket:
        yield bucket


def _load(bucket: list[_DiskPiece], states: Mapping[Any, Any]) -> list[_DiskPiece]:
    for piece in bucket:
        piece.load(states.get(piece.param, {}))
    return bucket


def _numbers_copied(state: dict[str, Any], local: torch.Tensor) -> dict[str, Any]:
    return {name: value if _is_elementwise(value, local) else _copied(value) for name, value in state.items()}


def step_of(cls: type[Optimizer]) -> Callable[[Optimizer], object]:
    """The step of a class without the hooks that torch wraps around it."""
    step: Any = cls.step
    inside: Callable[[Optimizer], object] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return inside
