"""Decides when each group of a tree of modules is gathered, resharded and reduced, and what these wait for.

One schedule serves all units under one root. Owns the beginning and the end of passes and steps, recovery from errors,
and prefetch with its limit. The groups know how to gather and reduce, and the units know which module is running.

The reductions of a step are complete at the end of its last backward, or when the user finalizes the step by hand. Then
a backward waits for no reduction, and reduces a unit only if it saw the unit's backward end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn as nn

from fullshard.buffer.heap import keep_freed, return_freed
from fullshard.buffer.slots import SHARED
from fullshard.comm.waits import WAITS, Position
from fullshard.device import CPU, EventMark, is_host, mark_now
from fullshard.group.comm_context import CommContext
from fullshard.group.full_buffer import State
from fullshard.group.param_group import ParamGroup
from fullshard.group.parameter import plain_name
from fullshard.group.step import BEGIN, END, FINALIZE, Kind, Pass, Step
from fullshard.group.strategy import Placement
from fullshard.group.verify import compare
from fullshard.schedule.order import Order
from fullshard.schedule.passes import Passes
from fullshard.schedule.states import Idle
from fullshard.schedule.step_log import StepLog
from fullshard.torch_private import call_after_backward, make_fx_mode, process_groups, running_backward, version_of

#: What to do after an error. The schedule does not do this by itself: a rank that goes on alone could gather one layer
#: while other ranks gather a different one. If the sizes agree, it would compute with wrong weights.
CUT_SHORT = (
    "{} did not end, probably because of an error in it: look at that error first, then call reset_iter_state() on "
    "the root module, on every rank, before the next forward"
)

#: Bytes of gradients that are worth a reduction of their own.
EARLY = 1 << 24

#: Called once in the first outermost forward of each tree, with its unit, after what users changed was noticed.
first_checks: list[Callable[[Schedule, Scheduled], None]] = []


class Scheduled(Protocol):
    """The part of a :class:`~fullshard.schedule.unit.Unit` that a schedule uses."""

    modules: tuple[nn.Module, ...]
    state: Idle
    finalizes_by_hand: bool
    groups: list[ParamGroup]
    ignored: set[int]
    emptied: list[Any]

    @property
    def forward_prefetch(self) -> Sequence[Scheduled]: ...
    @property
    def backward_prefetch(self) -> Sequence[Scheduled]: ...
    def use_schedule(self, schedule: Schedule) -> None: ...
    def end_forward(self, schedule: Schedule) -> None: ...
    def end_backward(self, schedule: Schedule) -> None: ...
    def reset(self) -> None: ...


class Schedule:
    """The passes of one tree of modules, which has ``units``."""

    def __init__(self, root: Scheduled, units: Sequence[Scheduled], device: torch.device) -> None:
        self.root = root
        self.units = units
        self.device = device
        self.groups = [group for unit in units for group in unit.groups]
        self.has_streams = not is_host(device)
        self._starts_early = is_host(device) and any(each.full.source.starts_ahead for each in self.groups)
        used = [each for group in self.groups for each in (group.data.shard_group, group.data.replicate_group)]
        self._count_anew(list(dict.fromkeys(each for each in used if each is not None)))
        #: Checks the gradients of a group, before or after they are reduced; see :mod:`fullshard.finite`.
        self.inspect: Callable[[ParamGroup, bool], None] | None = None
        self.prefetch_limit: int | None = 1  # groups; ``None``: ``prefetch_bytes`` is the limit, if there is one
        self.prefetch_bytes: int | None = None
        self.is_last_backward = True
        self._backward_began = False  # whether one has begun in a step that has not ended
        self.reduces_early: Sequence[ParamGroup] = ()  # of the root: what has arrived is reduced before the rest
        self._last_forward: weakref.ref[object] | None = None  # the mark of the last forward, until a backward begins
        self._is_awaited = False  # whether reductions that were finalized by hand have yet to be waited for
        self.after_optimizer: torch.Event | None = None
        self.outermost = root  # the unit of the last outermost forward
        self.checks = [*first_checks]  # those that the next outermost forward makes
        self._position = partial(_position, weakref.ref(self))

    def begin_tree(self, module: nn.Module) -> None:
        """Make all units share this schedule, and name their groups after the modules in ``module``, the root's."""
        names = {id(submodule): name for name, submodule in module.named_modules()}
        for unit in self.units:
            unit.use_schedule(self)
            for group in unit.groups:
                group.name = ", ".join(plain_name(names.get(id(member), "?")) for member in unit.modules)
                before, group.step = group.step, self.step  # steps of optimizers come before the first forward too
                self.step.optimizer_steps = max(self.step.optimizer_steps, before.optimizer_steps)
                self.step.steps_before = self.step.optimizer_steps
                self.step.updates = max(self.step.updates, before.updates)
                group.use_comm_context(self.comm)
                for param in group.params:
                    param.update_grad_dtype()  # may be assigned until here
                    location = param.locations[0]
                    param.rename(plain_name(f"{names.get(id(location.module), '')}.{location.name}"))
        self.size_slots()
        if self.device == CPU and not any(group.offloaded.disk is not None for group in self.groups):
            # The reduced gradients, those of autograd that wait to be taken, and activations of a similar size.
            largest = max([group.full.buffer.nbytes for group in self.groups], default=0)
            keep_freed(self, 2 * sum(group.shard.nbytes for group in self.groups) + 4 * largest)

    def _count_anew(self, process_groups: list[dist.ProcessGroup]) -> None:
        self._process_groups, self.comm = process_groups, CommContext(self.device)
        self.step, self.passes = Step(self.begin_backward), Passes()
        self.step.log = self.log = StepLog(self.device, self.step, process_groups)
        self.order: Order[ParamGroup] = Order()

    def begin_over(self, process_group: dist.ProcessGroup, steps: int) -> None:
        """Count passes from 0 and steps from ``steps``, over a process group in the place of all others."""
        listeners = self.log.listeners
        self._count_anew([process_group])
        self.log.listeners = listeners
        self.step.optimizer_steps = self.step.steps_before = steps
        for group in self.groups:
            group.step = self.step
            group.use_comm_context(self.comm)
        self.size_slots()

    def size_slots(self) -> None:
        """Make ordinary slots as large as the largest group that takes turns."""
        for group in self.groups:
            options, buffer, pool = group.options, group.full.buffer, group.parameter_pool
            stays = options.strategy.after_forward is Placement.REPLICATED or options.keep_unsharded_storage
            buffer.takes_turns = not stays
            if buffer.takes_turns:
                pool.ordinary = max(pool.ordinary, buffer.nbytes)
            group.gradients.size_slots()

    def free_buffers(self) -> int:
        """Free the buffers kept for the next step, and the transports' staging; returns the bytes freed."""
        nbytes = sum(pool.drop() for pool in self.comm.pools.values()) + SHARED.drop()
        for transport in {group.reduce_transport for group in self.groups}:
            transport.close_peers_buffers()
        if is_host(self.device):
            return_freed()
        return nbytes

    def begin_forward(self, unit: Scheduled) -> None:
        """The forward of ``unit`` begins. Raises RuntimeError if an error cut an earlier forward or backward short."""
        step = self.step
        if make_fx_mode() is not None:
            raise RuntimeError(
                f"{unit!r} is traced by make_fx, as by torch.func.linearize: the graph would have the memory of its "
                f"parameters, where other values will lie. Use torch.func.jvp, or trace the model before it is sharded"
            )
        if step.now.has_backward:
            cut_short = CUT_SHORT.format(f"a backward of {self.root!r}")
            raise RuntimeError(f"{cut_short}. The gradients of that step are lost")
        if step.now is Pass.FORWARD:
            if unit is self.outermost or unit is self.root:
                raise RuntimeError(CUT_SHORT.format(f"the forward of {self.outermost!r}"))
            return
        if self._is_awaited:
            raise RuntimeError(
                f"the gradient reduction of {self.root!r} must be waited on before the next forward: call "
                f"wait() on the handle that finalize_backward(async_op=True) returned"
            )
        self.log.check()
        if not {*self._process_groups} <= {*process_groups()}:
            raise RuntimeError(
                "a process group over which parameters are sharded was destroyed (destroy_process_group): shard the "
                "model again after init_process_group"
            )
        if step.forwards == 0:
            check_first_forward(unit.modules, self.groups)
            self.log.announce_calls(self.groups)
        WAITS.position = self._position
        step.forwards += 1
        self._notice_changes()
        while self.checks:
            self.checks[0](self, unit)
            self.checks.pop(0)  # not before: one that raises is made again
        self.outermost = unit
        self.begin_pass("forward")
        self.order.begin_forward()

    def begin_pass(self, kind: Kind) -> None:
        """Begin a pass."""
        step, is_outermost = self.step, self.step.now is Pass.NONE
        if is_outermost:
            step.steps_before = step.optimizer_steps
        step.now = BEGIN[step.now, kind]
        if is_outermost and self.log.listeners:
            self.log("begin", kind)
        shared = [group for group in self.groups if group.shard.shared is not None and not group.shard.is_unmapped]
        if shared and is_outermost:
            self.passes.begin(kind, shared, step.steps_before)

    def _check_pass(self, kind: Kind) -> None:
        """End a pass with the other ranks, and raise RuntimeError if ranks differed in it and its results may be used,
        or if a leaf that the program has kept was written while it was sharded."""
        if self.passes.groups and self.is_idle:
            self.passes.end(f"the end of a {kind}")
        if self.log.listeners:
            self.log("end", kind)
        if kind == "backward" or not torch.is_grad_enabled():
            self.log.check()
        for group in self.groups:
            full = group.full
            if full.state is State.SHARDED and full.versions_set != (*map(version_of, full.leaves),):
                full.refuse_stale_writes()

    def _notice_changes(self) -> None:
        """Notice what users did to the parameters since the last step, and let gathers wait for that."""
        event, self.after_optimizer = self.after_optimizer, None
        if self.has_streams and self.comm.forget_marks_at_capture():
            event = None
        writes = [group.writes for group in self.groups] if event is not None else []
        for group in self.groups:
            group.notice_changes()
            group.module_params.left = None
            if group.shard.is_unmapped:
                group.map_shared()
        if event is not None and writes == [group.writes for group in self.groups]:
            self.step.written = EventMark(event, self.device)
        elif self.has_streams:  # the values of replaced parameters were copied just now
            self.step.written = mark_now(self.device)

    @property
    def is_idle(self) -> bool:
        """Whether no forward and no backward runs, or was cut short by an error."""
        return self.step.now is Pass.NONE

    def end_forward(self, mark: object | None) -> None:
        """The outermost forward ended; ``mark`` lives as long as autograd's graph of it, ``None`` if it has none."""
        for group in self.groups:
            if group.full.state is State.GATHERING:  # gathered ahead for a forward that did not come
                group.reshard()
        is_last = mark is None or not self.outermost.modules[0].training  # probably no backward follows
        for group in self.order.entered:
            if group.full.state is State.UNSHARDED and is_last:
                group.leave_unsharded(was_evaluated=True)
            elif group.full.state is State.UNSHARDED:
                group.module_params.note_left()
            elif group.full.state is State.SHARDED_POST_FORWARD and is_last:
                group.reshard()
        if mark is not None:
            self._last_forward = weakref.ref(mark)
        self.step.now = END[self.step.now, "forward"]
        self.log.end_pass("forward")
        for unit in self.units:
            if unit.state.to_run:  # modules of a list that have not run, or of a unit whose error the model caught
                unit.end_forward(self)
        self._check_pass("forward")
        if self.has_streams:
            self.comm.give_back_memory()

    def prefetch_forward(self, unit: Scheduled) -> None:
        """Gather ahead the groups that follow those of ``unit``."""
        if unit.forward_prefetch:
            self._gather_ahead((group for target in unit.forward_prefetch for group in target.groups), None, None)
        else:
            self._gather_ahead(self.order.next_in_forward(), self.prefetch_limit, self.prefetch_bytes)

    def begin_backward(self) -> None:
        """Begin a backward that reached the tree, and ask to be called when it ends."""
        if not self.step.now.has_backward:
            self.log.check()
            WAITS.position = self._position
            self._backward_began, self._last_forward = True, None
            for group in self.groups:
                if group.module_params.left is not None:
                    group.keep_writes()
                    group.module_params.left = None
            early = () if self.root.finalizes_by_hand else self.root.groups
            self.reduces_early = [group for group in early if group.gradients.may_come_in_parts]
            self.begin_pass("backward")
            call_after_backward(self.end_backward)

    def prefetch_backward(self, unit: Scheduled) -> None:
        """Gather ahead the groups that come before ``unit`` in forward, and so after it in backward."""
        if unit.backward_prefetch:
            targets = (group for target in unit.backward_prefetch for group in reversed(target.groups))
            self._gather_ahead(targets, None, None)
            return
        for group in reversed(unit.groups):
            ahead = self.order.next_in_backward(group)
        if unit.groups:
            wanted = filter(attrgetter("options.unshard_in_backward"), ahead)
            self._gather_ahead(wanted, self.prefetch_limit, self.prefetch_bytes)

    def reduce_early(self, unit: Scheduled) -> None:
        """Reduce the gradients of the root that have arrived when the first unit inside it begins its backward: those
        of a head need not wait for those of an embedding, which are the last of all."""
        if unit is not self.root:
            early, self.reduces_early = self.reduces_early, ()
            for group in early:
                if group.gradients.nbytes >= EARLY:
                    self.reduce(group)

    def end_backward(self) -> None:
        """Reduce what still waits, wait for every reduction, and leave every group as a next step expects it."""
        if self.is_last_backward and self.has_streams:
            self.comm.give_back_memory()  # the gradients of the blocks are gone, and those of the root come next
        for unit in reversed(self.units):
            unit.end_backward(self)
        self.step.now = END[self.step.now, "backward"]
        self.log.end_pass("backward")
        if self.is_last_backward and not self.root.finalizes_by_hand:
            self._end_step()
        self._check_pass("backward")

    def check_finalization(self, by_hand: bool) -> None:
        """Raise RuntimeError if the choice to finalize ``by_hand``, or not, would change in a backward or after it."""
        if by_hand == self.root.finalizes_by_hand:
            return
        if running_backward() >= 0:
            raise RuntimeError("set_manual_backward_finalization cannot change mode during a backward")
        if self._backward_began:
            raise RuntimeError(
                "set_manual_backward_finalization cannot change mode after a backward has started: end the step "
                "first, with finalize_backward() or a last backward, or call reset_iter_state()"
            )

    def finalize(self) -> Callable[[], None]:
        """Reduce and reshard what the backwards left, as the groups' settings say. All ranks must call it.

        Returns a function that waits for the reductions, once; it raises RuntimeError if ``reset_iter_state()`` was
        called meanwhile. Raises RuntimeError if the step is not to be finalized by hand, or not yet.
        """
        if self._is_awaited:
            raise RuntimeError("the gradient reduction that was started must be waited on before another is")
        if not self.root.finalizes_by_hand:
            raise RuntimeError(
                "finalize_backward requires manual finalization: call set_manual_backward_finalization(True) on the "
                "root before the forward"
            )
        if self.step.now.has_backward:
            raise RuntimeError("finalize_backward must be called after backward, which has not completed")
        if self._last_forward is not None and self._last_forward() is not None:
            raise RuntimeError(
                f"finalize_backward was called between a forward of {self.root!r} and its backward: call it after "
                f"the backward or, if there is to be none, delete what the forward returned"
            )
        before = self.step.now
        self.step.now = FINALIZE[before]  # an error leaves it so
        for group in reversed(self.groups):
            group.gradients.take_left()
            if group.options.strategy.reduces:
                self.reduce(group)
            group.reshard_after_backward()
        self.step.now = before
        self.log.end_pass("backward")
        reductions, drops = self.comm.reductions, self.comm.reductions.drops
        self._is_awaited = True

        def wait() -> None:
            if not self._is_awaited or reductions.drops != drops:
                raise RuntimeError(
                    "this gradient reduction handle was invalidated by reset_iter_state(), of its model or of one "
                    "that shares its communication: the gradients of that step are lost"
                )
            self._is_awaited = False
            self._end_step()
            self.log.check()

        return wait

    def _end_step(self) -> None:
        """Wait for every reduction. An error leaves a backward that did not end."""
        try:
            self.comm.reductions.wait_for_oldest()
            if self.comm.reductions.arriving:
                self.comm.reductions.hand_over_arrived()
        except BaseException:
            self.step.now = FINALIZE.get(self.step.now, self.step.now)
            raise
        if self.inspect is not None:
            for group in self.groups:
                self.inspect(group, True)
        self._forget_step()
        if self.has_streams:
            self.comm.give_back_memory()

    def _forget_step(self) -> None:
        """Forget the step: it has ended, or an error cut it short."""
        self.order.finished.clear()
        self._backward_began, self._last_forward, self._is_awaited = False, None, False

    def reset(self) -> None:
        """Recover from an error in the middle of a step: drop its gradients, and prepare the next step."""
        self._forget_step()
        self.step.now = Pass.NONE
        self.passes.end()
        for transport in {group.reduce_transport: None for group in self.groups}:
            transport.reset()
        for unit in self.units:
            unit.reset()
        self.comm.reductions.drop()
        self.log.forget()

    def _gather_ahead(self, targets: Iterable[ParamGroup], most: int | None, room: int | None) -> None:
        """Start the gathers of the first ``most`` groups, and of those whose full buffers have ``room``; ``None`` is no
        limit. The group after them starts what its gather has to wait for, from replicas or a disk. Groups in shared
        memory have nothing to start."""
        begins_next = self._starts_early and not (most is room is None)
        for number, group in enumerate(islice(targets, most if most is None else most + begins_next)):
            room = room if room is None else room - group.full.buffer.nbytes
            if number == most or (room is not None and room < 0):
                if begins_next:
                    group.full.start_early()
                return
            if group.shard.shared is None and not group.full.state.is_unsharded:
                group.unshard()

    def reduce(self, group: ParamGroup) -> None:
        """Start to reduce the gradients of ``group`` that wait."""
        if group.gradients.pending:
            if self.inspect is not None:
                self.inspect(group, False)
            group.gradients.reduce()


