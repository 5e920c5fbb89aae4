"""Rounds: rows of an elastic job train apart, and come and go between two synchronizations.

A round takes the place of a step. In it a row makes several steps of an inner optimizer, for itself. Then the changes
of its parameters are what :mod:`fullshard.elastic.session` takes for gradients::

    row 0   anchor ─ step ─ step ─ … ─ step ─▶ parameters ─┐
    row 1   anchor ─ step ─ step ─ … ─ step ─▶ parameters ─┼─▶ mean of (anchor - parameters) ─▶ the next anchor
    row 2   anchor ─ step ─ … too late for this round      ┘

Owns what differs from a step: which rows take part, how a late row stops, and what is kept. The first member chooses
the rows; :mod:`fullshard.elastic.agreement` sees to it that no two members step with different ones.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fullshard.elastic.agreement import KINDS, Stage
from fullshard.elastic.gradients import Kept, KeptGradients, Replica
from fullshard.elastic.job import RepeatStep
from fullshard.elastic.messages import Has, RunMore, RunOrder
from fullshard.elastic.packed import Packed
from fullshard.elastic.restore import ROUNDS, Restoring
from fullshard.elastic.rows import Row
from fullshard.elastic.state import load_state_of, state_of
from fullshard.group.parameter import local_tensor
from fullshard.policies import expect

_log = logging.getLogger("fullshard")
_AGAIN = 60.0  # seconds after which the log says again that the job waits for new processes


@dataclass(frozen=True)
class LocalRounds:
    """Lets the replicas of an elastic job train apart, and synchronize once in each round.

    ::

        inner = torch.optim.AdamW(model.parameters())
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        elastic.begin(model, outer, micro_batches=4, local=LocalRounds(inner, every=100, quorum=2, grace=30.0))
        for round in elastic.steps(1000):
            with round:
                for micro_batch in round:      # 100 times 4
                    loss(model, data(micro_batch)).backward()
                    if micro_batch.is_last:    # of a step of the inner optimizer
                        inner.step()
                        inner.zero_grad()
                outer.step()

    Each row of processes plays one replica, and there are as many replicas as rows. In a round each changes its
    parameters by steps of the inner optimizer. The mean of the changes, ``anchor - parameters``, is the gradient with
    which the outer optimizer steps on the *anchor*, the parameters from before the round. Then all have the same bits.
    With ``torch.optim.SGD(lr=1.0)`` the next anchor is the mean of the replicas' parameters. Buffers are those of the
    first replica that takes part. The inner optimizer's state stays on its process; a new process gets a copy.

    A round ends when the changes of all rows are there, or ``grace`` seconds after those of ``quorum`` rows are. A row
    that is late stops at its next micro-batch, drops its changes, and takes part in the next round. A row that loses a
    process drops them too. With fewer rows than the quorum the job waits for new processes, without a limit.

    The rounds are those of DiLoCo (Douillard et al., 2023, arXiv 2311.08105).

    Args:
        optimizer: the inner one, of the model's parameters. It is not the optimizer that :meth:`Elastic.begin` gets.
        every: its steps in a round.
        quorum: the fewest rows that may end a round, at most ``replicas`` of :class:`Elastic`.
        grace: seconds for which a quorum waits for other rows.

    Raises:
        TypeError: an argument has another type.
        ValueError: ``every`` or ``quorum`` is less than 1, or ``grace`` is negative.

    Ranks: all alike.
    """

    optimizer: Optimizer
    _: KW_ONLY
    every: int
    quorum: int = 1
    grace: float = 30.0

    def __post_init__(self) -> None:
        expect(isinstance(self.optimizer, Optimizer), "optimizer", self.optimizer, "a torch.optim.Optimizer")
        for name in ("every", "quorum"):
            number = getattr(self, name)
            expect(isinstance(number, int), name, number, "an int")
            expect(number > 0, name, number, "a number of 1 or more", ValueError)
        expect(self.grace >= 0, "grace", self.grace, "0 seconds or more", ValueError)

    def state_dict(self) -> dict[str, Any]:
        return state_of(self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_state_of(self.optimizer, state)


class KeptChanges(KeptGradients):
    """The changes of the parameters of each row in a round, in place of gradients, and the anchor."""

    def __init__(self, params: Sequence[nn.Parameter], buffers: Sequence[torch.Tensor], rank: int) -> None:
        super().__init__(params, buffers)
        self._rank, self._anchor = rank, [local_tensor(param).detach().clone() for param in params]

    @torch.no_grad()
    def begin(self) -> None:
        super().begin()
        for param, anchor in zip(self._params, self._anchor, strict=True):
            local_tensor(param).copy_(anchor)

    @torch.no_grad()
    def note_start(self) -> None:
        super().note_start()
        for param, anchor in zip(self._params, self._anchor, strict=True):
            anchor.copy_(local_tensor(param))

    @torch.no_grad()
    def keep(self, step: int, replica: Replica) -> Kept:
        for index, (param, anchor) in enumerate(zip(self._params, self._anchor, strict=True)):
            torch.sub(anchor, local_tensor(param), out=self._show_gradient(index, True))
        kept = super().keep(step, replica)
        self.begin()
        return kept

    def tell_again(self, step: int, in_own_memory: bool) -> list[Kept]:
        """The changes that this process has computed itself: no row that has ended takes part."""
        rows: list[Row] = [row for row in self.replicas_of(step) if self._rank in row]
        return [self._note(step, row, *self._of[step, row]) for row in rows]

    def show_mean(self, step: int, replicas: Sequence[Replica]) -> None:
        self.begin()
        super().show_mean(step, replicas)

    def show_packed(self, data: Packed, present: Sequence[bool]) -> None:
        self.begin()
        super().show_packed(data, present)


class LocalJob(Restoring):
    """A job whose steps may be rounds."""

    _local: LocalRounds | None = None

    def _forget(self) -> None:
        super()._forget()
        self._more: dict[tuple[Row, int, int], bool] = {}  # whether to run a micro-batch, by row, step and number
        #: The membership and the step for which grace has begun, and for which it is over.
        self._quorum_of = self._grace_over = -1, -1
        self._say_at = 0.0

    def _use_rounds(self, local: LocalRounds | None, outer: Optimizer) -> dict[str, LocalRounds]:
        """Lets steps be rounds. Returns what a new process gets for that."""
        self._local = local
        if local is None:
            return {}
        expect(local.quorum <= self.replicas, "quorum", local.quorum, f"at most {self.replicas}", ValueError)
        expect(local.optimizer is not outer, "the inner optimizer", outer, "another one than the outer", ValueError)
        return {ROUNDS: local}

    def _make_kept(self) -> KeptGradients:
        params = [param for param in self._model.parameters() if param.requires_grad]
        buffers = [*self._model.buffers()]
        return KeptGradients(params, buffers) if self._local is None else KeptChanges(params, buffers, self.rank)

    def _kept_as(self, order: RunOrder) -> Replica:
        """The key of a replica's gradients: in rounds its row, because rows may change their order in a round."""
        return order.replica if self._local is None else order.row

    def _key_of(self, order: RunOrder) -> Replica:
        return self._kept_as(order) if order.replica >= 0 else -1

    def _taking_part(self, step: int) -> Sequence[Replica] | None:
        return super()._taking_part(step) if self._local is None else self._agreement.chosen.get(step)

    def _note_done(self) -> None:
        """Overridden: no round is repeated once a process has made all, because its result may change."""
        super()._note_done()
        self._agreement.is_done |= self._local is not None and self.step >= self._target

    def _receive(self, sender: int, message: Any) -> None:
        if isinstance(message, RunMore):
            self._more[message.row, message.step, message.number] = message.is_wanted
        super()._receive(sender, message)
        if self._local is not None and isinstance(message, (Has, *KINDS)):
            self._look_whether_complete()

    def _look_whether_complete(self) -> None:
        if self._local is not None:
            self._choose(self._local)
        super()._look_whether_complete()

    def _choose(self, local: LocalRounds) -> None:
        """Chooses the rows that take part in the round, if this is the first member and enough of them are there."""
        agreement, rows = self._agreement, self._agreement.membership.rows
        key = number, step = agreement.membership.number, agreement.step
        if agreement.state is not Stage.RUNNING or not agreement.is_oldest:
            return

        def has_kept(process: int, row: Row) -> bool:
            has = self._has.get((number, process))
            return has is not None and has.step == step and row in has.replicas

        there = tuple(row for row in rows if all(has_kept(process, row) for process in row))
        if len(there) >= local.quorum and (there == rows or self._grace_over == key):
            agreement.choose(there)
            self._after_agreement()
        elif len(there) >= local.quorum and self._quorum_of != key:
            self._quorum_of = key
            timer = threading.Timer(local.grace, partial(self._end_grace, key))
            timer.daemon = True
            timer.start()

    def _end_grace(self, key: tuple[int, int]) -> None:
        with self._changed:
            self._grace_over = key
            if self._opened:
                self._look_whether_complete()

    def _send_order(self, order: RunOrder) -> None:
        self._ordered.add((order.step, self._key_of(order)))
        self._orders.append(order)
        for process in order.row[1:]:
            self._connections.send(process, order)

    def _take_order(self, step: int) -> RunOrder | None:
        order = next((each for each in self._orders if (each.row, each.step) == (self._row, step)), None)
        if order is not None:
            self._orders.remove(order)
            self._ordered.add((step, self._key_of(order)))
        if order is None or order.replica < 0:
            self._warn_without_quorum(step)
            return None
        return order

    def _has_ended(self, step: int) -> bool:
        """Whether a step counts, and this process expects no more orders for it from the first process of its row."""
        with self._changed:
            row = self._find_row()
            is_later = not row or self._agreement.row_from[row] > step
            return self._counts(step) and (is_later or (row == self._row and (step, -1) in self._ordered))

    def _goes_on(self, order: RunOrder, number: int) -> bool:
        """Whether the row runs the next micro-batch, as its first process says: all of them, or none."""
        if self._local is None:
            return True
        row, key = order.row, (order.row, order.step, number)
        with self._changed:
            if row[0] == self.rank:
                self._more[key] = not self._counts(order.step)
                for process in row[1:]:
                    self._connections.send(process, RunMore(*key, self._more[key]))
            self.wait_for(lambda: key in self._more or self._is_in_other_row(row), "the first process of its row")
            if self._is_in_other_row(row):
                raise RepeatStep
            return self._more.pop(key)

    def _leave_row(self) -> None:
        super()._leave_row()
        with self._changed:
            self._more.clear()

    def _warn_without_quorum(self, step: int) -> None:
        """Logs now and then that a round waits for new processes."""
        if self._local is None or self._counts(step):
            return
        rows, now = len(self._agreement.membership.rows), time.monotonic()
        if rows >= self._local.quorum:
            self._say_at = 0.0
        elif now > self._say_at and self._agreement.is_oldest:
            self._say_at = now + _AGAIN
            _log.warning(
                f"round {step} waits for new processes: {rows} rows are left, the quorum is {self._local.quorum}"
            )
