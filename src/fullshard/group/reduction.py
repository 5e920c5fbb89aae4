"""One reduction of the gradients of a group, from its plan to ``param.grad``.

Owns the routes of the gradients that take part, made once for each set of them, hop after hop: over the ranks that
shard, then over the replicas. Owns also the dtype and device of ``param.grad``, and the sharded parameters.
:mod:`fullshard.group.gradients` decides which gradients take part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch

from fullshard.buffer.plan import BufferPlan
from fullshard.buffer.sections import starts, views
from fullshard.buffer.slots import SlotBuffer
from fullshard.comm.all_reduce import sum_route
from fullshard.comm.transport import PLAIN_SUM, Feedback, Reduction, Route, StillRead, Transfer, Wire
from fullshard.comm.waits import waiting
from fullshard.device import CPU, Done, HoldingMark, Mark, Pending, beside, copy_to_host, is_host
from fullshard.disk.tensor import DiskTensor
from fullshard.group.comm_context import Reductions
from fullshard.group.context import GroupContext
from fullshard.group.module_parameters import ModuleParameters
from fullshard.group.parameter import IndexedTensor
from fullshard.torch_private import after_accumulation, foreach_add, run_after_accumulation


@dataclass(frozen=True)
class Part:
    """The parameters of one section that take part in a reduction."""

    indices: tuple[int, ...]
    plan: BufferPlan
    full: torch.Tensor  # where their gradients lie
    allocate: Callable[[], torch.Tensor]  # memory for the reduced values, in the dtype in which they are written
    home_dtype: torch.dtype  # of ``param.grad``
    chunks: tuple[list[torch.Size], list[tuple[int, ...]], list[int]]  # sizes, strides and offsets in the shard
    lengths: list[int]  # of chunks, if all are vectors end to end: then one call finds them


def make_part(
    gradients: Sequence[IndexedTensor], plan: BufferPlan, full: torch.Tensor, dtype: torch.dtype, home: torch.dtype
) -> Part:
    """The part with these gradients in the shard of ``plan``, which is reduced in ``dtype``."""
    views = [view for _, view in gradients]
    chunks = [v.shape for v in views], [v.stride() for v in views], [int(v.storage_offset()) for v in views]
    lengths = [view.numel() for view in views if view.ndim == 1]
    if [*accumulate(lengths, initial=0)] != [*chunks[2], plan.shard_numel]:
        lengths = []
    allocate = partial(torch.empty, plan.shard_numel, dtype=dtype, device=full.device)
    return Part(tuple(index for index, _ in gradients), plan, full, allocate, home, chunks, lengths)


class Hop:
    """What follows the reduce-scatter: the sum over replicas that have whole shards, if there are any, in place. A
    user's function may sum, or change the result, which has ``parts``."""

    lends_memory = False  # whether what the reduce-scatter gives lies in memory for the next reduction

    def __init__(self, group: GroupContext, parts: Sequence[Part]) -> None:
        self.group, self.parts = group, parts
        self._route: Route | None = None

    def take(self) -> Sequence[torch.Tensor]:
        """Memory for what the reduce-scatter gives."""
        return [part.allocate() for part in self.parts]

    def start(self, values: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Pending]:
        """Start with what the reduce-scatter has given. Returns where the results will be."""
        group, replicas, function = self.group, self.group.data.replicate_group, self.group.options.all_reduce
        if replicas is None:
            return values, Done()
        if function is not None:
            with waiting("an all-reduce", replicas, group.tag):
                for each in values:
                    function(each)
            return values, Done()
        if self._route is None:
            self._route = sum_route(group.reduce_transport.private, [], replicas, group.tag, group.device)
        return values, self._route.start((), PLAIN_SUM, *values)

    def release(self, read: Mark | None = None) -> None:
        """Give the memory back, once ``read`` has passed."""


