"""When each group of a tree of modules is gathered, resharded and reduced, and which work waits for which.

One schedule serves all units under one root. Owns the passes of a step (their beginning, their end, and what an error
leaves behind), prefetch and its bound, and the observers. It leaves to the groups how they gather and reduce, and to
the units which module is running.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Literal, NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn

from fullshard.buffer.heap import keep_freed, return_freed
from fullshard.buffer.slots import SHARED
from fullshard.comm.waits import WAITS, Position
from fullshard.device import EventMark, is_host, mark_now
from fullshard.group.context import Clock, CommContext, State
from fullshard.group.group import Group
from fullshard.group.parameter import plain_name
from fullshard.group.verify import verify_next
from fullshard.schedule import checks
from fullshard.schedule.finalization import Finalization
from fullshard.schedule.order import Order
from fullshard.schedule.passes import NOTHING, Consistency, Kind, Passes, may_end_processes
from fullshard.torch_private import call_after_backward, profiler_listens, running_backward

T = TypeVar("T")

#: What to do after an error. The schedule does not do it unasked: a rank that goes on alone would take part in gathers
#: of other layers on other ranks. Where the sizes agree, it would compute with wrong weights.
_RESET = "call reset_iter_state() on the root module, on every rank, before the next forward"

Action = Literal["gather", "reuse", "unshard", "reshard", "rest", "reduce"]


@dataclass(frozen=True)
class Event:
    """One thing that happened to one group.

    Args:
        action: ``gather`` (communication started), ``unshard`` (what was gathered is there and the modules show it),
            ``reuse`` (the values were still there and the modules show them), ``reshard``, ``rest`` (resharded to a
            smaller mesh), ``reduce`` (the reduction of its gradients started).
        group: fully qualified name of the group's module, ``""`` for the root.
        during: the pass.
        step: counts forwards of the root.
    """

    action: Action
    group: str
    during: Kind
    step: int


class Observer(Protocol):
    """Is called on the rank itself, in the order in which things happen there. Without observers there is no cost."""

    def __call__(self, event: Event) -> None: ...


class Scheduled(Protocol):
    """A :class:`~fullshard.schedule.unit.Unit` as a schedule knows it."""

    modules: tuple[nn.Module, ...]
    is_list: bool
    groups: list[Group]
    ignored: set[int]
    emptied: list[checks.Emptied]

    @property
    def forward_prefetch(self) -> Sequence[Scheduled]: ...
    @property
    def backward_prefetch(self) -> Sequence[Scheduled]: ...
    def join(self, schedule: Schedule) -> None: ...
    def end_forward(self) -> None: ...
    def end_backward(self) -> None: ...
    def reset(self) -> None: ...


class Schedule:
    """The passes of one tree of modules."""

    def __init__(self, root: Scheduled, device: torch.device) -> None:
        self.root = root
        self.device = device
        self.units: list[Scheduled] = []
        self._groups: list[Group] = []
        self.comm = CommContext(device)
        self.clock = Clock(begin_backward=self.begin_backward)
        self.passes = Passes(self.clock)
        self.order: Order[Group] = Order()
        self.consistency = Consistency(device, self.passes)
        self.observers: list[Observer] = []
        #: Looks at the gradients of a group, before they are reduced or after; see :mod:`fullshard.schedule.finite`.
        self.inspect: Callable[[Group, bool], None] | None = None
        self.prefetch_limit = 1
        self.is_last_backward = True
        self.finalization = Finalization(repr(root))
        self.after_optimizer: torch.Event | None = None
        self.forward_root: Scheduled | None = None  # the unit whose forward is the outermost one
        self._process_groups: list[dist.ProcessGroup] = []
        self._is_profiled = False  # in the pass that runs; outside of passes each gather asks
        self._compares_order = dist.get_debug_level() != dist.DebugLevel.OFF  # type: ignore[attr-defined]
        self.is_in_backward = False  # one has begun that has not ended
        self.backwards = 0
        self.step = 0  # counts forwards
        self._position = partial(_position, weakref.ref(self))

    def take_over(self, units: Iterable[Scheduled], module: nn.Module) -> None:
        """Make all units under the root share this schedule, and name their groups after their modules."""
        self.units = list(units)
        self._groups = [group for unit in self.units for group in unit.groups]
        names = {id(submodule): name for name, submodule in module.named_modules()}
        for unit in self.units:
            unit.join(self)
            for group in unit.groups:
                group.name = ", ".join(plain_name(names.get(id(member), "?")) for member in unit.modules)
                self.clock.steps = max(self.clock.steps, group.clock.steps)  # before the first forward too
                group.clock = self.clock
                group.join(self.comm)
                for param in group.params:
                    param.heed_grad_dtype()  # may be assigned until here
                    location = param.locations[0]
                    param.name = plain_name(f"{names.get(id(location.module), '')}.{location.name}")
        used = [each for group in self.groups() for each in (group.data.shard_group, group.data.replicate_group)]
        self._process_groups = list(dict.fromkeys(each for each in used if each is not None))
        self.consistency.compare_over(self._process_groups)
        self.size_slots()
        if is_host(self.device):
            # The reduced gradients, what autograd makes before it is taken, and activations of about as much.
            largest = max([group.full.buffer.nbytes for group in self.groups()], default=0)
            keep_freed(self, 2 * sum(group.memory.nbytes for group in self.groups()) + 4 * largest)

    def size_slots(self) -> None:
        """An ordinary slot is as large as the largest group that takes turns."""
        for group in self.groups():
            options, buffer, pool = group.options, group.full.buffer, group.parameter_pool
            buffer.takes_turns = options.reshard_after_forward and not options.keep_unsharded_storage
            if buffer.takes_turns:
                pool.ordinary = max(pool.ordinary, buffer.nbytes)

    def free_buffers(self) -> int:
        """Free what is kept for the next step, and the staging of transports; returns the bytes."""
        nbytes = sum(pool.drop() for pool in self.comm.pools.values()) + SHARED.drop()
        for transport in {group.reduce_transport for group in self.groups()}:
            transport.close_peers_buffers()
        if is_host(self.device):
            return_freed()
        return nbytes

    def groups(self) -> list[Group]:
        return self._groups

    def begin_forward(self, unit: Scheduled) -> bool:
        """The forward of ``unit`` begins; returns whether it is the outermost one. Raises RuntimeError if an error cut
        an earlier forward or backward short."""
        if self.is_in_backward:
            raise RuntimeError(
                f"a backward of {self.root!r} did not end, as an error in it leaves it, which is the one to look at: "
                f"{_RESET}. The gradients of that step are lost"
            )
        if self.forward_root is not None:
            if unit is self.forward_root or unit is self.root:
                self.refuse_forward(self.forward_root)
            return False
        self.finalization.begin_forward()
        self.consistency.check()
        checks.check_process_groups(self._process_groups)
        is_first = self.step == 0
        if is_first:
            checks.check_first_forward(unit.modules, self.groups())
            self.clock.announce = self.consistency.announce if any(map(may_end_processes, self.groups())) else None
        if emptied := [buffers for each in self.units for buffers in each.emptied]:
            for each in self.units:
                each.emptied.clear()
            checks.warn_of_emptied(emptied)
        self.forward_root = unit
        self._is_profiled = profiler_listens()
        WAITS.position = self._position
        self.step += 1
        self.clock.epoch += 1
        event, self.after_optimizer = self.after_optimizer, None
        if self.comm.heed_capture():
            event = None
        writes = [group.writes for group in self.groups()] if event is not None else []
        for group in self.groups():
            before = group.state
            group.check_in()
            if self.observers and group.state is not before:
                self.tell("reshard", group)
        if event is not None and writes == [group.writes for group in self.groups()]:
            self.clock.written = EventMark(event, self.device)
        else:  # what replaced parameters was copied just now
            self.clock.written = mark_now(self.device)
        if is_first:
            ignored = {param for each in self.units for param in each.ignored}
            checks.warn_of_strangers(unit.modules, self.groups(), ignored)
        for group in self.groups():
            if group.memory.is_apart:
                group.meet()
        self.passes.begin("forward", self.groups())
        self.order.begin_forward()
        return True

    @property
    def is_idle(self) -> bool:
        """Whether no forward and no backward runs, or was cut short by an error."""
        return self.forward_root is None and not self.is_in_backward

    def refuse_forward(self, unit: Scheduled) -> NoReturn:
        """Raise: ``unit`` is still in an earlier forward."""
        raise RuntimeError(
            f"the forward of {unit!r} did not end, as an error in it leaves it, which is the one to look at: {_RESET}"
        )

    def end_forward(self, mark: object | None) -> None:
        """The outermost forward ended; ``mark`` lives as long as autograd's graph of it, ``None`` if it has none."""
        for group in self.groups():
            if group.state is State.GATHERING:  # gathered ahead for a forward that did not come
                self.reshard(group)
        self.forward_root = None
        self.finalization.end_forward(mark)
        self.passes.end("forward")
        self.consistency.start("forward", self.passes.steps)
        if not torch.is_grad_enabled():
            self.consistency.check()
        for unit in self.units:
            if unit.is_list:
                unit.end_forward()

    def prefetch_forward(self, unit: Scheduled) -> None:
        """Gather ahead the groups that follow those of ``unit``."""
        if unit.forward_prefetch:
            self._gather_ahead((group for target in unit.forward_prefetch for group in target.groups), None)
        else:
            self._gather_ahead(self.order.next_in_forward(), self.prefetch_limit)

    def begin_backward(self) -> None:
        """Begin a backward that reached the tree, and ask to be called when it ends."""
        if not self.is_in_backward:
            self.consistency.check()
            self.is_in_backward = True
            self._is_profiled = profiler_listens()
            WAITS.position = self._position
            self.backwards += 1
            self.finalization.begin_backward()
            self.passes.begin("backward", self.groups())
            call_after_backward(self.end_backward)

    def prefetch_backward(self, unit: Scheduled) -> None:
        """Gather ahead the groups that come before ``unit`` in forward, and so after it in backward."""
        if unit.backward_prefetch:
            self._gather_ahead((group for target in unit.backward_prefetch for group in reversed(target.groups)), None)
            return
        for group in reversed(unit.groups):
            ahead = self.order.next_in_backward(group)
        if unit.groups:
            self._gather_ahead((each for each in ahead if each.options.unshard_in_backward), self.prefetch_limit)

    def end_backward(self) -> None:
        """Reduce what still waits, wait for every reduction, and leave every group as a next step expects it."""
        for unit in reversed(self.units):
            unit.end_backward()
        self.is_in_backward = False
        self.consistency.start("backward", self.passes.steps)
        if self.is_last_backward and not self.finalization.is_by_hand:
            self._end_step()
        self.passes.end("backward")
        self.consistency.check()

    def finalize(self) -> Callable[[], None]:
        """Reduce and reshard what the backwards left, as the settings of the groups say. Ranks must call it alike.

        Returns a function that waits for the reductions, once; it raises RuntimeError if ``reset_iter_state()`` was
        called meanwhile.
        """
        self.finalization.check_by_hand(self.is_in_backward)
        self._is_profiled = profiler_listens()
        self.is_in_backward = True  # an error leaves it so
        for group in reversed(self.groups()):
            group.gradients.take_left()
            if group.options.reduce_gradients:
                self.reduce(group)
            if group.options.reshard_after_backward:
                self.reshard(group)
        self.is_in_backward = False
        self.consistency.start("backward", self.passes.steps)
        reductions, drops = self.comm.reductions, self.comm.reductions.drops
        self.finalization.is_awaited = True

        def wait() -> None:
            if not self.finalization.is_awaited or reductions.drops != drops:
                raise RuntimeError(
                    "this gradient reduction handle was invalidated by reset_iter_state(), of its model or of one "
                    "that shares its communication: the gradients of that step are lost"
                )
            self.finalization.is_awaited = False
            self._end_step()
            self.consistency.check()

        return wait

    def _end_step(self) -> None:
        """Wait for every reduction. An error leaves the backward one that did not end."""
        try:
            self.comm.reductions.keep_at_most(0)
            self.comm.reductions.take_in()
        except BaseException:
            self.is_in_backward = True
            raise
        if self.inspect is not None:
            for group in self.groups():
                self.inspect(group, True)
        self.order.finished.clear()
        self.finalization.reset()

    def reset(self) -> None:
        """Recover from an error in the middle of a step: its gradients are lost, and the next step is right."""
        self.forward_root = None
        self.is_in_backward = False
        self.finalization.reset()
        self.passes.give_up()
        for transport in {group.reduce_transport: None for group in self.groups()}:
            transport.reset()
        for unit in self.units:
            unit.reset()
        self.comm.reductions.drop()
        self.order.finished.clear()
        self.consistency.forget()

    def unshard(self, group: Group) -> None:
        """Gather ``group`` unless it was gathered ahead, and let its modules show the unsharded parameters."""
        before = group.state
        if before is not State.GATHERING:
            self.gather(group)
        group.wait_for_unshard()
        if self.observers and before is not State.UNSHARDED and before is not State.LEFT:
            self.tell("unshard", group)

    def gather(self, group: Group) -> None:
        """Start to gather ``group``, unless its values are there."""
        before = group.state
        if before is State.GATHERING:
            return
        if self._compares_order and not group.is_unsharded and group.data.shard_group is not None:
            verify_next(group.name, group.tag, group.data.shard_group)
        profiled = profiler_listens() if self.forward_root is None and not self.is_in_backward else self._is_profiled
        started = self._in_range("all_gather", group, group.unshard) if profiled else group.unshard()
        if started and self.clock.announce is None:
            self.consistency.calls.append((group, NOTHING))
        if self.observers and before is not group.state and before is not State.LEFT:
            self.tell("gather" if started else "reuse", group)

    def _gather_ahead(self, targets: Iterable[Group], most: int | None) -> None:
        """Start the first ``most`` gathers (``None``: all) that are needed soon; shared memory has nothing to start."""
        for group in islice(targets, most):
            if group.memory.shared is None and (
                group.state is State.SHARDED or group.state is State.SHARDED_POST_FORWARD
            ):
                self.gather(group)

    def reshard(self, group: Group) -> None:
        if group.state is not State.SHARDED:
            group.reshard()
            if self.observers:
                self.tell("reshard", group)

    def reshard_after_forward(self, group: Group) -> None:
        before = group.state
        group.reshard_after_forward()
        if self.observers and group.state is not before:
            self.tell("rest" if group.state is State.SHARDED_POST_FORWARD else "reshard", group)

    def reduce(self, group: Group) -> None:
        if group.gradients.pending:
            if self.inspect is not None:
                self.inspect(group, False)
            reduce = group.gradients.reduce
            reduced = self._in_range("post_backward_reduce", group, reduce) if self._is_profiled else reduce()
            if self.clock.announce is None:
                self.consistency.calls.append((group, reduced))
            if self.observers:
                self.tell("reduce", group)

    def _in_range(self, action: str, group: Group, do: Callable[[], T]) -> T:
        """``do()`` in a range with the label that traces of torch's own FSDP have."""
        with torch.profiler.record_function(f"FSDP::{action} ({group.name})"):
            return do()

    def tell(self, action: Action, group: Group) -> None:
        during: Kind = "backward" if running_backward() >= 0 or self.is_in_backward else "forward"
        event = Event(action, group.name, during, self.step)
        for observer in self.observers:
            observer(event)


def _position(schedule: weakref.ref[Schedule]) -> Position:
    """Where the thread is that trains a tree; called in another thread."""
    here = schedule()
    if here is None:
        return Position("outside of training")
    groups = here.groups()
    kind: Kind = "backward" if here.is_in_backward else "forward"
    where = "between the passes" if here.is_idle else f"in the {kind}"
    passes = here.consistency.passes(
        None if here.is_idle else kind, here.passes.steps, min((group.tag for group in groups), default=-1)
    )
    names = {group.tag: group.title for group in groups}
    last = [*here.order.entered, *(call[0] for call in here.consistency.calls)] if not here.is_idle else []
    at = f", at {last[-1].title}" if last else ""
    doing = f"{where} of step {here.clock.steps + 1} (forward {here.step}){at}"
    return Position(doing, passes, names, here.consistency.unlike_before)
