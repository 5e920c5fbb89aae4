"""The part of one process in an elastic job: its connections, the membership, and how a new process comes to both.

Owns what other processes say, and what this one says to them, in threads beside training. It computes nothing:
:class:`fullshard.elastic.session.Elastic` trains.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fullshard.comm.waits import WAITS, waiting
from fullshard.device import is_host
from fullshard.elastic.agreement import KINDS, Stage
from fullshard.elastic.connections import HANGS
from fullshard.elastic.copies import Copy
from fullshard.elastic.entry import PATIENCE, ElasticError, Entering
from fullshard.elastic.gradients import Kept, KeptGradients, Replica
from fullshard.elastic.messages import (
    Candidate,
    Fetch,
    Followed,
    Has,
    Leaving,
    RowValue,
    RunOrder,
    ShardState,
    Spared,
    Square,
)
from fullshard.elastic.packed import Packed
from fullshard.elastic.rows import Row
from fullshard.figures import listeners_of
from fullshard.schedule.schedule import Schedule
from fullshard.watch.connections import connected_sockets

_log = logging.getLogger("fullshard")

_AGAIN = 1.0  # seconds after which a change is proposed again
_STUCK = 10.0  # seconds for which a wait may go on after its connections were closed


class RepeatStep(Exception):
    """The step begins again, perhaps from another state."""


class Job(Entering):
    """The base of :class:`~fullshard.elastic.session.Elastic`: everything but what is trained."""

    _model: nn.Module
    _optimizer: Optimizer
    _state: Mapping[str, Any]

    def __init__(self, replicas: int, seed: int, directory: str | Path | None, processes: int | None = None) -> None:
        super().__init__(replicas, seed, directory)
        self.step = 0
        self._is_done = False  # whether all steps are made
        self._schedule: Schedule | None = None  # of the model
        self._row: Row = ()  # whose process group this process is in
        self._row_connections: Collection[tuple[str, str]] = ()  # of the backend between the processes of the row
        self._wait_count, self._since = -1, 0.0  # the number of training's waits, and since when it is that
        self._cut = -1, math.inf  # the number of the wait whose connections were closed, and since when
        self._aborted: Any = None  # the process group whose waits were ended
        self._target = math.inf  # how many steps are to be made
        self._copy_every = 0
        self._kept: KeptGradients | None = None
        self._forget()
        self._enter(processes)

    def _forget(self) -> None:
        """Begins without news of other processes."""
        self._frozen_since = math.inf  # while the agreement is frozen
        self._coming = {}
        #: The last process that was spared, under which membership, how many were new, and until when it is awaited.
        self._spared = -1, -1, -1, -math.inf
        self._is_spared = False  # whether this process is, under this membership
        self._made = 0  # how many steps a process had made that left
        self._times: dict[str, float] = {}  # when a change was noticed and agreed, and this process in its new row
        self._first = 0  # the step from which on this process is a member
        self._mean: tuple[Packed, tuple[bool, ...]] | None = None  # of the step that ends, for those that follow
        self._row_values: dict[tuple[Row, str], bytes] = {}
        self._orders: list[RunOrder] = []
        self._has: dict[tuple[int, int], Has] = {}  # by the membership and the process
        self._squares: dict[tuple[int, int], Square] = {}  # by the step and the shard
        self._ordered: set[tuple[int, Replica]] = set()  # steps and replicas that this row was told to run
        self._leaving: dict[int, bool] = {}  # whether a process that leaves has made all steps
        self._early: list[Kept] = []
        self._members_before: set[int] = set()  # the members under the last membership that this process has acted on
        self._error: Exception | None = None  # of news on which this process could not act
        self._source = -1  # of the state of this process, until it is a member
        self._states: list[ShardState] = []
        self._followed: dict[int, Followed] = {}
        self._followers: set[int] = set()  # new processes that follow this one
        self._fetching: set[int] = set()
        self._wanted: dict[int, int] = {}  # new processes, and the shards whose states they need from another one
        self._holder = -1  # of the copies of this process
        self._counted = 0  # how many steps count here; those before going back, until then
        self._back, self._has_copy = -1, False  # of the state that this new process was sent

    def _part(self) -> None:
        """Ends the part of this process in the job, after what others may yet need."""
        if self._directory is not None:
            (self._directory / f"{self.rank}.json").unlink(missing_ok=True)
        with self._changed:
            for process in [*self._connections.addresses]:  # one may yet need the norm of the last step
                for message in (*self._squares.values(), Leaving(self._is_done, self.step)):
                    self._connections.send(process, message)
            self._opened = None
        self._connections.close()

    def _has_waited_for_majority(self) -> bool:
        return time.monotonic() > self._frozen_since + PATIENCE

    def _progress(self) -> tuple[float, float]:
        """For how many seconds training has computed without a wait, and for how many it has waited; one of them is 0.
        It is called once a second, and proposes a change again that is not decided in time."""
        with self._changed:
            self._spare_one()
            if self._has_waited_for_majority():
                self._cut_row()  # what training waits for will not come, and then it raises an error
            elif self._row and self._is_in_other_row(self._row):
                self._cut_row()  # also a wait that has begun since the change
            elif time.monotonic() > self._frozen_since + _AGAIN:
                self._agreement.consider(again=True)
                self._after_agreement()
        now, count, wait = time.monotonic(), WAITS.count, WAITS.current
        if (
            wait is not None
            and wait.process_group is not None
            and count == self._cut[0]
            and now > self._cut[1] + _STUCK
        ):
            self._end_process(wait.what)
        if count != self._wait_count:
            self._wait_count, self._since = count, now
        return (0.0, now - self._since) if wait is not None else (now - self._since, 0.0)

    def _end_process(self, what: str) -> None:
        """Ends this process, as nothing ends its wait: gloo may wait for ever on a connection that it has closed."""
        _log.error(
            f"process {self.rank} still waits for {what} {_STUCK:.0f} s after its connections to other processes were "
            f"closed. The backend does not end this wait, so the process ends: start it again"
        )
        self._connections.close()
        os._exit(1)

    @property
    def changes(self) -> int:
        """How often the members of the job have changed."""
        return self._agreement.membership.number

    @property
    def is_joining(self) -> bool:
        """Whether this process has not been a member yet."""
        return self._agreement.membership.number < 0

    # -- new processes -------------------------------------------------------------------------------------------------

    def _note_done(self) -> None:
        """Notes whether a process has made all steps that this one is to make, and left."""
        self._agreement.is_done = self._made >= self._target

    def _drop_followers(self) -> None:
        """Forgets followers that are members, and have been sent all that came before."""
        if self.step >= self._agreement.membership.step:
            self._followers.difference_update(self._agreement.members)

    def _counts(self, step: int) -> bool:
        """Whether a step counts, and its gradients are here."""
        is_known = not self.is_joining and max(self._counted, self._agreement.step) > step >= self._first
        return is_known or step in self._followed

    def _ask_to_be_member(self) -> None:
        if self.is_joining and self.step not in self._followed:
            reached = frozenset(self._connections.addresses)
            for process in reached:
                self._connections.send(
                    process, Candidate(self.shard, self._back, not self._has_copy, reached, self.step)
                )

    def _find_holder(self) -> None:
        """Overridden: a membership may mean another holder of the copies of this process."""

    def _serve_copies(self) -> None:
        """Overridden: new processes may need copies."""

    def _spare_one(self) -> None:
        """Overridden: a process may do more with a different shard."""

    # -- messages ------------------------------------------------------------------------------------------------------

    def _receive(self, sender: int, message: Any) -> None:
        """Reads a message of another process."""
        back = self._agreement.membership.back
        if isinstance(message, Exception):
            raise message
        if isinstance(message, KINDS):
            self._agreement.receive(sender, message)
            self._after_agreement()
        elif isinstance(message, Kept | Square | Copy) and message.number < back:
            pass  # of steps that will be repeated
        elif isinstance(message, Copy):
            self._agreement.copies[message.step, message.shard] = message.data
        elif isinstance(message, Kept):
            self._add(message)
        elif isinstance(message, RunOrder):
            self._orders.append(message)
        elif isinstance(message, Has):
            self._has[message.number, sender] = message
        elif isinstance(message, Spared):
            self._is_spared = True
        elif isinstance(message, RowValue):
            self._row_values[message.row, message.key] = message.value
        elif isinstance(message, Square):
            self._squares[message.step, message.shard] = message
        elif isinstance(message, Leaving):
            self._leaving[sender] = message.is_done
            self._made = max(self._made, message.step if message.is_done else 0)
            self._note_done()
        elif isinstance(message, Fetch):
            self._last_number = max(self._last_number, message.process)
            self._wanted[message.process] = self._coming[message.process] = message.shard
            self._serve_copies()
        elif isinstance(message, ShardState):
            if self.is_joining:
                self._source = sender
                self._states.append(message)
        elif isinstance(message, Followed) and message.back >= self._back:
            self._followed[message.step] = message
            self._squares.update({(message.step, each.shard): each for each in message.squares})
        elif isinstance(message, Candidate):
            self._last_number, followers = max(self._last_number, sender), self._agreement.followers
            others = self._agreement.members.keys() | self._agreement.candidates.keys()
            hears_all = message.reached >= others - self._agreement.lost - {sender}
            is_near = message.step + 1 >= self._agreement.step and message.back >= back
            if sender not in self._agreement.members and is_near and hears_all:
                self._coming[sender] = message.shard
                self._agreement.candidates[sender] = message.shard
                (followers.add if message.follows else followers.discard)(sender)
                self._agreement.suspect(sender, False)  # it may have loaded its state for long
                self._after_agreement()

    def _lose(self, process: int, is_read: bool, has_trusted: bool) -> None:
        was_member, is_done = process in self._agreement.members, self._leaving.get(process)
        self._agreement.lose(process, is_read, has_trusted)
        if not is_done:
            self._tell_change(f"process {process} {'leaves' if process in self._leaving else 'has ended'}")
        if was_member and not is_done:
            self._times.setdefault("noticed", time.monotonic())
        self._followers.discard(process)
        self._fetching.discard(process)
        self._coming.pop(process, None)
        self._after_agreement()

    def _suspect(self, process: int, why: str) -> None:
        self._agreement.suspect(process, bool(why), why == HANGS)
        self._times.setdefault("noticed", time.monotonic())
        if why:
            self._tell_change(f"process {process} {why}")
        self._after_agreement()

    def _add(self, kept: Kept) -> None:
        if self._kept is None or self._agreement.goes_back:
            self._early.append(kept)
        elif kept.step >= self.step:
            self._kept.add(kept)
            self._look_whether_complete()

    def _taking_part(self, step: int) -> Sequence[Replica] | None:
        """The replicas whose gradients a step needs, if they are known."""
        return range(self.replicas)

    def _look_whether_complete(self) -> None:
        if self._kept is None or (replicas := self._taking_part(self.step)) is None:
            return
        # This process first makes the step before: once this step is complete, others may overwrite those gradients.
        is_ready = self.step == self._agreement.step and not self._agreement.goes_back
        if is_ready and self._kept.has_all(self.step, replicas):
            self._agreement.complete()
            self._after_agreement()

    def _after_agreement(self) -> None:
        """Sends what the agreement wants to send. If there is a new membership, tells what this process has."""
        outbox, self._agreement.outbox = self._agreement.outbox, []
        if not self._agreement.goes_back:
            self._counted = self._agreement.step
        for receiver, message in outbox:
            self._connections.send(receiver, message)
        membership, now = self._agreement.membership, time.monotonic()
        self._frozen_since = min(self._frozen_since, now) if self._agreement.is_frozen else math.inf
        if self._number == membership.number:
            return
        self._number, self._is_spared = membership.number, False
        self._coming = {each: shard for each, shard in self._coming.items() if each not in membership.shard_of}
        if membership.joined:
            self._drop_followers()
        if self.rank in membership.joined:
            self._first = membership.step
            self._publish()
        if self._row and self._is_in_other_row(self._row):
            self._cut_row()
        if "noticed" in self._times or membership.joined:  # else all steps are made, and processes end
            self._times = {"noticed": self._times.get("noticed", now), "agreed": now}
            self._tell_change(
                f"membership {membership.number}, from step {membership.step} on: processes {[*membership.shard_of]} "
                f"in rows {[*membership.rows]}"
            )
            if membership.holders:
                self._tell_change(
                    f"no process is left that has shard {', '.join(str(shard) for shard, _ in membership.holders)} of "
                    f"{self.shards}. The job goes back to step {membership.step}, of which processes "
                    f"{sorted({process for _, process in membership.holders})} have copies, and waits there until each "
                    f"of these shards has a process: one that can be spared from another shard comes by itself, else "
                    f"start a new process with the same command"
                )
        self._serve_copies()
        before, self._members_before = self._members_before, {*membership.shard_of}
        if self._kept is not None and self.rank in membership.shard_of and not self._agreement.goes_back:
            self._begin_membership(lost_nobody=bool(before) and before <= membership.shard_of.keys())

    def _begin_membership(self, lost_nobody: bool = False) -> None:
        """Tells other members what this process has of the step that runs, and the sums of squares that it knows:
        members that have ended may not have told all. Tells only new members what it has if it ``lost_nobody``."""
        membership, step, kept = self._agreement.membership, self._agreement.step, self._kept
        assert kept is not None
        self._find_holder()
        for told in kept.tell_again(step, in_own_memory=not lost_nobody):
            self._tell(told, membership.joined if lost_nobody else membership.shard_of)
        for square in self._squares.values():
            for process in membership.shard_of:
                self._connections.send(process, square)
        if step == membership.step:
            self._tell_has(step)
        self._look_whether_complete()

    def _tell_has(self, step: int) -> None:
        """Tells all members what this process has of a step."""
        assert self._kept is not None
        membership = self._agreement.membership
        has = Has(membership.number, step, tuple(self._kept.replicas_of(step)))
        self._has[membership.number, self.rank] = has
        for process in membership.shard_of:
            self._connections.send(process, has)

    def _tell_change(self, text: str) -> None:
        """Logs how the job changes: as a warning on one process, as information on the others."""
        _log.log(logging.WARNING if self._is_first else logging.INFO, text)

    def _end_change(self) -> None:
        """Tells how long the parts of a change took, at the end of the first step after it."""
        times, self._times = self._times, {}
        ends = [times["noticed"], times["agreed"], times.get("joined", times["agreed"]), time.monotonic()]
        names = ("change_agreed_seconds", "change_joined_seconds", "change_trained_seconds")
        figures = {name: end - begin for name, begin, end in zip(names, ends, ends[1:], strict=False)}
        for tell in listeners_of(self._model):
            tell(figures)
        agreed, joined, trained = figures.values()
        self._tell_change(
            f"step {self.step} has ended {ends[-1] - ends[0]:.2f} s after the change was noticed: {agreed:.2f} s to "
            f"agree, {joined:.2f} s to form rows, {trained:.2f} s to train"
        )

    def _tell(self, kept: Kept, processes: Collection[int]) -> None:
        """Tells those of the other ``processes`` that have the same shard where gradients are."""
        assert self._kept is not None
        kept = kept._replace(number=self._agreement.membership.number)
        whole: Kept | None = None  # for those that cannot read the memory of this process
        for process in processes:
            if self._agreement.members[process] == self.shard and process != self.rank:
                is_near = self._connections.host_of.get(process) == kept.host
                whole = whole if is_near else whole or self._kept.with_data(kept)
                self._connections.send(process, kept if is_near else whole)

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        """Waits, with the lock, until a condition is true. Raises ElasticError if it can no longer become true."""
        with waiting(what, None):
            self._wait_for(condition, what)

    def _wait_for(self, condition: Callable[[], Any], what: str) -> None:
        agreement = self._agreement
        while not condition():
            if agreement.state is Stage.OUT and not self.is_joining:
                raise ElasticError(
                    f"process {self.rank} is no longer a member of the job: the others took it for lost, and go on "
                    f"without it. Start it again"
                )
            if agreement.goes_back:
                raise RepeatStep
            if agreement.lacks_shard:
                copies = ", ".join(f"step {step} of shard {shard}" for step, shard in sorted(agreement.copies))
                raise ElasticError(
                    f"no process is left that has shard {', '.join(map(str, agreement.lost_shards))} of "
                    f"{self.shards}: load the last checkpoint and start again. Processes "
                    f"{sorted({*agreement.members} - agreement.lost)} are left, and their copies are not enough "
                    f"to go on: process {self.rank} has {copies or 'none'}"
                )
            if self._has_waited_for_majority():
                raise ElasticError(
                    f"the processes that are left cannot agree on how to go on: no majority of the members answers "
                    f"process {self.rank}, which waited {PATIENCE:.0f} s for {what}. The others may have gone on "
                    f"without it. If none of them runs, start all again from the last checkpoint"
                )
            if self._error is not None:
                raise ElasticError(
                    f"process {self.rank} could not act on news of another one: {self._error}"
                ) from self._error
            # Members may have been busy with another change, and a change drops all that ask.
            if not self._changed.wait(0.5) and self.is_joining and not agreement.lacks_state:
                self._ask_to_be_member()

    def _find_row(self) -> Row:
        return next((row for row in self._agreement.membership.rows if self.rank in row), ())

    def _is_in_other_row(self, row: Row) -> bool:
        """Whether the membership has another row for this process than ``row``, or none."""
        return self._find_row() != row

    def _cut_row(self) -> None:
        """Ends the waits of training for processes of a row that is no more: some may be stopped, not ended."""
        if self._cut[0] != WAITS.count:
            self._cut = WAITS.count, time.monotonic()
        WAITS.judged = WAITS.count, "The membership of the job has changed"
        for connection, ends in connected_sockets():
            if ends in self._row_connections and not self._connections.owns(ends):  # one may have come meanwhile
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        groups, world = self._schedule.groups if self._schedule is not None else (), dist.group.WORLD
        if world not in (None, self._aborted) and not all(is_host(group.device) for group in groups):
            self._aborted = world
            threading.Thread(target=world.abort, daemon=True).start()  # NCCL waits on the device
