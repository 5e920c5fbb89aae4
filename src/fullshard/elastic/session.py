"""Training that goes on, with the same bits, when processes of the job end.

The front end of the package: how a process finds the others, what it runs in each step, and how it goes on after the
loss of another one. Owns the order in which things happen on one process. :mod:`fullshard.elastic.agreement` decides
who is a member and which steps count, :mod:`fullshard.elastic.gradients` keeps what was computed.

A row is a process group of its own, over which the engine shards as over all ranks of a smaller job; it knows nothing
of other rows. So a loss elsewhere leaves a row as it is, and a new row means a new process group.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fullshard.comm.backends import comes_from_backend
from fullshard.comm.collective import CollectiveTransport
from fullshard.comm.select import select_transport, simulated_transport
from fullshard.comm.waits import WAITS, PeerFailureError
from fullshard.elastic.agreement import KINDS, Agreement, Membership
from fullshard.elastic.connections import Connections, ask, host_address
from fullshard.elastic.gradients import Kept, KeptGradients
from fullshard.elastic.rows import Row, arrange, replicas_of, shard_for
from fullshard.elastic.state import load_state, pack_state
from fullshard.policies import expect
from fullshard.schedule.unit import schedule_of
from fullshard.torch_private import init_fake_group
from fullshard.watch.connections import connected_sockets

_log = logging.getLogger("fullshard")

_PATIENCE = 30.0  # seconds in which a change must be decided
_SILENCE = 30.0  # seconds after which a process that says nothing is taken for lost, unless the user says
_ANSWER = 5.0  # seconds in which a member must answer a new process
_AGAIN = 1.0  # seconds after which a change is proposed again
_MEETING = "fullshard/elastic"


class ElasticError(RuntimeError):
    """The job cannot go on with the processes that are left. The message says what they lack."""


class _RepeatStep(Exception):
    """The step begins again, perhaps from another state."""


class MicroBatch(NamedTuple):
    """A micro-batch that this process is to run, for one logical rank.

    Attributes:
        step: of the training, from 0.
        index: in the micro-batches of the logical rank in this step, from 0.
        rank: the logical rank, of ``size``.
    """

    step: int
    index: int
    rank: int
    size: int


class _Order(NamedTuple):
    """The first process of a row tells the others to run a logical replica."""

    row: Row
    step: int
    replica: int


class _Has(NamedTuple):
    """Which replicas' gradients a process has, when a membership begins."""

    number: int
    step: int
    replicas: tuple[int, ...]


class _Store(NamedTuple):
    """Where the processes of a row find each other."""

    row: Row
    number: int
    address: tuple[str, int]


class _Square(NamedTuple):
    """The sum of the squares of the gradients of a shard."""

    step: int
    shard: int
    total: float


class _Leaving(NamedTuple):
    """The sender ends, because its program does, not by an error."""


class _Welcome(NamedTuple):
    """What a new process is told: its number, its shard, and where the members are."""

    number: int
    shard: int
    size: int
    replicas: int
    seed: int
    addresses: dict[int, tuple[str, int]]
    stands_by: tuple[int, ...]  # members of its shard, those without a row first


class _Fetch(NamedTuple):
    """The sender needs the state of its shard, and the gradients of the steps that follow."""


class _State(NamedTuple):
    """The state of a shard before a step."""

    step: int
    data: bytes


class _Followed(NamedTuple):
    """The mean gradients of a shard in a step that counts, and the squares by which they were clipped."""

    step: int
    data: bytes
    present: tuple[bool, ...]
    squares: dict[int, float]


class _Candidate(NamedTuple):
    """The sender has made all steps that count, as far as it knows, and asks to be a member."""

    shard: int


