"""How a process comes to a state of its shard: from a member when it is new, from its own copy, or from a checkpoint.

Owns what happens to the model and the optimizer between steps. :mod:`fullshard.elastic.copies` says who holds copies,
:mod:`fullshard.elastic.agreement` when the members go back to them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from fullshard.elastic.copies import Copy, holder_of, outdated
from fullshard.elastic.entry import PATIENCE, ElasticError
from fullshard.elastic.gradients import KeptGradients
from fullshard.elastic.job import RepeatStep
from fullshard.elastic.messages import Fetch, ShardState, Spared
from fullshard.elastic.regroup import Regrouping, use_shard
from fullshard.elastic.rows import spare
from fullshard.elastic.state import PackedState, load_state, pack_state
from fullshard.platforms import host_id

_log = logging.getLogger("fullshard")
ROUNDS = "local_rounds"  # the name of their state
_NEWS = 2.0  # seconds in which the end of a process is known after an error


class Restoring(Regrouping):
    """A job whose states of shards are copied, saved and loaded."""

    def save(self, save: Callable[[], Any]) -> bool:
        """Lets the processes of one row save a checkpoint between two steps, while the others go on::

            state = {"elastic": elastic, "scheduler": scheduler}
            elastic.save(lambda: checkpoint.save(directory, model, optimizer, step=elastic.step, state=state))

        If one of these processes ends meanwhile, nothing is saved, a warning says so, and training goes on.

        Args:
            save: is called on these processes, whose default process group it may use. It must wait until all is saved.

        Returns:
            whether this process has saved.

        Raises:
            Exception: what ``save`` raises, unless a process of the row has ended.

        Ranks: all, after the same steps.
        """
        key, row = f"save {self.step}", self._row
        try:
            if row and row[0] == self.rank:
                self._set_value(row, key, b"yes" if self._agreement.membership.rows[:1] == (row,) else b"")
            if row and self._get_value(row, key):
                save()
                return True
        except RuntimeError as error:
            with self._changed:
                if not self._changed.wait_for(partial(self._is_broken, row), _NEWS):
                    raise
            _log.warning(f"step {self.step} was not saved, because a process of its row has ended: {error}")
        return False

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside the model and the optimizer: the step, and of each shard the buffers (data
        differ, and so do statistics of them) and the state of an inner optimizer."""
        rounds = {name: each.state_dict() for name, each in self._state.items() if name == ROUNDS}
        return {"step": self.step, "buffers": [*self._model.buffers()], "rounds": rounds}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned, in ``load`` of ``begin()``."""
        for buffer, values in zip(self._model.buffers(), state["buffers"], strict=True):
            buffer.copy_(values)
        for name, each in state["rounds"].items():
            self._state[name].load_state_dict(each)
        with self._changed:
            self.step = state["step"]
            self._agreement.follow(self.step)

    def _begin_in_row(self, load: Callable[[], Any] | None) -> None:
        """Makes the process group of this row, whose processes load a checkpoint."""
        with suppress(RepeatStep):  # the job has gone back: the first step says so
            self.follow_membership(self.step)
        if load is None:
            return
        if not self._row:
            raise ElasticError(f"a process has ended before process {self.rank} could load a checkpoint: start again")
        load()

    def _fetch(self) -> None:
        """Gets the state of this process's shard from a member that has it, or a copy if there is none. Keeps its own
        if it becomes a member meanwhile: others wait for it."""

        def ends() -> bool:
            return bool(self._states) or self._source in self._gone() or not self.is_joining

        before = self._source
        with self._changed:
            self._agreement.lacks_state = bool(self._states) or not self._has_copy
            while not self._states:
                left = [each for each in self._sources if each not in self._gone()]
                if not left:
                    raise ElasticError(f"no member is left that has shard {self.shard}, which this new process needs")
                self._source = left[0]
                self._connections.send(self._source, Fetch(self.rank, self.shard))
                self.wait_for(ends, "the state of its shard")
                if not self.is_joining:
                    self._source = before  # which may not have sent all that this process needs
                    self._states.clear()
                    self._agreement.lacks_state = False
                    return
            state = self._states.pop()
            self._states.clear()
            is_old = state.step < self.step if self.is_joining else state.step <= self.step
            if is_old and state.back == self._back:  # this process has followed another one meanwhile
                self._agreement.lacks_state = False
                return
            self._followed = {step: each for step, each in self._followed.items() if each.back >= state.back}
            self._squares = {key: each for key, each in self._squares.items() if each.number >= state.back}
        self._load(state.step, state.data)
        with self._changed:
            self._back, self._has_copy = state.back, state.is_lost
            self._agreement.lacks_state = False
            if self._copy_every:
                self._agreement.copies[state.step, self.shard] = state.data
            if self.is_joining:
                self._agreement.follow(self.step)
            self._ask_to_be_member()

    def _make_kept(self) -> KeptGradients:
        raise NotImplementedError

    def _is_settled(self) -> bool:
        """Whether neither the members nor their shards are about to change, and the job is not about to end."""
        agreement, members, now = self._agreement, self._agreement.members, time.monotonic()
        if agreement.is_frozen or agreement.is_done or agreement.lacks_shard or self.step + 2 >= self._target:
            return False
        process, number, last_number, deadline = self._spared
        is_under_way = process not in members or number == agreement.membership.number
        is_awaited = is_under_way and last_number == self._last_number and now < deadline
        return not (is_awaited or now < self._newcomer + PATIENCE or self._gone().intersection(members))

    def _spare_one(self) -> None:
        """Asks a process to come back with a different shard, if that is of use. The first member does so, because it
        knows all that are new. It asks none that has the copy of a lost shard, and last those that have the copy of the
        only process of a shard."""
        if self._directory is None or not (self._is_first and self._is_settled()):
            return
        membership, members, coming = self._agreement.membership, self._agreement.members, [*self._coming.values()]
        found = {*spare(membership.rows, members, coming, self.replicas, self.shards)}
        found.difference_update(dict(membership.holders).values())
        if found:
            had, hosts = [*members.values(), *coming], {**self._connections.host_of, self.rank: host_id()}
            alone = [each for each, shard in members.items() if had.count(shard) == 1]
            holders = {holder_of(each, members, hosts) for each in alone}
            process = max(found, key=lambda each: (each not in holders, each))
            self._spared = process, membership.number, self._last_number, time.monotonic() + PATIENCE
            self._is_spared = process == self.rank
            self._connections.send(process, Spared())

    def _is_spare(self) -> bool:
        """Whether this process may come back with a different shard now: it was asked to, and nobody needs it."""
        with self._changed:
            agreement, members = self._agreement, self._agreement.members
            if not self._is_spared or self.has_left or self._find_row() or agreement.is_frozen:
                return False
            if self._gone().intersection(members) or [*members.values()].count(self.shard) < 2:
                return False
            holds_lost = self.rank in dict(agreement.membership.holders).values()
            return not (holds_lost or self._followers or self._fetching or self._wanted)

    def _change_shard(self) -> None:
        """Leaves the job, and comes back as a new process: it is given the shard that the fewest have. If the job ends
        meanwhile, it has left. Called between steps."""
        assert self._schedule is not None
        assert self._directory is not None
        _log.info(f"process {self.rank} stands by with shard {self.shard}, and leaves for one that fewer have")
        before = self.shard
        self._part()
        self._leave_row()
        self._forget()
        if (found := self._find_job(PATIENCE)) is not None:
            self._join(*found)
            self._optimizer.zero_grad()
            if self.shard != before:
                use_shard(self._schedule, self.shard)
            self._kept = self._make_kept()
            try:
                self._fetch()
            except ElasticError:
                if not any(self._leaving.values()):
                    raise
                self.has_left = True
        elif not self.has_left and [*self._directory.glob("[0-9]*.json")]:
            raise ElasticError("no member of the job answers this process, which was to get a different shard")
        else:
            self.has_left = True

    def _load(self, step: int, data: PackedState) -> None:
        assert self._kept is not None
        load_state(data, self._model, self._optimizer, self._state)
        self._kept.note_start()
        self.step = step

    def _must_fetch(self) -> bool:
        """Whether this new process needs the state of its shard again: the process that it follows has ended, or has
        gone back and sent a different state. Raises ElasticError if no other process has that state."""
        if self.is_joining and self._states:
            return True
        if self._source not in self._gone() or self.step in self._followed:
            return False
        if not self.is_joining and self.step < self._first:
            raise ElasticError(
                f"process {self._source} has ended before process {self.rank} had its state: start again"
            )
        return self.is_joining

    def _copy(self) -> None:
        """Copies the state of this process, if it is time. Called between steps."""
        key, agreement = (self.step, self.shard), self._agreement
        if not self._copy_every or self.step % self._copy_every or key in agreement.copies or agreement.goes_back:
            return
        data = pack_state(self._model, self._optimizer, self._state)
        with self._changed:
            if agreement.goes_back:
                return
            agreement.copies[key] = data
            self._connections.send(self._holder, Copy(self._number, *key, data))
            for old in outdated(agreement.copies, self.step, self._copy_every) if not agreement.is_frozen else ():
                del agreement.copies[old]

    def _serve_newcomers(self) -> None:
        """Sends the state of this process's shard to new processes that have asked for it. Called between steps."""
        with self._changed:
            fetching, self._fetching = self._fetching, set()
            self._followers |= fetching
            number, back = self._agreement.membership.number, self._agreement.membership.back
            own = [Copy(number, *key, data) for key, data in self._agreement.copies.items() if key[1] == self.shard]
        if fetching:
            state = ShardState(self.step, pack_state(self._model, self._optimizer, self._state), back)
            for process in fetching:
                for message in (state, *own):
                    self._connections.send(process, message)

    def _find_holder(self) -> None:
        """Sends the copies of this process to its holder, if it has a new holder."""
        if not self._copy_every or self.rank not in self._agreement.members:
            return
        holder = holder_of(self.rank, self._agreement.members, {**self._connections.host_of, self.rank: host_id()})
        if holder is not None and holder != self._holder:
            self._holder = holder
            for key, data in self._agreement.copies.items():
                if key[1] == self.shard:
                    self._connections.send(holder, Copy(self._number, *key, data))

    def _serve_copies(self) -> None:
        """Sends new processes the copies that they need, or asks the process that has these to do so."""
        agreement, step = self._agreement, self._agreement.membership.step
        for process, shard in [*self._wanted.items()]:
            owners = [each for each, has in agreement.members.items() if has == shard and each not in agreement.lost]
            source = next(iter(owners), dict(agreement.membership.holders).get(shard, -1))
            if shard == self.shard or process in {*agreement.lost, *agreement.members}:
                del self._wanted[process]
                self._fetching |= {process} - agreement.lost if shard == self.shard else set()
            elif source != self.rank:
                self._connections.send(source, Fetch(process, shard))
            else:
                data = agreement.copies[step, shard]
                self._connections.send(process, ShardState(step, data, agreement.membership.back, is_lost=True))

    def _must_go_back(self) -> bool:
        """Whether this process must repeat steps although it has made all of them. It need not if another process has
        made all and left, and no row repeats them."""
        agreement = self._agreement
        return agreement.goes_back and not (any(self._leaving.values()) and not agreement.membership.rows)

    def _go_back(self) -> None:
        """Loads the copy of the state that the membership has gone back to. Called between steps."""
        agreement, kept = self._agreement, self._kept
        assert kept is not None
        while agreement.goes_back:
            with self._changed:
                step = agreement.step
                data = agreement.copies[step, self.shard]
            kept.forget(self.step + 2)
            self._load(step, data)
            with self._changed:
                if agreement.step != step:  # it has gone back further
                    continue
                agreement.goes_back, self._first, self._counted = False, min(self._first, step), step
                self._note_done()
                back = agreement.membership.back
                self._squares = {key: each for key, each in self._squares.items() if each.number >= back}
                self._fetching |= self._followers.difference(agreement.members)
                self._add_early()
                if self.rank in agreement.members:
                    self._begin_membership()

    def _add_early(self) -> None:
        """Adds the gradients that came before this process could use them."""
        early, self._early = self._early, []
        for kept in early:
            if kept.number >= self._agreement.membership.back:
                self._add(kept)
