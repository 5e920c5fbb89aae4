"""A step of a sharded model on tensors without memory: what its activations take, and how much it computes.

Owns the :class:`Activations` of one batch, and the trace that counts them. The trace runs the model's own forward and
backward on torch's fake tensors, which have shapes, dtypes and devices, and no values. It counts the memory of each
result once, from the operation that makes it until its last reference is gone, and FLOPs by the formulas of
``torch.utils.flop_counter``. So views, recomputation and activations that are moved to the CPU count as they happen.

Meanwhile the modules show whole fake parameters in the compute dtype, and their units only cast inputs and outputs.
Nothing is gathered or sent. Afterwards modules and units are as they were before.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import nn

from fullshard import tree
from fullshard.buffer.heap import SMALL_PIECE
from fullshard.device import CPU, PLANNED, is_host
from fullshard.report.fakes import Fakes, fake_parameters, restored
from fullshard.report.fused import fused_operators
from fullshard.report.snapshot import Snapshot, holder_of
from fullshard.report.values import UnknownValueError, Values, answer
from fullshard.schedule.unit import Inputs, Unit, units_in
from fullshard.text import bytes_text, counted, quantity_text
from fullshard.torch_private import (
    READS_VALUES,
    DispatchMode,
    grouped_product,
    plain_parts,
    pytree,
    storage_id,
)

Pass = Literal["forward", "backward"]
#: A time of a step: the pass, the position of the group whose modules run, and that of the group whose modules ended
#: last in this pass. -1 is none; the root has none if its parameters are all in other groups.
Moment = tuple[Pass, int, int]
_NOT_COUNTED = -1
_RECURRENT = torch.ops.aten.mkldnn_rnn_layer, torch.ops.aten.mkldnn_rnn_layer_backward
#: What an LSTM on the CPU keeps for backward, times its output: four gates, and its cells.
_KEPT_BY_RECURRENT = 5
#: A device's allocator makes each allocation a multiple of so many bytes.
_ROUNDED = 512
_CONVOLUTIONS = torch.ops.aten.convolution, torch.ops.aten.convolution_backward
_PRODUCTS = torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm
#: The blocks of a matrix product that MKL copies, measured with AVX-512: inner and outer dimension, and columns.
_BLOCK, _COLUMNS = 384, 9984
#: A function of the model and a batch: it runs the model and returns the loss.
Loss = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class Activations:
    """The activations and the FLOPs of one rank for one batch. Sizes are in bytes.

    Parameters, their gradients, the buffers of modules and the batch itself are not counted.

    Attributes:
        kept: alive when forward has ended: what backward needs, and what forward returned.
        forward: the peak in forward, temporary results included.
        backward: the peak in backward, gradients of activations and recomputed activations included.
        flops: FLOPs by pass and by the position of a group in the model's facts. Recomputation counts.
        order: positions of groups, in the order in which forward runs their units.
        count: the number of tokens or samples in the batch.
        unit: ``"tokens"`` if the first tensor of the batch has integers, else ``"samples"``.
        peaks: the most bytes that are alive at each moment of the step, or that the heap keeps.
        kept_by: what the forward of each group's modules left alive, by the position of the group.
        late: positions of groups whose modules get a gradient after their backward had ended, of an output that they
            were given as an input. They are gathered again, and stay whole until the backward of the model ends.
        open_ended: positions of groups whose modules were given nothing that requires gradients: nothing tells when
            their backward ends, so they are reduced and resharded when that of the model ends.
        workspace: what MKL has allocated for matrix products and keeps.
    """

    kept: int
    forward: int
    backward: int
    flops: Mapping[tuple[Pass, int], int]
    order: tuple[int, ...]
    count: int
    unit: Literal["tokens", "samples"]
    peaks: Mapping[Moment, int] = field(default_factory=dict)
    kept_by: Mapping[int, int] = field(default_factory=dict)
    late: tuple[int, ...] = ()
    open_ended: tuple[int, ...] = ()
    workspace: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The sums as plain data."""
        return {
            name: value
            for name, value in vars(self).items()
            if name not in ("flops", "order", "peaks", "kept_by", "late", "open_ended", "workspace")
        } | {
            f"{when} FLOPs": sum(flops for (during, _), flops in self.flops.items() if during == when)
            for when in ("forward", "backward")
        }

    def __str__(self) -> str:
        flops = quantity_text(sum(self.flops.values()), "FLOP")
        return (
            f"Activations of {counted(self.count, self.unit.removesuffix('s'))}: forward keeps {bytes_text(self.kept)} "
            f"for backward; {bytes_text(self.forward)} at the peak of forward, {bytes_text(self.backward)} at the peak "
            f"of backward. Forward and backward compute {flops}"
        )


