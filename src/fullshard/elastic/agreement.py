"""What the processes of an elastic job agree on: who is a member, which step runs, and whether it counts.

Owns the protocol, and nothing that communicates: messages and news of lost processes come in, messages go out. So the
tests explore it exhaustively. A process is in one of four states, and :data:`TABLE` says which messages it answers::

            all gradients are there             every member has said so: the step counts
    RUNNING ───────────────────────▶ COMPLETE ───────────────────────────────────────────▶ RUNNING, the next step
       │                                │
       └──────── a change is proposed ──┴─▶ FROZEN ── it is decided ──▶ RUNNING under the new membership, or OUT

*A step counts or is repeated.* Parameters change only when every member has said that it has all gradients. Members
that agreed to a proposal say nothing any more under the old membership. So if one of them lacks gradients, the step
counted nowhere, and is repeated. If none does, it may have counted somewhere, and everyone that is left can finish it.

*Memberships are decided one after another*, each by single-decree Paxos (Lamport, "Paxos Made Simple", 2001) among the
members before. A quorum is a majority of them; or all that are left, if these are half of them, or each of these has
read the last message of every other one. The other half is no majority without one of these. If their last messages
were read, nobody who knows of a different decision is left, nor is a message on its way. The last message of a process
that cannot have decided anything counts as read.

*No two members step with different replicas*, if the first member chooses which ones take part. It chooses once for
each step under a membership, so all that are complete under it are complete with the same replicas. A step that did not
count before a new membership is chosen anew under it, and nobody stays complete.

*A membership that lacks a shard goes back* to a step of which copies are left (:mod:`fullshard.elastic.copies`), and
waits there for a new process. Those that decide are frozen, so no member makes a step of the old future any more. What
was sent before such a membership is void.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from fullshard.elastic.copies import find_way_back
from fullshard.elastic.rows import Row, arrange, missing_shards

Ballot = tuple[int, int]  # a round, and the process that proposes


class Membership(NamedTuple):
    """The members of a job, their shards and their rows. It is valid from a step on."""

    number: int  # of memberships before this one
    step: int  # the step that runs first; all steps before it count, and no other
    shards: tuple[tuple[int, int], ...]  # each member and its shard, the oldest member first
    rows: tuple[Row, ...]
    joined: tuple[int, ...] = ()  # members that were none before
    back: int = 0  # the number of the last membership that went back to an earlier step
    holders: tuple[tuple[int, int], ...] = ()  # each shard that no member has, and the member that has its copy

    @property
    def shard_of(self) -> dict[int, int]:
        return dict(self.shards)


class Stage(Enum):
    """Where a process is in a step."""

    RUNNING = "computes gradients, or waits for those of others"
    COMPLETE = "has the gradients of all replicas for its shard"
    FROZEN = "has agreed to a proposal"
    OUT = "is no member, or not yet"


class Complete(NamedTuple):
    """The sender has all gradients of a step for its shard."""

    number: int
    step: int


class Chosen(NamedTuple):
    """The sender, the first member, has chosen which replicas take part in a step."""

    number: int
    step: int
    replicas: tuple[Any, ...]


class Prepare(NamedTuple):
    """The sender wants to change the membership ``number``."""

    number: int
    ballot: Ballot
    lost: frozenset[int] = frozenset()  # members that have ended, as the sender knows


class Promise(NamedTuple):
    """The sender takes part in no older proposal, nor in a step, until a membership is decided."""

    number: int
    ballot: Ballot
    accepted: tuple[Ballot, Membership] | None
    step: int
    is_complete: bool
    read: frozenset[int]  # processes that have ended, and whose last message the sender has read
    copies: frozenset[tuple[int, int]] = frozenset()  # the steps and shards of which the sender has copies
    is_done: bool = False  # as in the agreement of the sender


class Accept(NamedTuple):
    number: int
    ballot: Ballot
    value: Membership


class Accepted(NamedTuple):
    number: int
    ballot: Ballot
    read: frozenset[int]


class Refused(NamedTuple):
    """The sender takes part in a newer proposal."""

    number: int
    ballot: Ballot


class Decided(NamedTuple):
    """A membership follows ``number``."""

    number: int
    value: Membership


Message = Complete | Chosen | Prepare | Promise | Accept | Accepted | Refused | Decided
KINDS: tuple[type[Any], ...] = (Complete, Chosen, Prepare, Promise, Accept, Accepted, Refused, Decided)


class _Proposal:
    """A proposal of this process, and who has agreed."""

    def __init__(self, ballot: Ballot) -> None:
        self.ballot = ballot
        self.promises: dict[int, Promise] = {}
        self.value: Membership | None = None
        self.accepts: dict[int, frozenset[int]] = {}


class Agreement:
    """The part of one process.

    Attributes:
        step: the step that runs: all steps before it count here.
        candidates: processes that are no members and ask to be, with their shards.
        followers: those of them to which a member sends the gradients of each step.
        chosen: the replicas that take part in a step, if they are chosen.
        copies: of states, by the step and the shard. None may be dropped while this process is frozen.
        lacks_state: whether this new process waits for a state, so that it cannot become a member.
        goes_back: whether this process has yet to load its copy of ``step``.
        is_done: whether a process has made as many steps as this one is to make, and left; in rounds also if it has not
            left. They all count, and the job does not go back.
        outbox: messages to send, each with its receiver, in this order.
    """

    def __init__(self, me: int, shards: int, replicas: int, membership: Membership | None = None) -> None:
        self.me, self._shards, self._replicas = me, shards, replicas
        self.membership = membership or Membership(-1, 0, (), ())
        self.row_from = dict.fromkeys(self.membership.rows, self.membership.step)  # the step from which on each is one
        self.state = Stage.RUNNING if me in self.membership.shard_of else Stage.OUT
        self.step = self.membership.step
        self.lost: set[int] = set()
        self.unread: set[int] = set()  # of these, those that may have decided what never came here
        self.suspected: set[int] = set()
        self.hanging: set[int] = set()  # of these, those that answer and yet do not train
        self.candidates: dict[int, int] = {}
        self.followers: set[int] = set()
        self.chosen: dict[int, tuple[Any, ...]] = {}
        self.copies: dict[tuple[int, int], Any] = {}
        self.lacks_state = self.goes_back = self.is_done = False
        self.outbox: list[tuple[int, Message]] = []
        self._is_complete = False  # whether all gradients of this step are there
        self._said: dict[int, set[int]] = {}  # which members are complete, by the step
        self._promised: Ballot = (0, -1)
        self._voters_of: dict[int, frozenset[int]] = {}  # by proposer: the members that may have accepted its proposal
        self._accepted: tuple[Ballot, Membership] | None = None
        self._proposal: _Proposal | None = None
        self._answered: tuple[int, Promise | Accepted] | None = None  # what this process said last to a proposal
        self._told: dict[int, Membership] = {}  # what a new process was told, and by whom
        self._early: list[tuple[int, Message]] = []  # messages about a membership of which it was told

    @property
    def members(self) -> dict[int, int]:
        return self.membership.shard_of

    @property
    def lost_shards(self) -> list[int]:
        """The shards that no member has any more. A step that counts already can still be made without them."""
        return missing_shards(self.members, self._shards) if self.members else []

    @property
    def lacks_shard(self) -> bool:
        """Whether no member has a shard, nor a copy of it: the job cannot go on."""
        return bool(self.lost_shards) and not self.membership.holders

    @property
    def is_oldest(self) -> bool:
        """Whether this process is the oldest member."""
        return next(iter(self.members), -1) == self.me

    @property
    def _is_done(self) -> bool:
        return self.is_done and not self.goes_back

    @property
    def is_frozen(self) -> bool:
        return self.state is Stage.FROZEN

    # -- steps ---------------------------------------------------------------------------------------------------------

    def complete(self) -> None:
        """All gradients of the step that runs are there."""
        self._is_complete = True
        if self.state is Stage.RUNNING:
            self.state = Stage.COMPLETE
            self._send(self.members, Complete(self.membership.number, self.step))
            self._note_complete(self.me, self.step)

    def choose(self, replicas: tuple[Any, ...]) -> None:
        """Chooses which replicas take part in the step that runs, once. Does so on the first member only."""
        if self.state is Stage.RUNNING and self.is_oldest and self.step not in self.chosen:
            self.chosen[self.step] = replicas
            self._send(self.members, Chosen(self.membership.number, self.step, replicas))

    def follow(self, step: int) -> None:
        """This process, which is not a member, has made the steps of the members, and ``step`` runs now."""
        self.step, self._is_complete = step, False

    def _note_complete(self, process: int, step: int) -> None:
        self._said.setdefault(step, set()).add(process)
        if self.state is Stage.COMPLETE and self._said.get(self.step, set()).issuperset(self.members):
            del self._said[self.step]
            self.step, self.state, self._is_complete = self.step + 1, Stage.RUNNING, False

    # -- news ----------------------------------------------------------------------------------------------------------

    @property
    def _read(self) -> frozenset[int]:
        return frozenset(self.lost - self.unread)

    def lose(self, process: int, is_read: bool = True, has_trusted: bool = True) -> None:
        """A process has ended. ``is_read``: its last message was read. ``has_trusted``: it surely never suspected this
        one. Then it can have decided only what it proposed with a promise of this one, and what a majority accepted of
        members that were alive."""
        self.lost.add(process)
        if not is_read and (not has_trusted or 2 * len(self._voters_of.get(process, ())) > len(self.members)):
            self.unread.add(process)
        self.candidates.pop(process, None)
        self._activate()
        if self.is_frozen and self._answered is not None:  # a quorum counts only processes that know this
            receiver, said = self._answered
            self._answer(receiver, said._replace(read=self._read))
        self.consider()

    def suspect(self, process: int, is_suspect: bool = True, hangs: bool = False) -> None:
        """A process does not answer, perhaps because it is stopped or the network is cut; or it ``hangs``; or it
        answers again (``is_suspect=False``)."""
        (self.suspected.add if is_suspect else self.suspected.discard)(process)
        (self.hanging.add if hangs else self.hanging.discard)(process)
        self.consider()

    def receive(self, sender: int, message: Message) -> None:
        """Reads a message."""
        told = max(self._told.values(), default=self.membership)
        if self._told and self.me in told.joined and message.number >= told.number and not isinstance(message, Decided):
            self._early.append((sender, message))
            return
        if message.number < self.membership.number and not isinstance(message, Decided):
            if isinstance(message, Prepare | Accept) and self.membership.number >= 0:
                self._send([sender], Decided(self.membership.number - 1, self.membership))
            return
        if (answer := TABLE.get((self.state, type(message)))) is not None:
            answer(self, sender, message)

    # -- proposals -----------------------------------------------------------------------------------------------------

    def consider(self, again: bool = False) -> None:
        """Proposes a change if there is reason, and this process is the first of those that answer; ``again`` with a
        newer ballot, because nothing has been decided for long."""
        if self.state is Stage.OUT:
            return
        gone = self.lost | self.suspected
        if not (gone.intersection(self.members) or self.candidates or self.is_frozen):
            return
        proposer = self._promised[1]
        others_turn = self.is_frozen and proposer != self.me and proposer not in gone
        if next((each for each in self.members if each not in gone), None) != self.me or (others_turn and not again):
            return
        if self._proposal is None or again:
            ballot = (self._promised[0] + 1, self.me)
            self._proposal = _Proposal(ballot)
            message = Prepare(self.membership.number, ballot, frozenset(self.lost.intersection(self.members)))
            self._send([*self.members, *self.candidates], message)
            self.receive(self.me, message)
        else:
            self._go_on()

    def _answer_prepare(self, sender: int, message: Prepare) -> None:
        if message.ballot < self._promised:
            self._send([sender], Refused(message.number, self._promised))
            return
        self._promised, self.state = message.ballot, Stage.FROZEN
        self._voters_of.setdefault(sender, frozenset(self.members) - self.lost - message.lost - {self.me})
        self._promise(sender, message, self._accepted)

    def _promise_as_candidate(self, sender: int, message: Prepare) -> None:
        self._promise(sender, message, None)

    def _promise(self, sender: int, message: Prepare, accepted: tuple[Ballot, Membership] | None) -> None:
        step = -2 if self.lacks_state and self.state is Stage.OUT else self.step  # two steps behind, at least
        state = step, self._is_complete, self._read, frozenset(self.copies), self._is_done
        self._answer(sender, Promise(message.number, message.ballot, accepted, *state))

    def _note_promise(self, sender: int, message: Promise) -> None:
        proposal = self._proposal
        if proposal is not None and proposal.ballot == message.ballot and proposal.value is None:
            proposal.promises[sender] = message
            self.suspected -= {sender} - self.hanging  # it answers: a further change would leave nobody out
            self._go_on()

    def _go_on(self) -> None:
        """Goes on with the proposal of this process, as far as enough members have agreed."""
        proposal = self._proposal
        assert proposal is not None
        if proposal.value is None:
            promises = proposal.promises
            awaited = {*self.members, *self.candidates} - self.lost - self.suspected - promises.keys()
            if awaited or not self._is_quorum({process: each.read for process, each in promises.items()}):
                return
            proposal.value = value = self._choose(promises)
            message = Accept(self.membership.number, proposal.ballot, value)
            self._send(self.members, message)
            self.receive(self.me, message)
        elif self._is_quorum(proposal.accepts):
            self.receive(self.me, Decided(self.membership.number, proposal.value))

    def _choose(self, promises: Mapping[int, Promise]) -> Membership:
        """The membership to propose: what may have been decided already, or else the next one."""
        before = [each.accepted for each in promises.values() if each.accepted is not None]
        if before:
            return max(before)[1]
        old = {process: promises[process] for process in self.members if process in promises}
        step = max(each.step for each in old.values())
        step += all(each.step == step and each.is_complete for each in old.values())
        members = {process: self.members[process] for process in old if process not in self.hanging}
        joined = {}
        for process, shard in self.candidates.items():
            behind = step - promises[process].step if process in promises else -1
            is_sent = process in self.followers and shard in members.values()  # the gradients of the last step
            if behind == 0 or (behind == 1 and is_sent):
                joined[process] = shard
        number, back, holders = self.membership.number + 1, self.membership.back, tuple[tuple[int, int], ...]()
        is_done = self._is_done or any(each.is_done for each in old.values())
        if missing_shards(members | joined, self._shards) and not is_done:
            copies, lost = {each: old[each].copies for each in old}, missing_shards(members, self._shards)
            if (found := find_way_back(step, members, lost, copies)) is not None:
                if found[0] < step:  # candidates go back later, as they are not frozen
                    back, joined = number, {}
                step, holders = found
        everyone = members | joined
        holders = tuple(each for each in holders if each[0] not in everyone.values())
        rows = arrange(self.membership.rows, everyone, self._shards, self._replicas)
        return Membership(number, step, tuple(everyone.items()), rows, tuple(joined), back, holders)

    def _answer_accept(self, sender: int, message: Accept) -> None:
        if message.ballot < self._promised:
            self._send([sender], Refused(message.number, self._promised))
            return
        self._promised, self._accepted, self.state = message.ballot, (message.ballot, message.value), Stage.FROZEN
        self._voters_of[sender] = self._voters_of.get(sender, frozenset(self.members)) | {self.me}
        self._answer(sender, Accepted(message.number, message.ballot, self._read))

    def _note_accepted(self, sender: int, message: Accepted) -> None:
        proposal = self._proposal
        if proposal is not None and proposal.ballot == message.ballot and proposal.value is not None:
            proposal.accepts[sender] = message.read
            self._go_on()

    def _note_refused(self, sender: int, message: Refused) -> None:
        if self._proposal is not None and self._proposal.ballot < message.ballot:
            self._proposal, self._promised = None, max(self._promised, message.ballot)
            self.consider()

    def _is_quorum(self, voters: Mapping[int, Iterable[int]]) -> bool:
        """Whether the voters are a majority of the members. Or they are all members that are left, and half of them, or
        each of them has read the last message of every member that is lost."""
        agreed = [process for process in self.members if process in voters]
        if 2 * len(agreed) > len(self.members):
            return True
        left = {*self.members}.difference(agreed)
        if not agreed or not left <= self.lost:
            return False
        return len(agreed) == len(left) or all(left <= {*voters[process]} for process in agreed)

    # -- decisions -----------------------------------------------------------------------------------------------------

    def _install(self, sender: int, message: Decided) -> None:
        """Adopts a new membership, and sends it to the old and the new members."""
        value = message.value
        if value.number <= self.membership.number:
            return
        before, mine = self.members, self._is_complete
        self._send(before.keys() | value.shard_of.keys(), message)
        has_stepped, is_chosen = value.step > self.step, self.step in self.chosen
        self.chosen = {step: replicas for step, replicas in self.chosen.items() if step < value.step}
        self.candidates.clear()  # those that are not among the members ask again
        self.followers.clear()
        may_step = mine or self.me in value.joined
        self.row_from = {row: self.row_from.get(row, value.step) for row in value.rows}
        if self.me not in value.shard_of or (has_stepped and not may_step) or value.step - self.step > 1:
            self.membership, self.state = value, Stage.OUT
            return
        self.membership, self.state, self.step = value, Stage.RUNNING, value.step
        if goes_back := value.back == value.number:
            self.goes_back = True
            self.copies = {key: data for key, data in self.copies.items() if key[0] <= value.step}
        self._voters_of.clear()
        self._is_complete = mine and not has_stepped and not is_chosen and not goes_back
        self._said, self._promised, self._accepted, self._proposal, self._answered = {}, (0, -1), None, None, None
        if self._is_complete:
            self.complete()
        early, self._early = self._early, []
        for each in early:
            self.receive(*each)
        self.consider()

    def _hear(self, sender: int, message: Decided) -> None:
        self._told[sender] = message.value
        self._activate()

    def _activate(self) -> None:
        """Makes this process a member once every older member that is left has told it of the same membership. A single
        member is not enough: it may be the only one that knows of the membership, and may have ended."""
        value = max(self._told.values(), default=self.membership)
        if self.state is not Stage.OUT or self.me not in value.joined:
            return
        old = {*value.shard_of}.difference(value.joined, self.lost)
        if old and all(self._told.get(process) == value for process in old):
            self._told.clear()
            self._install(self.me, Decided(value.number - 1, value))

    def _answer(self, receiver: int, message: Promise | Accepted) -> None:
        self._answered = receiver, message
        if receiver == self.me:
            self.receive(self.me, message)
        else:
            self._send([receiver], message)

    def _send(self, receivers: Iterable[int], message: Message) -> None:
        known = {*receivers} - self.lost - {self.me}
        self.outbox += [(receiver, message) for receiver in sorted(known)]

    def _hear_chosen(self, sender: int, message: Chosen) -> None:
        if message.number == self.membership.number:
            self.chosen[message.step] = message.replicas

    def _hear_complete(self, sender: int, message: Complete) -> None:
        if sender in self.members and message.number == self.membership.number:
            self._note_complete(sender, message.step)


#: What a process does with a message, by its state; all other messages are dropped. A message about an older
#: membership than its own is answered by its own.
TABLE: dict[tuple[Stage, type[Any]], Callable[[Agreement, int, Any], None]] = {
    (Stage.RUNNING, Complete): Agreement._hear_complete,
    (Stage.COMPLETE, Complete): Agreement._hear_complete,
    (Stage.RUNNING, Chosen): Agreement._hear_chosen,
    (Stage.COMPLETE, Chosen): Agreement._hear_chosen,
    **{(state, Prepare): Agreement._answer_prepare for state in (Stage.RUNNING, Stage.COMPLETE, Stage.FROZEN)},
    (Stage.OUT, Prepare): Agreement._promise_as_candidate,
    **{(state, Accept): Agreement._answer_accept for state in (Stage.RUNNING, Stage.COMPLETE, Stage.FROZEN)},
    (Stage.FROZEN, Promise): Agreement._note_promise,
    (Stage.FROZEN, Accepted): Agreement._note_accepted,
    (Stage.FROZEN, Refused): Agreement._note_refused,
    **{(state, Decided): Agreement._install for state in (Stage.RUNNING, Stage.COMPLETE, Stage.FROZEN)},
    (Stage.OUT, Decided): Agreement._hear,
}