class Elastic:
    """Trains a model over several replicas, and goes on when processes end: the parameters of every step are those of
    a run that nothing has disturbed, to the bit.

    ::

        elastic = fullshard.elastic.Elastic(replicas=2)      # in place of init_process_group
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        elastic.begin(model, optimizer, micro_batches=4)
        for step in elastic.steps(1000):
            with step:
                for micro_batch in step:
                    loss(model, data(micro_batch)).backward()
                step.clip_grad_norm_(1.0)
                optimizer.step()

    A job has as many *logical ranks* as processes when it begins: ``replicas`` times the number of shards. A replica is
    sharded over the processes of one row, and each shard lies on one process of each row. What is computed, the data and
    the random numbers belong to logical ranks. If a process ends, the rows that are whole also run the micro-batches of
    the others, one logical replica after another, and gradients are added in the order of the logical replicas. A process
    without a row stands by: it steps with the others, so that its shard lies on as many processes as possible.

    Args:
        replicas: how many logical replicas there are; a divisor of the number of processes. A shard outlives
            ``replicas - 1`` of its processes.
        seed: of the random numbers. Each micro-batch begins with a state of torch's generators and of :mod:`random`
            that depends on the seed, the step, the logical rank and the index only.
        directory: where members write down how to reach them, which all processes of the job see. A process that finds
            a member there joins the running job, whatever its launcher says. Without one, nobody can join.

    Attributes:
        rank: the number of this process, of ``size`` at the beginning.
        shard: which shard of the model this process has, of ``shards``.
        step: how many steps this process has made.
        has_left: whether this process was asked to leave, by :meth:`leave` or SIGTERM.

    Raises:
        ValueError: no launcher started the process, or ``replicas`` does not divide the number of processes.
        RuntimeError: a process group exists already.

    Ranks: all processes, first of all.
    """

    def __init__(self, *, replicas: int, seed: int = 0, directory: str | Path | None = None) -> None:
        expect(isinstance(replicas, int) and replicas > 0, "replicas", replicas, "a number of 1 or more", ValueError)
        if dist.is_initialized():
            raise RuntimeError("a process group exists already: make Elastic in place of calling init_process_group()")
        self.replicas, self.seed, self.step, self.has_left = replicas, seed, 0, False
        self._changed = threading.Condition(threading.RLock())
        self._row: Row = ()  # whose process group this process is in
        self._stores: dict[tuple[Row, int], tuple[str, int]] = {}
        self._orders: list[_Order] = []
        self._has: dict[tuple[int, int], _Has] = {}  # by the membership and the process
        self._squares: dict[tuple[int, int], float] = {}  # by the step and the shard
        self._ordered: set[tuple[int, int]] = set()  # steps and replicas that this row was told to run
        self._noticed: dict[int, float] = {}
        self._leaving: set[int] = set()
        self._early: list[Kept] = []
        self._kept: KeptGradients | None = None
        self._source = -1  # of the state of this process, until it is a member
        self._sources: tuple[int, ...] = ()
        self._states: list[_State] = []
        self._followed: dict[int, _Followed] = {}
        self._followers: set[int] = set()  # new processes that follow this one
        self._fetching: set[int] = set()
        self._last_number = 0  # of the processes that have ever been
        self._newcomer = 0.0  # when a process was welcomed that is no member yet
        self._directory = Path(directory) if directory is not None else None
        if (welcome := self._find_job()) is not None:
            self._join(*welcome)
        else:
            self._found()
        init_fake_group(self.shards, self.shard)
        self._until_begin = simulated_transport(lambda _: CollectiveTransport())
        self._until_begin.__enter__()
        with suppress(ValueError):  # not the main thread
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, lambda *_: self.leave())

    def _found(self) -> None:
        """Begins a job, with all processes of the launcher."""
        store, rank, size = next(iter(dist.rendezvous("env://")))  # type: ignore[no-untyped-call]
        replicas = self.replicas
        expect(size % replicas == 0, "replicas", replicas, f"a divisor of the number of processes, {size}", ValueError)
        self.rank, self.size, self.shards = rank, size, size // replicas
        self.shard, self._last_number = rank % self.shards, size - 1
        key = store_once(store, f"{_MEETING}/key", os.urandom(16).hex())
        self._connections = self._open(bytes.fromhex(key))
        store.set(f"{_MEETING}/{rank}", json.dumps(self._connections.address))
        found = {other: json.loads(store.get(f"{_MEETING}/{other}")) for other in range(size)}
        shard_of = {process: process % self.shards for process in range(size)}
        first = Membership(0, 0, tuple(shard_of.items()), arrange((), shard_of, self.shards, replicas))
        self._agreement = Agreement(rank, self.shards, replicas, first)
        missing = self._connections.connect({each: tuple(address) for each, address in found.items()}, 2 * _PATIENCE)
        if missing:
            raise ElasticError(f"processes {sorted(missing)} did not connect with process {rank}")
        self._publish()

    def _open(self, key: bytes) -> Connections:
        silence = float(os.environ.get("FULLSHARD_HANG_TIMEOUT", _SILENCE))
        heard = self._receive, self._lose, self._suspect
        return Connections(self.rank, key, host_address(), *heard, silence, self._welcome)

    def _publish(self) -> None:
        """Writes down where this member is, for processes that are to join."""
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
            path = self._directory / f"{self.rank}.json"
            said = json.dumps({"address": self._connections.address, "key": self._connections.key.hex()})
            with open(path, "w", opener=lambda name, flags: os.open(name, flags, 0o600), encoding="utf-8") as file:
                file.write(said)

    def _find_job(self) -> tuple[_Welcome, bytes] | None:
        """What the oldest member of a running job says, if there is one."""
        if self._directory is None:
            return None
        files = sorted(self._directory.glob("*.json"), key=lambda file: int(file.stem))
        for file in files:
            with suppress(OSError, EOFError, ValueError):
                said = json.loads(file.read_text(encoding="utf-8"))
                key = bytes.fromhex(said["key"])
                while (welcome := ask(tuple(said["address"]), key, _ANSWER)) is None:  # another one is joining
                    time.sleep(0.2)
                return welcome, key
        for file in files:
            file.unlink(missing_ok=True)
        return None

    def _welcome(self) -> _Welcome | None:
        """What a new process is told; ``None`` while another one is new."""
        with self._changed:
            now, agreement = time.monotonic(), self._agreement
            if now < self._newcomer + _PATIENCE or agreement.is_frozen:
                return None
            self._newcomer, self._last_number = now, self._last_number + 1
            shard = shard_for(agreement.members, self.shards)
            members = [process for process in agreement.members if process not in agreement.lost]
            twins = [process for process in members if agreement.members[process] == shard]
            in_rows = {process for row in agreement.membership.rows for process in row}
            twins.sort(key=lambda process: process in in_rows)
            known = {**self._connections.addresses, self.rank: self._connections.address}
            addresses = {process: known[process] for process in members}
            mine = self._last_number, shard, self.size, self.replicas, self.seed
            return _Welcome(*mine, addresses, tuple(twins))

    def _join(self, welcome: _Welcome, key: bytes) -> None:
        """Becomes a process of a running job, which is no member yet."""
        if welcome.replicas != self.replicas:
            raise ValueError(f"replicas is {self.replicas}, but the running job has {welcome.replicas}")
        self.seed, self._last_number, self._number = welcome.seed, welcome.number, -1
        self.rank, self.shard, self.size = welcome.number, welcome.shard, welcome.size
        self.shards, self._sources = welcome.size // welcome.replicas, welcome.stands_by
        self._agreement = Agreement(self.rank, self.shards, self.replicas)
        self._connections = self._open(key)
        for process in self._connections.connect(welcome.addresses, _ANSWER):
            self._agreement.suspect(process)  # it has ended meanwhile, or is stopped

    def begin(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        micro_batches: int = 1,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Names what is trained. Called once, after the optimizer was made.

        Args:
            model: sharded by ``fully_shard`` without a mesh, alike on all processes, with the same values in each
                replica.
            optimizer: of its parameters.
            micro_batches: how many each logical rank runs in a step.
            state: what else a new process must get, by name: objects with ``state_dict()`` and ``load_state_dict()``,
                such as a learning-rate scheduler. They hold tensors and plain values only.
        """
        expect(isinstance(micro_batches, int) and micro_batches > 0, "micro_batches", micro_batches, "1 or more")
        self._model, self._optimizer, self.micro_batches = model, optimizer, micro_batches
        self._schedule = schedule_of(model, "elastic.begin()")
        params = [param for param in model.parameters() if param.requires_grad]
        with self._changed:
            self._kept = KeptGradients(params, [*model.buffers()], self.replicas)
            early, self._early = self._early, []
            for kept in early:
                self._add(kept)
        self._steps_before, self._state = 0, state or {}
        self._leave_row()  # collectives would do nothing
        self._until_begin.__exit__(None, None, None)
        if self.is_joining:
            self._fetch()
        optimizer.register_step_post_hook(self._note_step)

    def steps(self, number: int) -> Iterator[Step]:
        """The steps until this process has made ``number``; one is given again if it has to be repeated. Use each as a
        context."""
        if self._kept is None:
            raise RuntimeError("elastic.begin(model, optimizer) must be called before elastic.steps()")
        while self.step < number and not self.has_left:
            self._serve_newcomers()
            if self._has_lost_source():
                self._fetch()
            step = Step(self, self.step)
            yield step
            if not step.was_left:
                raise RuntimeError(f"step {self.step} was not used as a context: write `with step:` around its body")

    @property
    def is_joining(self) -> bool:
        """Whether this process has not been a member yet."""
        return self._agreement.membership.number < 0

    def leave(self) -> None:
        """Lets :meth:`steps` end after the step that runs. May be called in a signal handler."""
        self.has_left = True

    def close(self) -> None:
        """Ends the part of this process in the job. The others go on."""
        if self._directory is not None:
            (self._directory / f"{self.rank}.json").unlink(missing_ok=True)
        with self._changed:
            for process in self._agreement.members:
                self._connections.send(process, _Leaving())
        self._connections.close()
        self._leave_row()

    # -- new processes -------------------------------------------------------------------------------------------------

    def _fetch(self) -> None:
        """Gets the state of this process's shard from a member that has it."""
        with self._changed:
            left = [each for each in self._sources if each not in self._agreement.lost]
            if not left:
                raise ElasticError(f"no member is left that has shard {self.shard}, which this process was to get")
            self._source = left[0]
            self._states.clear()
            self._followed.clear()
            self._connections.send(self._source, _Fetch())
            lost = self._agreement.lost
            self.wait_for(lambda: self._states or self._source in lost, "the state of its shard")
            states = [*self._states]
        if not states:
            self._fetch()
            return
        assert self._kept is not None
        load_state(states[0].data, self._model, self._optimizer, self._state)
        self._kept.note_buffers()
        self.step = states[0].step
        with self._changed:
            self._agreement.follow(self.step)
            self._ask_to_be_member()

    def _has_lost_source(self) -> bool:
        """Whether the process that this one follows has ended. Raises ElasticError if only that one could help."""
        if self._source not in self._agreement.lost or self.step in self._followed:
            return False
        if not self.is_joining and self.step < self._first:
            raise ElasticError(f"process {self._source} has ended before process {self.rank} had its state: start again")
        return self.is_joining

    def _drop_followers(self) -> None:
        """Forgets followers that are members, and have been sent all that came before."""
        if self.step >= self._agreement.membership.step:
            self._followers.difference_update(self._agreement.members)

    def _counts(self, step: int) -> bool:
        """Whether a step counts, and its gradients are here."""
        return step in self._followed or (self._agreement.step > step >= self._first)

    def _ask_to_be_member(self) -> None:
        if self.is_joining and self.step not in self._followed:
            for process in self._connections.addresses:
                self._connections.send(process, _Candidate(self.shard))

    def _serve_newcomers(self) -> None:
        """Sends the state of this process's shard to new processes that have asked for it. Called between steps."""
        with self._changed:
            fetching, self._fetching = self._fetching, set()
            self._followers |= fetching
        if fetching:
            state = _State(self.step, pack_state(self._model, self._optimizer, self._state))
            for process in fetching:
                self._connections.send(process, state)

    # -- messages ------------------------------------------------------------------------------------------------------

    def _receive(self, sender: int, message: Any) -> None:
        """Reads a message of another process, in a thread beside training."""
        with self._changed:
            if isinstance(message, KINDS):
                self._agreement.receive(sender, message)
                self._after_agreement()
            elif isinstance(message, Kept):
                self._add(message)
            elif isinstance(message, _Order):
                self._orders.append(message)
            elif isinstance(message, _Has):
                self._has[message.number, sender] = message
            elif isinstance(message, _Store):
                self._stores[message.row, message.number] = message.address
            elif isinstance(message, _Square):
                self._squares[message.step, message.shard] = message.total
            elif isinstance(message, _Leaving):
                self._leaving.add(sender)
            elif isinstance(message, _Fetch):
                self._last_number = max(self._last_number, sender)
                self._fetching.add(sender)
            elif isinstance(message, _State):
                self._states.append(message)
            elif isinstance(message, _Followed):
                self._followed[message.step] = message
                self._squares.update({(message.step, shard): total for shard, total in message.squares.items()})
            elif isinstance(message, _Candidate):
                self._last_number = max(self._last_number, sender)
                if sender not in self._agreement.members:
                    self._agreement.candidates[sender] = message.shard
                    self._agreement.consider()
                    self._after_agreement()
            self._changed.notify_all()

    def _lose(self, process: int) -> None:
        with self._changed:
            if process not in self._leaving:
                _log.warning(f"process {process} of the job has ended")
            self._noticed[process] = time.monotonic()
            if process not in self._agreement.members:
                self._newcomer = 0.0
            self._followers.discard(process)
            self._fetching.discard(process)
            self._agreement.lose(process)
            self._after_agreement()
            self._changed.notify_all()

    def _suspect(self, process: int, is_silent: bool) -> None:
        with self._changed:
            if is_silent:
                _log.warning(f"process {process} of the job is silent: it is stopped, or the network is cut")
            self._noticed[process] = time.monotonic()
            self._agreement.suspect(process, is_silent)
            self._after_agreement()
            self._changed.notify_all()

    def _add(self, kept: Kept) -> None:
        if self._kept is None:
            self._early.append(kept)
        elif kept.step >= self.step:
            self._kept.add(kept)
            self._look_whether_complete()

    def _look_whether_complete(self) -> None:
        assert self._kept is not None
        # Not before this process has made the step before: others may write to its gradients once this one is complete.
        if self.step == self._agreement.step and self._kept.has_all(self.step):
            self._agreement.complete()
            self._after_agreement()

    _row_connections: Collection[tuple[str, str]] = ()  # of the backend between the processes of the row
    _first = 0  # the step from which on this process is a member
    _number = 0  # of the membership that this process has acted on
    _mean: tuple[bytes, tuple[bool, ...]] | None = None  # of the step that ends, for those that follow

    def _after_agreement(self) -> None:
        """Sends what the agreement wants to send. If there is a new membership, tells what this process has."""
        outbox, self._agreement.outbox = self._agreement.outbox, []
        for receiver, message in outbox:
            self._connections.send(receiver, message)
        membership = self._agreement.membership
        if self._number == membership.number:
            return
        self._number = membership.number
        if membership.joined:
            self._newcomer = 0.0
            self._drop_followers()
        if self.rank in membership.joined:
            self._first = membership.step
            self._publish()
        if self._row and self._find_row() != self._row:
            self._cut_row()
        took = max((time.monotonic() - when for when in self._noticed.values()), default=0.0)
        self._noticed.clear()
        is_first = next(iter(membership.shard_of), -1) == self.rank
        _log.log(
            logging.WARNING if is_first else logging.INFO,
            f"membership {membership.number}, from step {membership.step} on: processes {[*membership.shard_of]} in rows "
            f"{[*membership.rows]}, agreed {took:.2f} s after the change was noticed",
        )
        if self._kept is not None and self.rank in membership.shard_of:
            step = self._agreement.step
            for kept in self._kept.tell_again(step):
                self._tell(kept)
            if step == membership.step:
                has = _Has(membership.number, step, tuple(self._kept.replicas_of(step)))
                self._has[membership.number, self.rank] = has
                for process in membership.shard_of:
                    self._connections.send(process, has)
            self._look_whether_complete()

    def _tell(self, kept: Kept) -> None:
        """Tells the other processes of the shard where gradients are."""
        assert self._kept is not None
        for process, shard in self._agreement.members.items():
            if shard == self.shard and process != self.rank:
                self._connections.send(process, kept)

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        """Waits until a condition holds, with the lock. Raises ElasticError if nothing can make it true any more."""
        frozen_since, agreement = 0.0, self._agreement
        while not condition():
            if self.rank not in agreement.members and not self.is_joining:
                raise ElasticError(
                    f"process {self.rank} is no longer a member of the job: the others took it for lost, and go on "
                    f"without it. Start it again"
                )
            if agreement.has_lost_shards:
                raise ElasticError(
                    f"no process is left that has shard {', '.join(map(str, agreement.has_lost_shards))} of "
                    f"{self.shards}: load the last checkpoint and start again. Left are processes "
                    f"{sorted({*agreement.members} - agreement.lost)}"
                )
            now = time.monotonic()
            frozen_since = (frozen_since or now) if agreement.is_frozen else 0.0
            if frozen_since and now - frozen_since > _PATIENCE:
                raise ElasticError(
                    f"the processes that are left cannot agree on how to go on: fewer than half of the members answer "
                    f"process {self.rank}, which waited {_PATIENCE:.0f} s for {what}"
                )
            if frozen_since and now - frozen_since > _AGAIN:
                agreement.consider(again=True)
                self._after_agreement()
            self._changed.wait(0.5)

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _find_row(self) -> Row:
        return next((row for row in self._agreement.membership.rows if self.rank in row), ())

    def follow_membership(self) -> None:
        """Makes the process group of the row that this process is in now, if that has changed."""
        while (row := self._find_row()) != self._row:
            self._leave_row()
            if not row:
                return
            with suppress(RuntimeError):  # a process of the row has ended meanwhile: the next membership says so
                self._enter_row(row)
                self._row = row
                return
            with self._changed:
                self.wait_for(lambda before=row: self._find_row() != before, "a membership without a lost process")

    def _leave_row(self) -> None:
        self._row = ()
        with self._changed:
            self._orders.clear()
            self._ordered.clear()
        if dist.is_initialized():
            if getattr(self, "_schedule", None) is not None:
                self._schedule.reset()
            with suppress(Exception):
                dist.destroy_process_group()

    def _cut_row(self) -> None:
        """Ends the waits of training for processes of a row that is no more: some may be stopped, not ended."""
        WAITS.judged = WAITS.count, "The membership of the job has changed"
        for connection, ends in connected_sockets():
            if ends in self._row_connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _enter_row(self, row: Row) -> None:
        number, timeout = self._agreement.membership.number, timedelta(seconds=_PATIENCE)
        if row[0] == self.rank:
            host = self._connections.address[0]
            store = dist.TCPStore(host, 0, self.shards, is_master=True, wait_for_workers=False, timeout=timeout)
            for process in row[1:]:
                self._connections.send(process, _Store(row, number, (host, store.port)))
        else:
            lost, stores = self._agreement.lost, self._stores
            with self._changed:
                self.wait_for(lambda: lost.intersection(row) or any(key[0] == row for key in stores), "its row")
                found = [key for key in stores if key[0] == row]
                if not found:
                    raise RuntimeError(f"a process of row {row} has ended")
                host, port = stores[max(found)]
            store = dist.TCPStore(host, port, self.shards, is_master=False, timeout=timeout)
        before = {ends for _, ends in connected_sockets()}
        dist.init_process_group("gloo", store=store, rank=self.shard, world_size=self.shards)
        self._row_connections = {ends for _, ends in connected_sockets()} - before
        self._use_process_group(dist.group.WORLD)

    def _use_process_group(self, process_group: Any) -> None:
        """Lets the model shard over another process group of the same size."""
        schedule, is_first = self._schedule, self._number == 0
        checks = schedule.checks if is_first else []
        for group in schedule.groups:
            transport = select_transport(process_group, group.device)
            group.data.shard_group = group.reduce_process_group = process_group
            group.may_share = True
            group.first_values = group.first_values if is_first else None
            group.reduce_transport = transport
            group.use_transport(transport)
        schedule.begin_over(process_group, self.step)
        schedule.checks = checks

    # -- what to run ---------------------------------------------------------------------------------------------------

    def next_replica(self, step: int) -> int | None:
        """The logical replica whose micro-batches this process runs next; ``None`` once the step counts. Waits."""
        found: list[int] = []

        def is_known() -> bool:
            if self._find_row() != self._row:
                return True
            if self._row and self._row[0] == self.rank:
                self._give_order(step)
            orders = [order for order in self._orders if (order.row, order.step) == (self._row, step)]
            if orders:
                self._orders.remove(orders[0])
                found.append(orders[0].replica)
            if self._has_lost_source():
                raise _RepeatStep
            return bool(found) or self._counts(step)

        while True:
            self.follow_membership()
            with self._changed:
                self.wait_for(is_known, f"the gradients of step {step}")
                if found:
                    return found[0]
                if self._counts(step):
                    return None

    def _give_order(self, step: int) -> None:
        """Tells the processes of this row which logical replicas to run, if that is not done."""
        membership, row, kept = self._agreement.membership, self._row, self._kept
        assert kept is not None
        if self._agreement.step != step or self._agreement.is_frozen:
            return
        mine = replicas_of(membership.rows.index(row), len(membership.rows), self.replicas)
        everywhere: set[int] = set()
        if membership.number and membership.step == step:
            said = [self._has.get((membership.number, process)) for process in row]
            if any(each is None for each in said):
                return
            everywhere = set.intersection(*[{*each.replicas} for each in said if each is not None])
        for replica in mine:
            if replica not in everywhere and (step, replica) not in self._ordered:
                self._ordered.add((step, replica))
                order = _Order(row, step, replica)
                self._orders.append(order)
                for process in row[1:]:
                    self._connections.send(process, order)

    def run(self, step: int, replica: int) -> Iterator[MicroBatch]:
        """The micro-batches of a logical replica, whose gradients are kept after the last one."""
        kept = self._kept
        assert kept is not None
        kept.begin()
        rank = replica * self.shards + self.shard
        for index in range(self.micro_batches):
            self._seed(step, rank, index)
            yield MicroBatch(step, index, rank, self.size)
        with self._changed:
            self._tell(kept.keep(step, replica))
            self._look_whether_complete()

    def _seed(self, *of: int) -> None:
        number = random.Random(repr((self.seed, *of))).getrandbits(63)
        torch.manual_seed(number)
        random.seed(number)

    def norm(self, step: int, square: float) -> float:
        """The norm of all gradients, from the sum of the squares of this shard's."""
        with self._changed:
            self._squares[step, self.shard] = square
            for process in self._agreement.members:
                self._connections.send(process, _Square(step, self.shard, square))
            squares = self._squares
            self.wait_for(lambda: all((step, shard) in squares for shard in range(self.shards)), "norms of gradients")
            return float(sum(squares[step, shard] for shard in range(self.shards))) ** 0.5

    # -- ends of steps -------------------------------------------------------------------------------------------------

    def _note_step(self, *_: Any) -> None:
        self._steps_before += 1

    def end_step(self, step: int, steps_before: int) -> None:
        if self._steps_before == steps_before:
            raise RuntimeError(f"the optimizer made no step in step {step}: call optimizer.step() at the end of its body")
        with self._changed:
            assert self._kept is not None
            for process in self._followers if self._mean is not None else ():
                squares = {shard: total for (of, shard), total in self._squares.items() if of == step}
                self._connections.send(process, _Followed(step, *self._mean, squares))
            self.step = step + 1
            self._drop_followers()
            self._followed.pop(step, None)
            if self.is_joining:
                self._agreement.follow(self.step)
                self._ask_to_be_member()
            self._kept.forget(step)
            self._squares = {key: value for key, value in self._squares.items() if key[0] > step}
            self._look_whether_complete()

    def show_gradients(self, step: int) -> None:
        """Sets ``param.grad`` to the mean over the logical replicas."""
        kept = self._kept
        assert kept is not None
        if (followed := self._followed.get(step)) is not None:
            kept.show_packed(followed.data, followed.present)
        else:
            kept.show_mean(step)
        self._mean = kept.pack_mean() if self._followers else None

    def survives(self, error: BaseException, has_stepped: bool) -> bool:
        """Whether an error in a step is that of a lost process, without which the job goes on."""
        if isinstance(error, _RepeatStep):
            return True
        is_loss = isinstance(error, PeerFailureError) or (isinstance(error, RuntimeError) and comes_from_backend(error))
        if not is_loss or has_stepped:
            return False
        row, deadline = self._row, time.monotonic() + _PATIENCE
        with self._changed:
            self.wait_for(lambda: self._find_row() != row or time.monotonic() > deadline, "news of a lost process")
        if self._find_row() == row:
            return False
        self._leave_row()
        return True


class Step:
    """A step of :meth:`Elastic.steps`: a context, and the micro-batches that this process runs in it.

    Attributes:
        number: of the step, from 0.
    """

    def __init__(self, elastic: Elastic, number: int) -> None:
        self._elastic, self.number = elastic, number
        self._steps_before = elastic._steps_before
        self._has_gradients = self.was_left = False

    def __iter__(self) -> Iterator[MicroBatch]:
        elastic = self._elastic
        while (replica := elastic.next_replica(self.number)) is not None:
            yield from elastic.run(self.number, replica)
        elastic.show_gradients(self.number)
        self._has_gradients = True

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.was_left = True
        elastic = self._elastic
        if error is not None:
            return elastic.survives(error, elastic._steps_before > self._steps_before)
        if not self._has_gradients:
            raise RuntimeError(f"step {self.number} ended before its micro-batches did: run all of them")
        elastic.end_step(self.number, self._steps_before)
        return False

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scales the gradients so that their norm over all shards is at most ``max_norm``, in place. Returns the norm
        before. Called after the micro-batches, on every process: also one that stands by, which has no process group."""
        grads = [grad for param in self._elastic._model.parameters() if (grad := param.grad) is not None]
        parts = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
        norm = self._elastic.norm(self.number, sum(float(part.double().square().sum()) for part in parts))
        if norm > max_norm:
            for part in parts:
                part.mul_(max_norm / (norm + 1e-6))
        return norm


def store_once(store: Any, key: str, value: str) -> str:
    """The value of a key, which is ``value`` if there was none."""
    return bytes(store.compare_set(key, "", value)).decode()