def trace_step(
    model: nn.Module,
    batch: Any,
    loss: Loss | None = None,
    values: Values | None = None,
    program: Snapshot | None = None,
) -> Activations:
    """Runs one forward and backward of a sharded model on fake tensors. Communicates nothing and changes nothing: what
    the model's code caches meanwhile is put back.

    Args:
        model: the sharded model, which may be on meta.
        batch: the input of one rank: a tensor, a tuple of positional arguments, or a dict of keyword arguments. Its
            tensors may be on meta: only shapes and dtypes matter.
        loss: runs the model on the batch and returns the loss. Without it, backward begins at the scalars that forward
            returns, or else at all its outputs.
        values: what forward gets where it reads values of tensors.
        program: a snapshot of what is not the model's own, for several traces.

    Raises:
        ValueError: the batch has no tensor, or nothing that forward returns requires gradients.
        RuntimeError: forward or backward failed on tensors without values, or one of these is held where it cannot be
            taken away.
    """
    if not tree.tensors(batch):
        raise ValueError(f"batch has no tensor, so the shapes of a step are unknown: got {batch!r}")
    before = (program or Snapshot()).including(model, loss)
    device = units_in(model)[0].device
    fakes = Fakes(CPU if device == PLANNED else device)
    try:
        found: Activations = copy_context().run(_traced, model, batch, loss, values, fakes)
    except BaseException:
        before.restore(fakes.has_made)
        raise
    if fakes.left() is not None:
        before.restore(fakes.has_made)
    if (left := fakes.left()) is not None:
        raise RuntimeError(
            f"the code of this {type(model).__name__} keeps a tensor without values, of shape {tuple(left.shape)}, "
            f"which would be there when it trains: {holder_of(left)} holds it. Keep it in an attribute, a container "
            f"or a functools cache, whose contents are put back, or do this in a process of its own"
        )
    return found


def _traced(model: nn.Module, batch: Any, loss: Loss | None, values: Values | None, fakes: Fakes) -> Activations:
    step = _TracedStep(units_in(model), fakes, values)
    given = tree.map_tensors(fakes.like, batch)
    fused = fused_operators() if units_in(model)[0].device == PLANNED else nullcontext()
    with fake_parameters(model, fakes), _fake_units(units_in(model), step), fused:
        step.ignore(fake for _, fake in fakes.made.values())
        try:
            with torch.compiler.set_stance("force_eager"), torch.enable_grad(), fakes.mode, step:
                output = _forward(model, given) if loss is None else loss(model, given)
                step.begin_backward()
                if starts := _starts(output):
                    torch.autograd.backward(starts, [each.new_ones(()).expand_as(each) for each in starts])
        except Exception as error:
            reads = isinstance(error, UnknownValueError)
            why = str(error) if reads else f"{type(error).__name__}: {error}. Check that the batch fits the model"
            raise RuntimeError(
                f"the {step.during} of this {type(model).__name__} failed on tensors without values, so its "
                f"activations are unknown: {why}"
            ) from error
    if not starts:
        raise ValueError(f"nothing that the forward of this {type(model).__name__} returned requires gradients")
    fakes.made.clear()
    first = tree.tensors(batch)[0]
    is_tokens = not (first.is_floating_point() or first.is_complex())
    return Activations(
        *step.memory(),
        dict(step.flops),
        tuple(step.order),
        first.numel() if is_tokens or not first.ndim else first.shape[0],
        "tokens" if is_tokens else "samples",
        *step.by_moment(),
        tuple(step.late),
        tuple(step.open_ended),
        sum(step.workspaces),
    )


