"""Training that goes on, with the same bits, when processes of the job end.

The front end of the package: how a process finds the others, what it runs in each step, and how it goes on after the
loss of another one. Owns the order in which things happen on one process. :mod:`fullshard.elastic.agreement` decides
who is a member and which steps count, :mod:`fullshard.elastic.gradients` keeps what was computed.

A row is a process group of its own, over which the engine shards as over all ranks of a smaller job; it knows nothing
of other rows. So a loss elsewhere leaves a row as it is, and a new row means a new process group.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fullshard.comm.collective import CollectiveTransport
from fullshard.comm.select import simulated_transport
from fullshard.device import streams_of
from fullshard.elastic.entry import PATIENCE
from fullshard.elastic.gradients import Replica
from fullshard.elastic.job import RepeatStep
from fullshard.elastic.local import LocalJob, LocalRounds
from fullshard.elastic.messages import Followed, RunOrder, Square
from fullshard.elastic.regroup import problem_of
from fullshard.elastic.rows import replicas_of
from fullshard.group.parameter import local_tensor
from fullshard.policies import expect
from fullshard.schedule.unit import schedule_of
from fullshard.torch_private import init_fake_group


class MicroBatch(NamedTuple):
    """A micro-batch that this process is to run, for one logical rank.

    Attributes:
        step: of the training, from 0.
        number: among the micro-batches of the logical rank in this step, from 0.
        rank: the logical rank, of ``size``.
        is_last: whether it is the last of the step, or of a step of the inner optimizer in a round.
    """

    step: int
    number: int
    rank: int
    size: int
    is_last: bool


class Elastic(LocalJob):
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
    sharded over the processes of one row, and each shard lies on one process of each row. What is computed, the data
    and the random numbers belong to logical ranks. If a process ends, the rows that are whole also run the
    micro-batches of the others, one logical replica after another, and gradients are added in the order of the logical
    replicas. A process without a row stands by: it steps with the others, so that its shard lies on more processes. If
    a further row lacks a shard, and that has two processes less than another, one that stands by with the other leaves
    and comes back as a new process with the shard that the fewest have. This takes a ``directory``.

    Args:
        replicas: how many logical replicas there are; a divisor of the number of processes. A shard outlives
            ``replicas - 1`` of its processes.
        seed: of the random numbers. Each micro-batch begins with a state of torch's generators and of Python's
            that depends on the seed, the step, the logical rank and the number of the micro-batch only.
        directory: where members write down how to reach them, which all processes of the job see. A process that finds
            a member there joins the running job, whatever its launcher says. Without one, nobody can join.
        processes: how many begin the job. They find each other in the directory, and each may have a launcher of its
            own, or none. Their ranks are in the order of their hosts. ``None``: all processes of the launcher.

    Attributes:
        rank: the number of this process, of ``size`` at the beginning. A process that comes back has a new one.
        shard: which shard of the model this process has, of ``shards``. Between two steps it may get another.
        step: how many steps this process has made.
        changes: how often the members of the job have changed: a program may compare it between two steps. Logical
            ranks never change.
        has_left: whether this process was asked to leave, by :meth:`leave` or SIGTERM; or the job ended before it
            could come back.

    Raises:
        ValueError: no launcher started the process, ``processes`` is given without a directory, or ``replicas`` does
            not divide the number of processes.
        RuntimeError: a process group exists already.

    Ranks: all processes, first of all.
    """

    def __init__(
        self, *, replicas: int, seed: int = 0, directory: str | Path | None = None, processes: int | None = None
    ) -> None:
        expect(isinstance(replicas, int) and replicas > 0, "replicas", replicas, "a number of 1 or more", ValueError)
        if dist.is_initialized():
            raise RuntimeError("a process group exists already: make Elastic in place of calling init_process_group()")
        super().__init__(replicas, seed, directory, processes)
        init_fake_group(self.shards, self.shard)
        self._last_step = -1  # that began: it is repeated if it has not ended
        self._until_begin = ExitStack()
        self._until_begin.enter_context(simulated_transport(lambda _: CollectiveTransport()))
        self._until_close = ExitStack()
        with suppress(ValueError):  # not the main thread
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._leave_in_order)
                self._until_close.callback(signal.signal, signal.SIGTERM, signal.SIG_DFL)

    def begin(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        micro_batches: int = 1,
        state: Mapping[str, Any] | None = None,
        local: LocalRounds | None = None,
        copy_every: int = 0,
        load: Callable[[], Any] | None = None,
    ) -> None:
        """Names what is trained. A process that joins gets its state here.

        Args:
            model: sharded by ``fully_shard`` without a mesh, or wrapped, alike on all processes, with the same values
                in each replica.
            optimizer: of its parameters.
            micro_batches: how many each logical rank runs in a step.
            state: what else a new process must get, by name: objects with ``state_dict()`` and ``load_state_dict()``,
                such as a learning-rate scheduler. They hold tensors and plain values only. A process that comes back
                with a different shard loads them too, so tensors of a shard may have other shapes than before.
            local: lets replicas train apart for more than one step at a time; ``optimizer`` is the outer one then.
            copy_every: in steps, how often each process copies the state of its shard, and sends the copy to a process
                that has a different shard, if possible on a different host. If all processes of a shard end, the job
                goes back to the last copies, and waits for a process that has the shard. 0: a lost shard ends the job.
            load: loads a checkpoint, if there is one, together with the other processes of a row, whose default process
                group it may use. With this object in ``state`` of :func:`fullshard.checkpoint.load`, as in
                ``save()``, training goes on from its step. It is not called on a process that joins.

        Raises:
            ValueError: ``micro_batches`` is less than 1; ``copy_every`` is negative, or the job has no directory, so no
                process can join for a lost shard; ``model`` is not a sharded root, or has a group that replicates,
                encodes messages, reshards to a part of the ranks or lies on a disk; or ``local`` has a quorum of more
                than ``replicas`` or the same optimizer.
            ElasticError: this process joins, and no member is left that has its shard.

        Ranks: all, once, after the optimizer was made.
        """
        is_right = isinstance(micro_batches, int) and micro_batches > 0
        expect(is_right, "micro_batches", micro_batches, "a number of 1 or more", ValueError)
        of_rounds = self._use_rounds(local, optimizer)
        is_right = isinstance(copy_every, int) and copy_every >= 0
        expect(is_right, "copy_every", copy_every, "a number of steps, or 0 for no copies", ValueError)
        if copy_every and self._directory is None:
            raise ValueError(f"copy_every={copy_every} needs Elastic(directory=...), where a new process finds the job")
        self._model, self._optimizer, self.micro_batches = model, optimizer, micro_batches
        self._schedule = schedule_of(model, "elastic.begin()")
        for group in self._schedule.groups:
            if problem := problem_of(group):
                raise ValueError(f"elastic.begin() cannot train {group.title}: {problem}")
        with self._changed:
            self._kept = self._make_kept()
            self._copy_every = copy_every
            self._add_early()
            if self.rank in self._agreement.members:  # perhaps the membership has changed meanwhile
                self._begin_membership()
        self._steps_before, self._state = 0, {**(state or {}), **of_rounds}
        self._leave_row()  # collectives would do nothing
        self._until_begin.close()
        if self.is_joining:
            self._fetch()
        else:
            self._begin_in_row(load)
        optimizer.register_step_post_hook(self._note_step)

    def steps(self, number: int) -> Iterator[ElasticStep]:
        """Yields steps until this process has made ``number`` of them. A step that has to be repeated is yielded again,
        and so are several steps if the job goes back to copies. Use each as a context.

        Args:
            number: of steps, from the beginning of the job. In rounds, a lost shard ends the job once a process has
                made so many.

        Raises:
            RuntimeError: before :meth:`begin`, or if a step was not used as a context.
            ElasticError: the processes that are left cannot go on.

        Ranks: all.
        """
        if self._kept is None:
            raise RuntimeError("elastic.begin(model, optimizer) must be called before elastic.steps()")
        with self._changed:
            self._target = number
            self._note_done()
        while not (self.has_left or self._has_made(number)):
            if self._is_spare():
                self._change_shard()
                continue
            if self._agreement.goes_back:
                self._leave_row()
                self._go_back()
            if self.step > self._last_step:
                self._kept.note_start()
            else:
                self._kept.begin()
            self._copy()
            self._serve_newcomers()
            if self._must_fetch():
                self._fetch()
            self._last_step, step = self.step, ElasticStep(self, self.step)
            yield step
            if not step.was_left:
                raise RuntimeError(f"step {self.step} was not used as a context: write `with step:` around its body")
        self._is_done = self.step >= number

    def _has_made(self, number: int) -> bool:
        """Whether this process has made so many steps, and need not repeat any."""
        with self._changed:
            if self._local is not None and self.step >= number:  # it may yet have to
                self._changed.wait_for(lambda: not self._agreement.is_frozen, PATIENCE)
            return self.step >= number and not self._must_go_back()

    def leave(self) -> None:
        """Lets :meth:`steps` end after the step that runs, as SIGTERM does.

        Ranks: each for itself.
        """
        self.has_left = True

    def _leave_in_order(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a process that hangs ends at the second one
        self.leave()

    def close(self) -> None:
        """Ends the part of this process in the job. The others go on.

        Ranks: each for itself.
        """
        self._part()
        self._until_begin.close()  # if nothing began
        self._until_close.close()
        self._leave_row()

    # -- what to run ---------------------------------------------------------------------------------------------------

    def next_order(self, step: int) -> RunOrder | None:
        """The replica whose micro-batches this process runs next; ``None`` once the step counts. Waits."""
        found: list[RunOrder] = []

        def is_known() -> bool:
            if self._row_in(step) != self._row:
                return True
            if self._row and self._row[0] == self.rank:
                self._give_order(step)
            if (order := self._take_order(step)) is not None:
                found.append(order)
            is_over = bool(found) or self._has_ended(step)
            if self._must_fetch() or (not is_over and self._is_spare()):
                raise RepeatStep
            return is_over or must_serve()

        def must_serve() -> bool:  # in a round, which new processes may be needed to end
            return self._local is not None and bool(self._fetching) and not (found or self._counts(step))

        while not self._has_ended(step):  # else others may wait for this process before they form a row with it
            self.follow_membership(step)
            with self._changed:
                self.wait_for(is_known, f"the gradients of step {step}")
                if found:
                    return found[0]
            if must_serve():
                assert self._kept is not None
                self._kept.begin()  # the state from before the round
                self._serve_newcomers()
        return None

    def _give_order(self, step: int) -> None:
        """Tells the processes of this row what to run next, if nothing is left to run: a replica, or no more because
        the step counts. All of them run it, so that none waits for one that knows already that the step counts."""
        replicas = self.replicas if self._local is None else len(self._agreement.membership.rows)
        for replica in self._replicas_to_run(step):
            order = RunOrder(self._row, step, replica, replicas)
            if not self._orders and (step, self._key_of(order)) not in self._ordered:
                self._send_order(order)

    def _replicas_to_run(self, step: int) -> Sequence[int]:
        """The logical replicas that this row is to run in a step; -1 if it counts."""
        membership, row = self._agreement.membership, self._row
        if self._counts(step):
            return [-1]
        if self._agreement.step != step or self._agreement.is_frozen:
            return []
        if self._local is not None:
            return [membership.rows.index(row)]
        everywhere: set[Replica] = set()
        if membership.number and membership.step == step:
            of_shards: list[set[Replica]] = [set() for _ in range(self.shards)]
            for process, shard in membership.shards:
                if (has := self._has.get((membership.number, process))) is None:
                    return []
                of_shards[shard].update(has.replicas)
            # A member that has them tells those of its shard. Else the others of this row may not run what they get.
            everywhere = set.intersection(*of_shards)
        mine = replicas_of(membership.rows.index(row), len(membership.rows), self.replicas)
        return [replica for replica in mine if replica not in everywhere]

    def run(self, order: RunOrder) -> Iterator[MicroBatch]:
        """The micro-batches of a replica, whose gradients are kept after the last one."""
        kept, step = self._kept, order.step
        assert kept is not None
        kept.begin()
        rank, size = order.replica * self.shards + self.shard, order.replicas * self.shards
        for number in range(self.micro_batches * (self._local.every if self._local else 1)):
            if not self._goes_on(order, number):
                return
            self._seed(step, rank, number)
            yield MicroBatch(step, number, rank, size, (number + 1) % self.micro_batches == 0)
        assert self._schedule is not None
        for device in {group.device for group in self._schedule.groups}:
            if (streams := streams_of(device)) is not None:
                streams.synchronize(device)  # without the lock, because news may have to end this wait
        with self._changed:
            key = self._kept_as(order)
            if self._agreement.goes_back or kept.has_all(step, [key]):
                return
            told = kept.keep(step, key)
            if self._aborted is dist.group.WORLD:  # what it has computed since is anything
                kept.drop(step, key)
                raise RepeatStep
            self._tell(told, self._agreement.members)
            if self._local is not None:
                self._tell_has(step)
            self._look_whether_complete()

    def _seed(self, *of: int) -> None:
        number = random.Random(repr((self.seed, *of))).getrandbits(63)
        torch.manual_seed(number)
        random.seed(number)

    def norm(self, step: int, square: float) -> float:
        """The norm of all gradients, from the sum of the squares of this shard's."""
        with self._changed:
            mine = Square(self._number - self._agreement.goes_back, step, self.shard, square)
            self._squares[step, self.shard] = mine
            for process in self._agreement.members if not self._agreement.goes_back else ():
                self._connections.send(process, mine)
            squares = self._squares
            self.wait_for(lambda: all((step, shard) in squares for shard in range(self.shards)), "norms of gradients")
            return float(sum(squares[step, shard].total for shard in range(self.shards))) ** 0.5

    # -- ends of steps -------------------------------------------------------------------------------------------------

    def _note_step(self, *_: Any) -> None:
        self._steps_before += 1

    def end_step(self, step: int, steps_before: int) -> None:
        if self._steps_before == steps_before:
            raise RuntimeError(
                f"the optimizer made no step in step {step}: call optimizer.step() at the end of its body"
            )
        with self._changed:
            assert self._kept is not None
            mean = self._mean
            for process in self._followers if not self._agreement.goes_back else ():
                assert mean is not None
                squares = tuple(each for each in self._squares.values() if each.step == step)
                back = self._agreement.membership.back
                self._connections.send(process, Followed(step, mean[0], mean[1], squares, back))
            if "agreed" in self._times:
                self._end_change()
            self.step = step + 1
            self._note_done()
            self._drop_followers()
            self._followed = {of: each for of, each in self._followed.items() if of > step}
            if self.is_joining:
                self._agreement.follow(self.step)
                self._ask_to_be_member()
            self._kept.forget(step)
            self._ordered = {key for key in self._ordered if key[0] > step}
            self._agreement.chosen.pop(step, None)
            self._squares = {key: value for key, value in self._squares.items() if key[0] >= step}
            self._look_whether_complete()

    def show_gradients(self, step: int) -> None:
        """Sets ``param.grad`` to the mean over the logical replicas."""
        kept = self._kept
        assert kept is not None
        if (followed := self._followed.get(step)) is not None:
            kept.show_packed(followed.data, followed.present)
        else:
            with self._changed:
                if (replicas := self._taking_part(step)) is None:  # the job has gone back since the step counted
                    raise RepeatStep
            kept.show_mean(step, replicas)
        self._mean = kept.pack_mean() if self._followers else None


class ElasticStep:
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
        while (order := elastic.next_order(self.number)) is not None:
            yield from elastic.run(order)
        elastic.show_gradients(self.number)
        self._has_gradients = True

    def __enter__(self) -> ElasticStep:
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
        before.

        Args:
            max_norm: the largest norm, in the L2 norm.

        Ranks: all, after their micro-batches. Those that stand by have no process group, so torch's function fails.
        """
        grads = [param.grad for param in self._elastic._model.parameters()]
        parts = [local_tensor(grad) for grad in grads if grad is not None]
        norm = self._elastic.norm(self.number, sum(float(part.double().square().sum()) for part in parts))
        if norm > max_norm:
            for part in parts:
                part.mul_(max_norm / (norm + 1e-6))
        return norm