def check_first_forward(modules: Sequence[nn.Module], groups: Sequence[ParamGroup]) -> None:
    """Raise RuntimeError if ``modules`` of a tree have buffers on the meta device, and ValueError if the ranks sharded
    its groups in different orders. Both mistakes would otherwise be silent."""
    on_meta = [name for module in modules for name, buffer in module.named_buffers() if buffer.is_meta]
    if on_meta:
        raise RuntimeError(
            f"buffers are still on the meta device: {on_meta}. Materialize them before the first use, for example with "
            f"module.to_empty(device=...) and then reset_parameters() or load_state_dict()"
        )
    by_process_group: dict[dist.ProcessGroup, list[str]] = {}
    for group in sorted(groups, key=lambda group: group.tag):  # in the order in which they were sharded
        if group.data.shard_group is not None:
            names = ", ".join(f"'{param.name}'" for param in group.params)
            by_process_group.setdefault(group.data.shard_group, []).append(f"the group of {names} (tag {group.tag})")
    for process_group, described in by_process_group.items():
        compare(described, 0, process_group, "did not shard their modules in the same order")


def _position(schedule: weakref.ref[Schedule]) -> Position:
    """The position of the thread that trains a tree. Called in another thread."""
    here = schedule()
    if here is None:
        return Position("outside of training")
    groups, now = here.groups, here.step.now
    kind: Kind | None = None if now is Pass.NONE else "backward" if now.has_backward else "forward"
    where = f"in the {kind}" if kind else "between the passes"
    tree = min((group.tag for group in groups), default=-1)
    names = {group.tag: group.title for group in groups}
    last = here.log.latest or next(reversed(here.order.entered), None) if kind else None
    at = f", at {last.title}" if last is not None else ""
    doing = f"{where} of step {here.step.optimizer_steps + 1} (forward {here.step.forwards}){at}"
    return Position(doing, here.log.passes(kind, tree), names, here.log.unlike_before)