def _forward(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def _starts(output: object) -> list[torch.Tensor]:
    """The tensors at which backward begins: the scalars among those that require gradients, or else all of these."""
    trained = [each for each in tree.reachable_tensors(output) if each.requires_grad]
    return [each for each in trained if each.ndim == 0] or trained


def _lowered(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an operation. Torch's shapes of a grouped product on the CPU are for bf16 alone."""
    if func is not grouped_product:
        return args
    return *(each.to(torch.bfloat16) for each in args[:2]), *args[2:]


def _copied_by_convolution(
    images: tuple[torch.Tensor, ...], weight: torch.Tensor, options: tuple[Any, ...], is_backward: bool
) -> int:
    """The bytes of copies in blocks of 16 channels. Where channels are last, only the weight is copied in blocks, each
    group for itself, and before that in the order of the images: autograd copies its gradient back, which so counts."""
    _, _, dilation, is_transposed, _, groups = options[:6]
    sums = is_backward and weight.itemsize < torch.float32.itemsize  # in fp32
    if not any(map(_has_channels_last, (*images, weight))):
        blocks = [_in_blocks(each) for each in images]  # forward frees its input's before it copies the output back
        return weight.nbytes * (1 + sums) + (sum(blocks) if is_backward or is_transposed else max(blocks))
    rows, columns, *kernel = weight.shape[0] // groups, *weight.shape[1:]
    filled = groups * _filled_up(rows) * _filled_up(columns) * math.prod(kernel) * weight.itemsize
    is_small = len(kernel) == 2 and kernel[-1] <= 3 and max(dilation) == 1
    if rows == columns == 1 and (is_small or not is_backward):
        filled = 0  # there is a kernel for single channels
    elif sums and groups > 1 and filled > weight.nbytes:
        filled *= 4
    return filled + sum(each.nbytes for each in (*images, weight) if not _has_channels_last(each))


def _copied_by_product(left: torch.Tensor, result: torch.Tensor) -> int:
    """The bytes of the copies of blocks of both matrices, which MKL makes where the left one has many rows."""
    threads, (rows, inner), columns = torch.get_num_threads(), left.shape[-2:], result.shape[-1]
    copied = threads * min(rows, _BLOCK) + (min(columns, threads * _COLUMNS) if rows > _BLOCK or threads > 1 else 0)
    return min(inner, _BLOCK) * copied * left.itemsize


def _has_channels_last(images: torch.Tensor) -> bool:
    """Whether the channels of a pixel lie beside each other."""
    return images.ndim > 3 and images.stride(1) == 1 and images[0, 0].numel() > 1


def _in_blocks(images: torch.Tensor) -> int:
    """The bytes of a copy in blocks of channels; a few channels, as of pictures, are not filled up."""
    channels = images.shape[1]
    return images.nbytes // channels * (_filled_up(channels) if channels > 4 else channels)


def _filled_up(channels: int) -> int:
    return -channels // 16 * -16


@cache
def _formulas() -> dict[Any, Any]:
    """Torch's formulas for FLOPs by operation. Torch has none for attention on the CPU, which computes what it computes
    on other devices."""
    from torch.utils.flop_counter import flop_registry  # takes 50 ms to import

    aten: Any = torch.ops.aten
    name = "_scaled_dot_product_flash_attention"
    return flop_registry | {
        getattr(aten, f"{name}_for_cpu{which}"): flop_registry[getattr(aten, name + which)]
        for which in ("", "_backward")
    }


@contextmanager
def _fake_units(units: Sequence[Unit], step: _TracedStep) -> Iterator[None]:
    """A context in which units tell ``step`` when they run, cast inputs and outputs, and do nothing else."""
    with restored([vars(unit) for unit in units]):
        for unit in units:
            vars(unit)["pre_forward"] = partial(step.before_forward, unit)
            vars(unit)["post_forward"] = partial(step.after_forward, unit)
        yield


class _TracedStep(DispatchMode):
    """Sees each operation of a step. Counts the memory of results, and the FLOPs of each unit.

    Attributes:
        during: the pass that runs.
        flops: by pass and by the position of a unit.
        order: the positions of the units in the order in which their forwards began. That of a unit is the position of
            its first group.
        workspaces: the bytes of MKL's workspaces, each larger than those before it.
    """

    supports_higher_order_operators = True  # such as flex attention

    def __init__(self, units: Sequence[Unit], fakes: Fakes, values: Values | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fakes, self._values = fakes, values
        self.during: Pass = "forward"
        self.flops: Counter[tuple[Pass, int]] = Counter()
        self.order: list[int] = []
        self._device, self._is_host = fakes.device.type, is_host(units[0].device)
        self._formulas = _formulas()
        self._alive: dict[int, int] = {}  # the number of each storage that is alive
        #: The storages in the order in which they came and went: a number, and the bytes (negative: they are gone).
        self._changes: list[tuple[int, int]] = []
        self._ended_forward = 0  # the changes until forward ended
        self._gradients = {_NOT_COUNTED}  # the storages that do not count
        sizes = [len(unit.groups) for unit in units]
        self._position = {unit: sum(sizes[:at]) for at, unit in enumerate(units) if unit.groups}
        self._running: list[Unit] = []  # the units whose forward runs, the innermost last
        self._around: dict[Unit, Unit] = {}
        self._unit = next(iter(self._position), units[0])  # the one whose operations run
        self._ended = -1  # the position of the one that ended last in this pass
        self._moments: list[tuple[int, Moment]] = []  # each with the number of changes before it
        self._forwards: list[tuple[int, int, int]] = []  # position, and the changes when a forward began and ended
        self._began: list[int] = []
        self._over: set[int] = set()  # the positions of those whose backward has ended
        self.late: dict[int, None] = {}
        self.open_ended: dict[int, None] = {}
        self.workspaces: list[int] = []

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count the memory of tensors, and drop their gradients when they are complete, as groups do."""
        for tensor in tensors:
            for part in plain_parts(tensor):
                self._alive[storage_id(part)] = _NOT_COUNTED
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                tensor.register_post_accumulate_grad_hook(self._drop_gradient)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # first its class says which operations this is on its parts
        try:
            result = func(*_lowered(func, args), **(kwargs or {}))
        except READS_VALUES:
            result = answer(func, args, self._values)
        if func is grouped_product:
            result = result.to(args[0].dtype)
        operator = getattr(func, "overloadpacket", func)
        if operator is _RECURRENT[0]:  # gates and states of all steps, whose size fake tensors do not have
            self._count(result[3], _KEPT_BY_RECURRENT * result[0].nbytes)
        formula = self._formulas.get(operator)
        if formula is not None:
            at = self._position.get(self._unit, 0)
            self.flops[self.during, at] += formula(*args, **(kwargs or {}), out_val=result)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._fakes.note(tensor)
                if tensor.device.type == self._device:
                    self._count(tensor)
        if self._is_host:
            self._count_work(operator, args, result)
        return result

    def _count_work(self, operator: Any, args: tuple[Any, ...], result: Any) -> None:
        """Count what kernels of the CPU take while they run, such as copies in the order of the kernel."""
        copied = 0
        if operator is _CONVOLUTIONS[0]:
            copied = _copied_by_convolution((args[0], result), args[1], args[3:], is_backward=False)
        elif operator is _CONVOLUTIONS[1]:
            copied = _copied_by_convolution(args[:2], args[2], args[4:], is_backward=True)
        elif operator is _RECURRENT[0]:  # and the gates of all steps
            copied = args[1].nbytes + args[2].nbytes + 4 * result[0].nbytes
        elif operator is _RECURRENT[1]:
            x, *weights, output = args[0].nbytes, args[1].nbytes, args[2].nbytes, args[7].nbytes
            # And of their gradients, which are made together: the largest counts where a group takes it. Of all steps
            # the gates, and the gradients of three states, before and after.
            copied = 2 * sum(weights) + min(weights) + 4 * output + 6 * max(x, output)
        elif operator in _PRODUCTS and torch.backends.mkl.is_available():
            nbytes = _copied_by_product(args[-2], result)
            if nbytes > max(self.workspaces, default=0):  # MKL keeps the smaller ones too
                self.workspaces.append(nbytes)
        if copied:
            number = len(self._changes)
            self._changes += [(number, copied), (number, -copied)]

    def _count(self, tensor: torch.Tensor, nbytes: int = 0) -> None:
        """Count the memory of a result from now on, unless it lies in memory that counts already."""
        key, storage = storage_id(tensor), tensor.untyped_storage()
        nbytes = nbytes or storage.nbytes()
        if not self._is_host:
            nbytes += -nbytes % _ROUNDED
        if key not in self._alive:
            number = self._alive[key] = len(self._changes)
            self._changes.append((number, nbytes))
            weakref.finalize(storage, self._forget, key, number, nbytes).atexit = False

    def _forget(self, key: int, number: int, nbytes: int) -> None:
        self._changes.append((number, -nbytes))
        del self._alive[key]

    def _drop_gradient(self, param: torch.Tensor) -> None:
        assert param.grad is not None
        self._gradients.update(self._alive[storage_id(part)] for part in plain_parts(param.grad))
        param.grad = None

    def memory(self) -> tuple[int, int, int]:
        """The bytes that were alive when forward ended, and the most bytes that were alive in forward and in backward.
        Gradients of parameters do not count, from the operation that made them on."""
        sizes = [0 if number in self._gradients else nbytes for number, nbytes in self._changes]
        alive = list(accumulate(sizes, initial=0))
        forward, backward = alive[: self._ended_forward + 1], alive[self._ended_forward :]
        return forward[-1], max(forward), max(backward)

    def by_moment(self) -> tuple[dict[Moment, int], dict[int, int]]:
        """The most bytes that were alive at each moment, and what the forward of each unit left alive. Small pieces
        count as in the moment that has most of them: the heap keeps what lies between pieces in use."""
        sizes = [0 if number in self._gradients else nbytes for number, nbytes in self._changes]
        alive = list(accumulate(sizes, initial=0))
        in_heap = [size * (self._is_host and abs(size) < SMALL_PIECE) for size in sizes]
        small = list(accumulate(in_heap, initial=0))
        held = [now + max(small) - part for now, part in zip(alive, small, strict=True)]
        peaks: dict[Moment, int] = {}
        ends = [*(begin for begin, _ in self._moments[1:]), len(self._changes)]
        for (begin, moment), end in zip(self._moments, ends, strict=True):
            peaks[moment] = max(peaks.get(moment, 0), *held[begin : end + 1])
        kept = Counter[int]()
        for position, begin, end in self._forwards:
            kept[position] += alive[end] - alive[begin]
        return peaks, dict(kept)

    def _run(self, unit: Unit, ended: Unit | None = None) -> None:
        """The operations of ``unit`` follow, after those of a unit that has ended."""
        self._unit = unit
        if ended in self._position:
            self._ended = self._position[ended]
            self._over |= {self._ended} if self.during == "backward" else set()
        self._moments.append((len(self._changes), (self.during, self._position.get(unit, -1), self._ended)))

    def begin_backward(self) -> None:
        """Forward has ended, and backward begins."""
        self._ended_forward, self.during, self._ended = len(self._changes), "backward", -1
        self._run(self._unit)

    # what units do meanwhile

    def before_forward(self, unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        if unit is not self._unit or self.during == "forward":  # else it is recomputed in its backward
            self._run(unit)
        if self.during == "forward":
            self._began.append(len(self._changes))
            if self._running:
                self._around.setdefault(unit, self._running[-1])
            self._running.append(unit)
            if unit in self._position:
                is_first = not unit.is_list or self._position[unit] not in self.order
                if is_first and not any(tensor.requires_grad for tensor in tree.tensors((args, kwargs))):
                    self.open_ended[self._position[unit]] = None
                self.order.append(self._position[unit])
        dtype = unit.mp_policy.param_dtype if unit.casts_inputs else None
        args, kwargs = tree.cast_floating((args, kwargs), dtype)
        for tensor in tree.tensors((args, kwargs)):
            if tensor.grad_fn is not None and torch.is_grad_enabled():
                tensor.register_hook(partial(self._leave, unit))
        return args, kwargs

    def after_forward(self, unit: Unit, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        output = tree.cast_floating(output, unit.mp_policy.output_dtype)
        trained = [each for each in tree.reachable_tensors(output) if each.requires_grad and torch.is_grad_enabled()]
        for tensor in trained:
            tensor.register_hook(partial(self._enter, unit))
        if self.during == "forward":
            if not trained:  # it has no backward
                self.open_ended.pop(self._position.get(unit, -1), None)
            self._running.pop()
            self._forwards.append((self._position.get(unit, -1), self._began.pop(), len(self._changes)))
            around = self._around.get(unit)
            self._run(around or unit, unit if around else None)
        return output

    def _enter(self, unit: Unit, grad: torch.Tensor) -> None:
        """The backward of a unit begins, unless that of a unit inside it just began at the same gradient."""
        if unit is not self._unit and unit not in self._outside(self._unit):
            self._run(unit, None if self._unit in self._outside(unit) else self._unit)
            if (position := self._position.get(unit, -1)) in self._over:
                self.late[position] = None

    def _outside(self, unit: Unit) -> Iterator[Unit]:
        """The units around a unit, from the inside out."""
        while (around := self._around.get(unit)) is not None:
            unit = around
            yield unit

    def _leave(self, unit: Unit, grad: torch.Tensor) -> None:
        """The backward of a unit has ended, unless that of the unit before it began at the same gradient."""
        if self._unit is unit and (around := self._around.get(unit)) is not None:
            self._run(around, unit)
