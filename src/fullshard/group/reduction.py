"""How the gradients of a group are reduced: hop after hop, from the gradient buffer to ``param.grad``.

The strategy and the mesh say which hops these are::

    parameters are                 first hop                         second hop
    sharded                        reduce-scatter over the shards    -
      over ranks with replicas     reduce-scatter over the shards    sum over the replicas
      and over the replicas too    reduce-scatter over the shards    reduce-scatter over the replicas
    whole on each rank             sum over the replicas             -
      which a function sums        a copy                            the function

Owns the routes of these hops, made once for each set of parameters, the dtype and the device of ``param.grad``, and
when it is set. :mod:`fullshard.group.gradients` decides which gradients take part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from fullshard.buffer.messages import zero_copy_in
from fullshard.buffer.plan import BufferPlan
from fullshard.buffer.sections import starts, views
from fullshard.buffer.slots import SlotBuffer
from fullshard.comm.all_reduce import sum_route
from fullshard.comm.transport import PLAIN_SUM, Feedback, Reduction, Route, StillRead, Transfer
from fullshard.comm.waits import waiting
from fullshard.device import Done, HoldingMark, Mark, Pending, beside, copy_to_host
from fullshard.group.comm_context import Reductions
from fullshard.group.context import GroupContext
from fullshard.group.feedback import GradientFeedback
from fullshard.group.gradient_buffer import GradientBuffer, Part
from fullshard.group.home import Home
from fullshard.group.module_parameters import ModuleParameters
from fullshard.group.parameter import IndexedTensor
from fullshard.torch_private import after_accumulation, foreach_add, run_after_accumulation

#: Plans of reductions that a group keeps: programs that drop layers at random have a set of parameters for each step.
MOST_PLANS = 16
Started = tuple[Sequence[torch.Tensor], Pending]  # where the results will be, and when


class SecondHop:
    """The sum over replicas that have whole shards, if there are any, in place. A function of the user may sum, or
    change the result, which has ``parts``."""

    lends_memory = False  # whether the first hop writes to memory that the next reduction gets

    def __init__(self, group: GroupContext, parts: Sequence[Part]) -> None:
        self.group, self.parts = group, parts
        self._route: Route | None = None

    def take(self) -> Sequence[torch.Tensor]:
        """Memory for what the first hop gives."""
        return [part.allocate() for part in self.parts]

    def start(self, values: Sequence[torch.Tensor]) -> Started:
        """Start with what the first hop has given."""
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


class ScatterHop(SecondHop):
    """A reduce-scatter over replicas, each of which has a part of the shard between steps. ``shards`` are the results
    of the first hop. ``losses`` maps each parameter to the tensor with what encodings have lost of it."""

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

    def start(self, values: Sequence[torch.Tensor]) -> Started:
        group, outputs = self.group, [part.allocate() for part in self.parts]
        if self._route is None:
            wire = group.wire("reduce", outer=True)
            if wire is not None and group.options.outer_wire.error_feedback:
                lost = [torch.zeros_like(view, dtype=torch.bfloat16) for view in self._views]
                wire = wire._replace(feedback=Feedback(lost))
                for part, memory in zip(self.parts, lost, strict=True):
                    for index, start, param in zip(part.indices, part.plan.full_offsets, part.plan.params, strict=True):
                        self._lost[index] = memory[start : start + param.numel]
            plans = [part.plan for part in self.parts]
            transfers, over = list(map(Transfer, plans, self._views, outputs)), group.data.replicate_group
            self._route = group.reduce_transport.private.reduce_route(transfers, over, group.tag, wire)
        for index, own in self._lost.items():
            if (before := self._losses.get(index)) is not None and before is not own:
                own.copy_(before)  # another set of parameters was reduced last
            self._losses[index] = own
        return outputs, self._route.start(outputs, PLAIN_SUM)

    def release(self, read: Mark | None = None) -> None:
        self.buffer.give_back(read)


@dataclass(eq=False)
class ReductionPlan:
    """The hops of a reduction to ``parts`` of a shard. The first is a reduce-scatter of the gradients in the buffer and
    of ``zero_copy`` ones beside it, or a sum over replicas, of large gradients where autograd made them."""

    parts: Sequence[Part]
    zero_copy: Sequence[int]  # parameters, in the order in which their gradients travel
    make_route: Callable[[Sequence[Transfer]], Route]
    sums_wholes: bool  # whether zero-copy gradients are the results of the last parts, which need no memory
    second: SecondHop | None  # ``None`` if the first gives the final values, in their own dtype
    encodes: bool  # whether messages are encoded
    route: Route | None = None  # once a reduction was started

    def find_route(self, outputs: Sequence[torch.Tensor], zero_copy: Sequence[torch.Tensor]) -> Route:
        """Make the route of a first reduction with such results."""
        shards = outputs if any(part.plan.is_messages for part in self.parts) else [*outputs, *zero_copy]
        transfers = [Transfer(part.plan, part.full, out) for part, out in zip(self.parts, shards, strict=False)]
        self.route = self.make_route(transfers)
        return self.route


@dataclass(eq=False)
class Reducer:
    """Reduces what lies in a gradient buffer."""

    group: GroupContext
    module_params: ModuleParameters
    buffer: GradientBuffer
    feedback: GradientFeedback
    partial: dict[int, torch.Tensor]  # earlier sums over some of the ranks only, by parameter
    plans: dict[tuple[frozenset[int], bool, bool], ReductionPlan] = field(default_factory=dict)

    def start(self, wanted: frozenset[int], sums: bool) -> None:
        """Start to reduce the gradients of these parameters, as wholes if it ``sums`` them."""
        group, buffer, reductions = self.group, self.buffer, self.group.comm.reductions
        is_final = sums or (group.data.replicate_group is None and group.options.all_reduce_hook is None)
        plan = self.plans.get((wanted, is_final, sums)) or self.plan(wanted, is_final, sums)
        if plan.encodes:
            self.feedback.forget_given_up()
        zero_copy = list(map(buffer.views.zero_copy.pop, plan.zero_copy))
        reducing = PendingReduction(self, plan, zero_copy, reductions, reductions.drops)
        logged, lane = group.step.log("reduce", group, wanted), group.comm.lanes.reduce
        if logged is None:
            mark = lane.run(reducing.start, reducing.end_first)
        else:
            with logged:
                mark = lane.run(reducing.start, reducing.end_first)
        reductions.add(mark if buffer.slot.pool.is_host else HoldingMark(mark, zero_copy, buffer.slot.give_back))

    @torch.inference_mode(False)
    @torch.no_grad()
    def plan(self, wanted: frozenset[int], is_final: bool, sums: bool) -> ReductionPlan:
        """Make the plan of a reduction of these parameters. Usually every step has the same."""
        if len(self.plans) == MOST_PLANS:
            del self.plans[next(iter(self.plans))]
        group, transport, replicas = self.group, self.group.reduce_transport, self.group.data.replicate_group
        parts, own = self._parts(wanted, is_final, sums)
        make_route = partial(transport.reduce_route, over=None, tag=group.tag)
        if sums:
            zero_copy = [index for part in parts for index in part.indices if index in self.buffer.views.kept]
            if replicas is not None:
                make_route = partial(sum_route, transport, process_group=replicas, tag=group.tag, device=group.device)
        else:
            beside = zero_copy_in(part.plan for part in parts if part.plan.is_messages)
            zero_copy = [parts[each.section].indices[each.param] for each in beside]
            wire = self.feedback.wire(parts, zero_copy, own)
            make_route = partial(make_route, over=group.reduce_process_group, wire=wire)
        second = None if is_final else SecondHop(group, parts)
        if own:
            second = ScatterHop(group, own, parts, self.feedback.between_replicas)
        encodes = group.wire("reduce") is not None or group.wire("reduce", outer=True) is not None
        made = self.plans[wanted, is_final, sums] = ReductionPlan(parts, zero_copy, make_route, sums, second, encodes)
        return made

    def _parts(self, wanted: frozenset[int], is_final: bool, sums: bool) -> tuple[list[Part], list[Part]]:
        """The parts with these parameters and, if replicas shard them again, this rank's pieces of these parts."""
        group, buffer, parts, own = self.group, self.buffer, list[Part](), list[Part]()
        for section, full in zip(buffer.sections, buffer.fulls, strict=True):
            home = section.dtype
            if group.options.keep_computed_dtype:
                computed = group.compute_dtype(group.params[section.members[0]])
                home = computed if group.data.shard_group is not None else full.dtype
            dtypes = home if is_final else full.dtype, home
            chosen = tuple(position for position, index in enumerate(section.members) if index in wanted)
            # Whole gradients are tensors of their own: the heap keeps no freed memory of more than 32 MiB in one piece.
            apart = [(each,) for each in chosen] if sums and not group.moves_all else [chosen]
            for positions in filter(None, apart):
                plan = section.plan.select(positions)
                members = section.members if group.moves_all else [section.members[position] for position in positions]
                parts.append(buffer.part(self._chunks(plan, group.data.shard_rank, members), plan, full, dtypes))
                if group.data.shards_replicas:
                    plan = plan.inside(group.data.shard_rank, group.data.replicate_size)
                    own.append(buffer.part(self._chunks(plan, group.own_rank, members), plan, full, dtypes))
        if sums:  # zero-copy gradients are the results of the last parts
            parts.sort(key=lambda part: not buffer.views.kept.isdisjoint(part.indices))
        return parts, own

    def _chunks(self, plan: BufferPlan, rank: int, members: Sequence[int]) -> list[IndexedTensor]:
        """The chunks of the gradients of ``members``, in the shard that ``rank`` has by a plan, on meta."""
        shard, trained = torch.empty(plan.shard_numel, device="meta"), self.buffer.trained
        return [(i, part) for i, part in self.module_params.gradient_views(members, plan, shard, rank) if i in trained]

    def release(self) -> None:
        """Give back what reductions that an error cut short have taken."""
        for plan in self.plans.values():
            if plan.second is not None:
                plan.second.release()


