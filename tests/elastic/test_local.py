"""Rounds in which rows train apart (:mod:`fullshard.elastic.local`)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from fullshard import fully_shard
from fullshard.elastic import Elastic, LocalRounds
from tests.elastic.jobs import Job, Result, run
from tests.elastic.program import Model

EVERY = 3


def simulated(job: Job) -> list[torch.Tensor]:
    """The parameters after a job without losses, whose replicas train in turn in this process, unsharded."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Model()
        params = [param for param in model.parameters() if param.requires_grad]
        anchor = [param.detach().clone() for param in params]
        outer = torch.optim.SGD(anchor, lr=0.7, momentum=0.9, nesterov=True)
        scheduler = torch.optim.lr_scheduler.StepLR(outer, 2, 0.9)
        inner = [torch.optim.AdamW(params, lr=1e-2) for _ in range(job.replicas)]
        for step in range(job.steps):
            changes = [
                train_apart(job, step, replica, model, inner[replica], anchor) for replica in range(job.replicas)
            ]
            for param, *of_replicas in zip(anchor, *changes, strict=True):
                param.grad = sum(of_replicas[1:], of_replicas[0]) / job.replicas
            outer.step()
            scheduler.step()
    return anchor


def train_apart(
    job: Job, step: int, replica: int, model: Model, inner: torch.optim.Optimizer, anchor: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The changes of a replica in a round: each of its ranks runs its micro-batches."""
    params, size = inner.param_groups[0]["params"], job.shards
    with torch.no_grad():
        for param, before in zip(params, anchor, strict=True):
            param.copy_(before)
    for number in range(job.every * job.micro_batches):
        for rank in range(replica * size, (replica + 1) * size):
            seed = random.Random(repr((0, step, rank, number))).getrandbits(63)
            torch.manual_seed(seed)
            generator = torch.Generator().manual_seed(hash((step, number, rank)) % 2**31)
            output = model(torch.randn(8, 16, generator=generator), (step + number + replica) % 3 == 0)
            output.square().mean().div(job.micro_batches * size).backward()
        if (number + 1) % job.micro_batches == 0:
            inner.step()
            inner.zero_grad()
    return [before - param.detach() for param, before in zip(params, anchor, strict=True)]


def trained(result: Result, process: Sequence[int]) -> list[torch.Tensor]:
    """The whole parameters, of a process for each shard."""
    ends = {each["ended"]: each for each in result.ends()}
    parts = zip(*(ends[each]["values"] for each in process), strict=True)
    return [torch.cat([torch.tensor(part) for part in of_shards if part]) for of_shards in parts]


def assert_all_ended_alike(job: Job, result: Result, statuses: Sequence[int]) -> None:
    assert result.statuses == statuses, result.errors
    digests = result.digests(job.steps)
    assert len(digests) == job.shards
    assert all(len(each) == 1 for each in digests.values()), digests


def micro_batches_of(result: Result, process: int, step: int) -> int:
    return sum("ran" in each and each["ran"][0] == step for each in result.said[process])


@pytest.mark.parametrize(("grid", "hosts"), [((2, 2), "a"), ((1, 3), "a"), ((1, 3), "abb")])
def test_rows_train_as_replicas_in_one_process(grid: tuple[int, int], hosts: str) -> None:
    job = Job(*grid, steps=4, every=EVERY, hosts=hosts)
    result = run(job)
    assert_all_ended_alike(job, result, [0] * grid[0] * grid[1])
    tolerance = 0.0 if job.shards == 1 else 1e-6  # ranks of a row scale and add gradients in another order
    for found, expected in zip(trained(result, range(job.shards)), simulated(job), strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_a_slow_row_is_left_out_and_takes_part_again() -> None:
    job = Job(1, 3, steps=5, every=EVERY, quorum=2, grace=0.5, faults={1: [(1, "forward 1", "2.0")]})
    result = run(job)
    assert_all_ended_alike(job, result, [0, 0, 0])
    whole = job.every * job.micro_batches
    assert micro_batches_of(result, 1, 1) == 2, "it stops at its next micro-batch"
    assert [micro_batches_of(result, 0, step) for step in range(5)] == [whole] * 5
    assert whole in [micro_batches_of(result, 1, step) for step in (2, 3, 4)]


@pytest.mark.parametrize("slow", [0, 1, 2, 3])
def test_processes_of_a_slow_row_stop_at_the_same_micro_batch(slow: int) -> None:
    """Also the process that chooses the rows may be slow."""
    job = Job(2, 2, steps=3, every=EVERY, grace=0.2, faults={slow: [(1, "backward 2", "1.0")]})
    result = run(job)
    assert_all_ended_alike(job, result, [0] * 4)
    counts = [[micro_batches_of(result, process, step) for step in range(3)] for process in (slow, slow ^ 1)]
    assert counts[0] == counts[1]
    assert counts[0][1] < job.every * job.micro_batches


def test_a_row_that_loses_a_process_is_left_out() -> None:
    job = Job(2, 2, steps=4, every=EVERY, faults={1: [(1, "forward 2", "SIGKILL")]})
    result = run(job)
    assert_all_ended_alike(job, result, [0, -9, 0, 0])
    assert micro_batches_of(result, 0, 2) == 0, "it stands by"
    assert {each[1] // 2 for each in result.ran() if each[0] == 2} == {0}, "the row that is left is the first"


def test_a_job_without_a_quorum_waits_for_a_new_process() -> None:
    job = Job(1, 2, steps=4, every=EVERY, quorum=2, faults={0: [(2, "forward 2", "SIGKILL")]}, joins=[2])
    result = run(job)
    assert_all_ended_alike(job, result, [-9, 0, 0])
    assert sum("waits for new processes: 1 rows are left" in line for line in result.errors[1].splitlines()) == 1


def test_with_a_plain_outer_step_one_replica_trains_as_without_rounds(alone: Elastic) -> None:
    torch.manual_seed(3)
    model, plain = nn.Linear(4, 4), nn.Linear(4, 4)
    plain.load_state_dict(model.state_dict())
    fully_shard(model)
    inner, other = (torch.optim.AdamW(each.parameters(), 0.1) for each in (model, plain))
    outer = torch.optim.SGD(model.parameters(), 1.0)
    alone.begin(model, outer, micro_batches=2, local=LocalRounds(inner, every=EVERY))
    data = torch.randn(EVERY * 2, 8, 4)
    for step in alone.steps(3):
        with step:
            for micro_batch in step:
                model(data[micro_batch.number]).square().mean().backward()
                if micro_batch.is_last:
                    inner.step()
                    inner.zero_grad()
            outer.step()
        for number, each in enumerate(data):
            plain(each).square().mean().backward()
            if number % 2:
                other.step()
                other.zero_grad()
    torch.testing.assert_close(model.weight.full_tensor(), plain.weight)  # type: ignore[operator]


def test_what_cannot_be_right_is_refused(alone: Elastic) -> None:
    model = fully_shard(nn.Linear(4, 4))
    inner, outer = (torch.optim.SGD(model.parameters(), 1.0) for _ in range(2))

    def refuses(said: str, error: type[Exception] = ValueError, **changes: Any) -> None:
        with pytest.raises(error, match=said):
            alone.begin(model, outer, local=LocalRounds(**{"optimizer": inner, "every": 2, **changes}))

    refuses("every is 0", every=0)
    refuses("quorum is 0", quorum=0)
    refuses("quorum is 2 .*; expected at most 1", quorum=2)
    refuses("grace is -1", grace=-1.0)
    refuses("optimizer is", TypeError, optimizer=model)
    refuses("the inner optimizer is", optimizer=outer)


def test_a_process_that_waits_for_a_quorum_serves_new_processes_without_the_lock(
    alone: Elastic, lock_is_free: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With it, it would say nothing to others for as long as it packs its state."""
    model = fully_shard(nn.Linear(4, 4))
    inner, outer = (torch.optim.SGD(model.parameters(), 1.0) for _ in range(2))
    alone.begin(model, outer, local=LocalRounds(inner, every=1))

    def serve() -> None:
        raise StopIteration(lock_is_free())

    monkeypatch.setattr(alone, "_serve_newcomers", serve)
    alone.follow_membership(0)
    alone._fetching.add(5)
    alone._ordered.add((0, (0,)))  # this process has run its micro-batches
    with pytest.raises(StopIteration) as said:
        alone.next_order(0)
    assert said.value.value is True


def test_a_round_whose_choice_is_void_is_repeated(alone: Elastic) -> None:
    """The job has gone back to a copy after the round counted, and before this process used its mean."""
    model = fully_shard(nn.Linear(4, 4))
    inner, outer = (torch.optim.SGD(model.parameters(), 1.0) for _ in range(2))
    alone.begin(model, outer, local=LocalRounds(inner, every=1))
    with next(alone.steps(1)) as step:
        for _ in step:
            model(torch.ones(1, 4)).sum().backward()
            inner.step()
        alone._agreement.chosen.clear()
        alone.show_gradients(step.number)
        pytest.fail("it has no mean")
    assert alone.step == 0