class ScatterHop(Hop):
    """A reduce-scatter over replicas, each of which has a part of the shard between steps. ``shards`` are what the
    ranks of a replica have reduced. ``losses`` has what encodings have lost of each parameter, where that lay last."""

    lends_memory = True

    def __init__(
        self, group: GroupContext, parts: Sequence[Part], shards: Sequence[Part], losses: dict[int, torch.Tensor]
    ) -> None:
        super().__init__(group, parts)
        self._losses, self._lost = losses, dict[int, torch.Tensor]()
        self._numels, self._dtypes = [each.plan.shard_numel for each in shards], [each.full.dtype for each in shards]
        self._views: tuple[torch.Tensor, ...] = ()
        pool = group.comm.pool("sums", group.transport.private)
        self.buffer = SlotBuffer(pool, starts(self._numels, self._dtypes)[-1])
        pool.ordinary = max(pool.ordinary, self.buffer.nbytes)

    @torch.inference_mode(False)
    def take(self) -> Sequence[torch.Tensor]:
        if self.buffer.in_use:  # modules of one group may run at different times
            self.group.comm.reductions.wait_for_oldest()
        self.buffer.take().wait()
        self._views = self._views or views(self.buffer.memory, self._numels, self._dtypes)
        return self._views

    def start(self, values: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Pending]:
        group, outputs = self.group, [part.allocate() for part in self.parts]
        if self._route is None:
            transfers = map(Transfer, [part.plan for part in self.parts], self._views, outputs)
            wire = group.wire("reduce", outer=True)
            if wire is not None and group.options.outer_wire.error_feedback:
                lost = [torch.zeros_like(view, dtype=torch.bfloat16) for view in self._views]
                wire = wire._replace(feedback=Feedback(lost))
                for part, memory in zip(self.parts, lost, strict=True):
                    for index, start, param in zip(part.indices, part.plan.full_offsets, part.plan.params, strict=True):
                        self._lost[index] = memory[start : start + param.numel]
            transport, over = group.reduce_transport.private, group.data.replicate_group
            self._route = transport.reduce_route([*transfers], over, group.tag, wire)
        for index, own in self._lost.items():
            if (before := self._losses.get(index)) is not None and before is not own:
                own.copy_(before)  # another set of parameters was reduced last
            self._losses[index] = own
        return outputs, self._route.start(outputs, PLAIN_SUM)

    def release(self, read: Mark | None = None) -> None:
        self.buffer.give_back(read)


@dataclass(eq=False)
class ReductionPlan:
    """The parameters that take part in a reduction, by section, and how their gradients travel."""

    parts: Sequence[Part]
    sums: bool  # whether the route includes the replicas, each of which has all of the parameters
    packed: Sequence[Part]  # the first of the parts: all but zero-copy gradients in which the replicas add up
    zero_copy: Sequence[int]  # parameters whose gradients are not in the buffer
    wire: Wire | None  # how the reduce-scatter is encoded
    hop: Hop | None  # what follows; ``None`` if the route gives the final values, in their own dtype
    on_delivery: Callable[[], None] | None = None  # is called when ``param.grad`` has the gradients
    route: Route | None = None  # once a reduction was started


