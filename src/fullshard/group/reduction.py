"""One reduction of the gradients of a group, from its plan to ``param.grad``.

Owns the route of the gradients that take part, made once for each set of them, and the steps after the reduce-scatter:
the sum over replicas, the dtype and device of ``param.grad``, and the sharded parameters.
:mod:`fullshard.group.gradients` decides which gradients take part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch

from fullshard.buffer.plan import Plan
from fullshard.buffer.slots import SlotBuffer
from fullshard.comm.all_reduce import sum_route
from fullshard.comm.transport import PLAIN_SUM, Reduction, Route, StillRead, Transfer, Wire
from fullshard.comm.waits import waiting
from fullshard.device import CPU, Done, HoldingMark, Pending, beside, copy_to_host, is_host
from fullshard.disk.tensor import DiskTensor
from fullshard.group.comm_context import Reductions
from fullshard.group.context import GroupContext
from fullshard.group.module_parameters import ModuleParameters
from fullshard.group.parameter import IndexedTensor
from fullshard.group.replica import ReplicaGradients
from fullshard.torch_private import after_accumulation, foreach_add, run_after_accumulation


@dataclass(frozen=True)
class Part:
    """The parameters of one section that take part in a reduction."""

    indices: tuple[int, ...]
    plan: Plan
    full: torch.Tensor  # where their gradients lie
    allocate: Callable[[], torch.Tensor]  # memory for the reduced values, in the dtype in which they are written
    home_dtype: torch.dtype  # of ``param.grad``
    chunks: tuple[list[torch.Size], list[tuple[int, ...]], list[int]]  # sizes, strides and offsets in the shard
    lengths: list[int]  # of chunks, if all are vectors end to end: then one call finds them


def make_part(
    gradients: Sequence[IndexedTensor], plan: Plan, full: torch.Tensor, dtype: torch.dtype, home: torch.dtype
) -> Part:
    """The part with these gradients in the shard of ``plan``, which is reduced in ``dtype``."""
    views = [view for _, view in gradients]
    chunks = [v.shape for v in views], [v.stride() for v in views], [int(v.storage_offset()) for v in views]
    lengths = [view.numel() for view in views if view.ndim == 1]
    if [*accumulate(lengths, initial=0)] != [*chunks[2], plan.shard_numel]:
        lengths = []
    allocate = partial(torch.empty, plan.shard_numel, dtype=dtype, device=full.device)
    return Part(tuple(index for index, _ in gradients), plan, full, allocate, home, chunks, lengths)


@dataclass(eq=False)
class ReductionPlan:
    """The parameters that take part in a reduction, by section, and how their gradients travel."""

    parts: Sequence[Part]
    is_final: bool  # whether the reduce-scatter gives the final values, so that they may be written in their own dtype
    sums: bool  # whether the route includes the replicas, each of which has all of the parameters
    packed: Sequence[Part]  # the first of the parts: all but zero-copy gradients in which the replicas add up
    zero_copy: Sequence[int]  # parameters whose gradients are not in the buffer
    wire: Wire | None  # how the reduce-scatter is encoded
    replica: ReplicaGradients | None = None  # where the parts' values are added up next, if replicas shard them
    replica_parts: Sequence[Part] = ()  # what comes of it
    route: Route | None = None  # once a reduction was started
    over_replicas: Route | None = None  # of what it gives, where replicas have whole shards
    on_delivery: Callable[[], None] | None = None  # is called when ``param.grad`` has the gradients


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
        outputs = plan.replica.take() if plan.replica is not None else [part.allocate() for part in plan.packed]
        self._outputs = outputs
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
        group = self._group
        if self._buffer.pool.is_host:
            self._buffer.give_back(self._pending if isinstance(self._pending, StillRead) else None)
        replica = self._plan.replica
        if self._reductions.drops != self._drops:  # an error has ended the step of these gradients
            if replica is not None:
                replica.buffer.give_back()
            return
        if self._plan.is_final:
            self._hand_over() if group.offloads_to_host else self.accumulate()
            return
        if group.data.replicate_group is not None:
            for index, local in self._locals():
                if index in self._partial:
                    local.add_(self._partial.pop(index))
            if not group.options.strategy.all_reduces:
                kept = self._locals()
                if replica is not None:  # its memory is for the next reduction
                    kept = [(index, local.clone()) for index, local in kept]
                    replica.buffer.give_back()
                self._partial.update(kept)
                return
        outputs = self._outputs
        mark = group.comm.lanes.all_reduce.run(self.start_all_reduce, self._hand_over)
        if replica is not None:
            group.comm.reductions.add_sum(HoldingMark(mark, outputs, replica.buffer.give_back))
        elif is_host(group.device):
            mark.wait()
        else:
            group.comm.reductions.add_sum(HoldingMark(mark, outputs))

    def start_all_reduce(self) -> Pending:
        group, options, plan = self._group, self._group.options, self._plan
        if plan.replica is not None:
            self._outputs, self._parts = [part.allocate() for part in plan.replica_parts], plan.replica_parts
            return plan.replica.start(self._outputs)
        replicas = group.data.replicate_group
        if replicas is None:
            return Done()
        if options.all_reduce is not None:
            with waiting("an all-reduce", replicas, group.tag):
                for output in self._outputs:
                    options.all_reduce(output)
            return Done()
        if plan.over_replicas is None:
            plan.over_replicas = sum_route(group.reduce_transport.private, [], replicas, group.tag, group.device)
        return plan.over_replicas.start((), PLAIN_SUM, *self._outputs)

    def _locals(self) -> list[tuple[int, torch.Tensor]]:
        """The chunk of each parameter in the outputs."""
        found: list[tuple[int, torch.Tensor]] = []
        for part, output in zip(self._parts, self._outputs, strict=True):
            vectors = part.lengths and torch.unsafe_split_with_sizes(output, part.lengths)
            sizes, strides, offsets = part.chunks
            if self._plan.replica is not None:  # sections lie end to end in its memory
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