@dataclass(eq=False, slots=True)
class PendingReduction:
    """A reduction under way."""

    _of: Reducer
    _plan: ReductionPlan
    _zero_copy: Sequence[torch.Tensor]
    _reductions: Reductions
    _drops: int  # ``Reductions.drops`` when it began
    _outputs: Sequence[torch.Tensor] = ()
    _parts: Sequence[Part] = ()  # which parameters' gradients the outputs contain
    _pending: Pending | None = None

    def start(self) -> Pending:
        group, plan, zero_copy = self._of.group, self._plan, self._zero_copy
        parts = self._parts = plan.parts
        if plan.sums_wholes and zero_copy:
            parts = parts[: -len(zero_copy)]
        outputs = [part.allocate() for part in parts] if plan.second is None else plan.second.take()
        # As ``group.divisor``, which would be a call more in each step.
        factor = group.options.divide_factor
        divisor = float(group.data.shard_size * group.data.replicate_size) if factor is None else factor
        route = plan.route or plan.find_route(outputs, zero_copy)
        self._pending = route.start(outputs, Reduction(divisor, group.options.sum_only), *zero_copy)
        self._outputs = [*outputs, *zero_copy] if plan.sums_wholes else outputs
        self._zero_copy = ()  # the started communication holds them, or the caller
        return self._pending

    def end_first(self) -> None:
        """Continue after the first hop: give back the buffer (on devices its mark does), and start the second."""
        of, second = self._of, self._plan.second
        group, slot, partial_sums = of.group, of.buffer.slot, of.partial
        if slot.pool.is_host:
            slot.give_back(self._pending if isinstance(self._pending, StillRead) else None)
        is_dropped = self._reductions.drops != self._drops  # an error has ended the step of these gradients
        if second is None:
            if not is_dropped:
                self._hand_over() if group.offloaded.is_remote else self.accumulate()
            return
        if not is_dropped and group.data.replicate_group is not None:
            pairs = zip(self._parts, self._outputs, strict=True)
            chunks = [chunk for part, each in pairs for chunk in part.locals(each, int(each.storage_offset()))]
            for index, local in chunks:
                if index in partial_sums:
                    local.add_(partial_sums.pop(index))
            if not group.options.strategy.all_reduces:
                partial_sums.update((i, each.clone() if second.lends_memory else each) for i, each in chunks)
                is_dropped = True
        if is_dropped:
            second.release()
            return
        values, mark = self._outputs, group.comm.lanes.all_reduce.run(self._start_second, self._hand_over)
        self._reductions.add_sum(HoldingMark(mark, values, second.release))

    def _start_second(self) -> Pending:
        second = self._plan.second
        assert second is not None
        self._parts, (self._outputs, pending) = second.parts, second.start(self._outputs)
        return pending

    def _hand_over(self) -> None:
        """Bring the reduced values to the dtype and the device of ``param.grad``, and accumulate them there."""
        group, hook = self._of.group, self._of.group.options.all_reduce_hook
        if self._reductions.drops != self._drops:
            return
        if hook is not None:
            with torch.no_grad(), beside(group.options.all_reduce_hook_stream, group.device):
                for output in self._outputs:
                    hook(output)
        self._outputs = [*map(torch.Tensor.to, self._outputs, [part.home_dtype for part in self._parts])]
        if not group.offloaded.is_remote:
            self.accumulate()
            return
        self.accumulate(group.here)
        self._outputs, arrived = copy_to_host(self._outputs, group.device, group.offloaded.pins)
        self._reductions.arriving.append((arrived, partial(self.accumulate, group.offloaded)))

    def accumulate(self, home: Home | None = None) -> None:
        """Set ``param.grad`` of the sharded parameters, or of those in one home, to the reduced chunks, or add these to
        what is there."""
        group, module_params = self._of.group, self._of.module_params
        grads = list[IndexedTensor]()
        for part, output in zip(self._parts, self._outputs, strict=True):
            grads += part.locals(output)
        if self._plan.encodes:
            self._of.feedback.delivered = group.writes
        if home is not None:
            grads = [each for each in grads if each[0] in home.parameters]
        is_final = not after_accumulation(group.sharded)  # otherwise optimizers may step now, from memory
        if group.here.copies and is_final:  # what is to be added to another gradient stays as it is
            params = group.params
            grads = [(i, each if params[i].sharded.grad is not None else self._stored(i, each)) for i, each in grads]
        more = module_params.accumulate_gradients(grads)
        if more:
            foreach_add([grad for grad, _ in more], [local for _, local in more])
        if is_final:
            return
        with torch.no_grad():
            for index, _ in grads:
                param = group.params[index]
                run_after_accumulation(param.sharded)
                kept = param.gradient
                if kept is not None and (stored := self._stored(index, kept)) is not kept:
                    param.sharded.grad = None
                    module_params.accumulate_gradients([(index, stored)])

    def _stored(self, index: int, local: torch.Tensor) -> torch.Tensor:
        return self._of.group.home(index).store(self._of.group.params[index], local)