@dataclass(eq=False, slots=True)
class PendingReduction:
    """A reduction under way; ``partial`` has earlier sums over some of the ranks only."""

    _group: GroupContext
    _module_params: ModuleParameters
    _partial: dict[int, torch.Tensor]
    _plan: ReductionPlan
    _buffer: SlotBuffer
    _zero_copy: Sequence[torch.Tensor]
    _reductions: Reductions
    _drops: int  # ``Reductions.drops`` when it began
    _outputs: Sequence[torch.Tensor] = ()
    _parts: Sequence[Part] = ()  # as which parameters' gradients lie in the outputs
    _pending: Pending | None = None

    def start(self) -> Pending:
        group, plan = self._group, self._plan
        self._parts = plan.parts
        outputs = self._outputs = [part.allocate() for part in plan.packed] if plan.hop is None else plan.hop.take()
        if group.is_flat:  # all of the shard is shown, its padding too
            for part, output in zip(plan.parts, outputs, strict=True):
                output[part.plan.owned_numel(group.data.shard_rank) :].zero_()
        factor = group.options.divide_factor  # as in ``group.divisor``, which would be a call more in each step
        divisor = float(group.data.shard_size * group.data.replicate_size) if factor is None else factor
        if plan.route is None:
            shards = outputs if any(part.plan.is_messages for part in plan.parts) else [*outputs, *self._zero_copy]
            transfers = [Transfer(part.plan, part.full, out) for part, out in zip(plan.parts, shards, strict=False)]
            replicas = group.data.replicate_group
            if plan.sums and replicas is not None:
                plan.route = sum_route(group.reduce_transport, transfers, replicas, group.tag, group.device)
            else:
                over = None if plan.sums else group.reduce_process_group
                plan.route = group.reduce_transport.reduce_route(transfers, over, group.tag, plan.wire)
        self._pending = plan.route.start(outputs, Reduction(divisor, group.options.sum_only), *self._zero_copy)
        if plan.sums:
            self._outputs = [*outputs, *self._zero_copy]
        self._zero_copy = ()  # the started communication holds them, or the caller
        return self._pending

    def scattered(self) -> None:
        """Continue after the reduce-scatter: give back the buffer (on devices its mark does), and sum over replicas."""
        group, hop = self._group, self._plan.hop
        if self._buffer.pool.is_host:
            self._buffer.give_back(self._pending if isinstance(self._pending, StillRead) else None)
        is_dropped = self._reductions.drops != self._drops  # an error has ended the step of these gradients
        if hop is None:
            if not is_dropped:
                self._hand_over() if group.offloads_to_host else self.accumulate()
            return
        if not is_dropped and group.data.replicate_group is not None:
            for index, local in self._locals():
                if index in self._partial:
                    local.add_(self._partial.pop(index))
            if not group.options.strategy.all_reduces:
                self._partial.update((i, each.clone() if hop.lends_memory else each) for i, each in self._locals())
                is_dropped = True
        if is_dropped:
            hop.release()
            return
        values, mark = self._outputs, group.comm.lanes.all_reduce.run(partial(self._start_hop, hop), self._hand_over)
        if is_host(group.device) and not hop.lends_memory:
            mark.wait()
        else:
            group.comm.reductions.add_sum(HoldingMark(mark, values, hop.release))

    def _start_hop(self, hop: Hop) -> Pending:
        self._parts, (self._outputs, pending) = hop.parts, hop.start(self._outputs)
        return pending

    def _locals(self) -> list[tuple[int, torch.Tensor]]:
        """The chunk of each parameter in the outputs."""
        found: list[tuple[int, torch.Tensor]] = []
        for part, output in zip(self._parts, self._outputs, strict=True):
            vectors = part.lengths and torch.unsafe_split_with_sizes(output, part.lengths)
            sizes, strides, offsets = part.chunks
            if self._plan.hop is not None and self._plan.hop.lends_memory:  # sections lie end to end in it
                offsets = [int(output.storage_offset()) + offset for offset in offsets]
            found += zip(part.indices, vectors or map(output.as_strided, sizes, strides, offsets), strict=True)
        return found

    def _hand_over(self) -> None:
        """Bring the reduced values to the dtype and the device of ``param.grad``, and accumulate them there."""
        group, hook = self._group, self._group.options.all_reduce_hook
        if self._reductions.drops != self._drops:
            return
        if hook is not None:
            with torch.no_grad(), beside(group.options.all_reduce_hook_stream, group.device):
                for output in self._outputs:
                    hook(output)
        self._outputs = [*map(torch.Tensor.to, self._outputs, [part.home_dtype for part in self._parts])]
        if not group.offloads_to_host:
            self.accumulate()
            return
        self.accumulate(offloaded=False)
        self._outputs, arrived = copy_to_host(self._outputs, group.device, group.offloaded.pins_memory)
        group.comm.reductions.arriving.append((arrived, self.accumulate))

    def accumulate(self, offloaded: bool = True) -> None:
        """Set ``param.grad`` of the sharded parameters to the reduced chunks, or add these to what is there. Where some
        are offloaded to the CPU: only of these, or only of the others."""
        group, grads = self._group, self._locals()
        if self._plan.on_delivery is not None:
            self._plan.on_delivery()
        if group.offloads_to_host:
            grads = [each for each in grads if (each[0] in group.offloaded.parameters) is offloaded]
        is_final = not after_accumulation(group.sharded)  # otherwise optimizers may step now, from memory
        if group.offloaded.disk is not None and is_final:
            grads = [(index, self._on_disk(index, local)) for index, local in grads]
        more = self._module_params.accumulate_gradients(grads)
        if more:
            foreach_add([grad for grad, _ in more], [local for _, local in more])
        if is_final:
            return
        with torch.no_grad():
            for index, _ in grads:
                param = group.params[index]
                run_after_accumulation(param.sharded)
                kept = param.gradient if group.offloaded.on_disk(index) else None
                if kept is not None and not isinstance(kept, DiskTensor):
                    param.sharded.grad = None
                    self._module_params.accumulate_gradients([(index, self._on_disk(index, kept))])

    def _on_disk(self, index: int, local: torch.Tensor) -> torch.Tensor:
        """A reduced chunk on the disk, if its parameter is there. One to add to another stays in memory, and so does
        that of a small parameter, as a copy: it must not keep the memory of all of them."""
        param, disk = self._group.params[index], self._group.offloaded.on_disk(index)
        if param.sharded.grad is not None:
            return local
        if disk is None:
            return local.clone()
        return DiskTensor.holding(disk, local.to(CPU), f"the gradient of '{param.name}'")
