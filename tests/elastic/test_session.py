"""Jobs whose processes end, leave and join (:mod:`fullshard.elastic.session`)."""

from __future__ import annotations

import gc
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard import fully_shard, log_metrics
from fullshard.comm import select
from fullshard.comm.process_group import exchange_in_store
from fullshard.elastic import Elastic
from fullshard.elastic.entry import ElasticError
from fullshard.elastic.job import RepeatStep
from fullshard.elastic.messages import RunOrder
from fullshard.torch_private import default_store
from tests.elastic.__main__ import complaints, random_job, undisturbed
from tests.elastic.jobs import Job, run


@pytest.mark.parametrize(("groups", "place"), [("blocks", "backward 0"), ("wrapped", "inside 0")])
def test_any_process_may_end_and_the_rest_form_a_row(groups: str, place: str) -> None:
    """One process of each row ends, in a pass and before the optimizer, and the other two go on together: of these one
    has had an error in its pass, and the other has not."""
    job = Job(faults={0: [(1, place, "SIGKILL")], 3: [(3, "step", "SIGKILL")]}, groups=groups)
    result = run(job)
    assert complaints(job, result) == []
    assert result.statuses == [-9, 0, 0, -9]
    assert max(result.recoveries()) < 10
    figures = [each["figures"] for each in result.said[1] if "figures" in each]
    assert len(figures) == 2
    assert all(0 < sum(each.values()) < 10 for each in figures)
    assert sum("after the change was noticed" in line for line in result.errors[1].splitlines()) == 2, "it is first"


@pytest.mark.parametrize(("transport", "hosts"), [("", "aabb"), ("", "abc"), ("p2p", "a")])
def test_the_bits_do_not_depend_on_the_hosts(transport: str, hosts: str) -> None:
    """Rows of three processes, on one host or on several, some of which share a host; one is killed."""
    job = Job(3, 2, faults={1: [(2, "forward 0", "SIGKILL")]}, transport=transport, hosts=hosts)
    assert complaints(job, run(job)) == []


def test_a_process_ends_a_step_that_counts_before_it_forms_its_next_row() -> None:
    """The process that stands by is slow, and the other one of its new row waits for its part of a norm."""
    faults = {0: [(1, "begin", "SIGKILL")], 1: [(3, "begin", "0.5")], 3: [(3, "clip", "SIGKILL")]}
    job = Job(faults=faults)
    result = run(job, 30)
    assert complaints(job, result) == []
    assert result.statuses == [-9, 0, 0, -9]


@pytest.mark.parametrize(("groups", "transport"), [("blocks", ""), ("wrapped", "collective")])
def test_a_process_that_stands_by_comes_back_with_a_shard_that_is_needed(groups: str, transport: str) -> None:
    """Of three processes with shard 1, one is left. One of the three with shard 0 takes its place in a second row."""
    faults = {1: [(1, "forward 0", "SIGKILL")], 3: [(1, "backward 1", "SIGKILL")]}
    job = Job(2, 3, 16, faults, pause=0.3, groups=groups, transport=transport)
    result = run(job)
    assert complaints(job, result) == []
    assert sorted((each["ended"], each["shard"]) for each in result.ends() if each["ended"] > 4) == [(5, 1), (6, 1)]
    (moved,) = [one for one in result.said if any(each.get("ended") == 6 for each in one)]
    assert {each["shard"] for each in moved if "shard" in each} == {0, 1}
    assert any(each["ran"][0] > 12 for each in moved if "ran" in each)


@pytest.mark.slow
def test_a_process_that_hangs_is_left_out() -> None:
    job = Job(1, 3, faults={1: [(2, "forward 0", "15")]}, silence=3.0)
    result = run(job)
    assert result.statuses == [0, 3, 0]
    assert result.digests(6) == undisturbed(1, 3, 6).digests(6)
    assert "process 1 hangs: it computes" in result.errors[0]
    assert "process 1 is no longer a member" in result.lost()[0]


def test_replicas_of_one_process_each_outlive_all_but_one() -> None:
    job = Job(1, 3, faults={0: [(1, "forward 1", "SIGKILL")], 2: [(2, "clip", "SIGKILL")]}, transport="collective")
    result = run(job)
    assert complaints(job, result) == []
    assert result.statuses == [-9, 0, -9]


def test_a_lost_shard_is_an_error_that_names_it() -> None:
    job = Job(faults={0: [(1, "begin", "SIGKILL")], 2: [(2, "forward 0", "SIGKILL")]})
    result = run(job)
    assert result.statuses[0] == result.statuses[2] == -9
    assert {result.statuses[1], result.statuses[3]} == {3}
    assert all("no process is left that has shard 0 of 2" in error for error in result.lost())


def test_a_process_joins_and_one_leaves() -> None:
    job = Job(1, 2, 14, {0: [(9, "begin", "SIGTERM")]}, joins=[1], pause=0.5)
    result = run(job)
    assert complaints(job, result) == []
    assert [each["step"] for each in result.ends()] == [10, 14, 14]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["p2p", "collective"])
def test_a_process_may_be_later_than_connecting_may_take(transport: str) -> None:
    job = Job(2, 1, 3, {1: [(1, "backward 0", "12")]}, transport=transport)
    result = run(job)
    assert complaints(job, result) == []
    assert result.statuses == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["", "p2p", "collective"])
def test_a_stopped_process_is_left_out(transport: str) -> None:
    job = Job(faults={2: [(2, "forward 1", "SIGSTOP")]}, transport=transport, silence=4.0)
    result = run(job)
    assert complaints(job, result) == []
    assert result.statuses == [0, 0, -19, 0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_random_jobs(seed: int) -> None:
    job = random_job(seed)
    assert complaints(job, run(job)) == []


def test_one_process_trains_as_without_a_job(alone: Elastic) -> None:
    torch.manual_seed(3)
    model = nn.Linear(4, 4)
    plain = nn.Linear(4, 4)
    plain.load_state_dict(model.state_dict())
    fully_shard(model)
    optimizer, other = (torch.optim.SGD(each.parameters(), 0.1) for each in (model, plain))
    alone.begin(model, optimizer, micro_batches=2)
    data = torch.randn(2, 8, 4)
    for step in alone.steps(3):
        with step:
            for micro_batch in step:
                model(data[micro_batch.number]).square().mean().backward()
            optimizer.step()
        other.zero_grad()
        for each in data:
            plain(each).square().mean().backward()
        other.step()
    assert torch.equal(model.weight.full_tensor(), plain.weight)  # type: ignore[operator]
    assert alone.step == 3


def test_a_row_is_told_that_a_step_counts_and_no_process_ends_the_step_before(
    alone: Elastic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a process that knows it early would begin the next step, and its peers would run this one against it."""
    model = fully_shard(nn.Linear(4, 4))
    optimizer, told = torch.optim.SGD(model.parameters(), 0.1), list[tuple[int, int, bool]]()
    alone.begin(model, optimizer)
    send = alone._send_order

    def note(order: RunOrder) -> None:
        told.append((order.step, order.replica, alone._has_ended(order.step)))
        send(order)

    monkeypatch.setattr(alone, "_send_order", note)
    for step in alone.steps(2):
        with step:
            for _ in step:
                model(torch.ones(2, 4)).sum().backward()
            assert alone._has_ended(step.number)
            optimizer.step()
    assert told == [(step, replica, False) for step in (0, 1) for replica in (0, -1)]
    assert not alone._ordered, "else it grows for ever"


def test_gradients_of_an_aborted_process_group_are_not_kept(alone: Elastic) -> None:
    """NCCL's collectives end when it is aborted, with whatever their outputs are then."""
    model = fully_shard(nn.Linear(4, 4))
    alone.begin(model, torch.optim.SGD(model.parameters(), 0.1))
    assert alone._kept is not None
    for is_aborted in (True, False):
        running = alone.run(RunOrder((0,), 0, 0, 1))
        next(running)
        model(torch.ones(2, 4)).sum().backward()
        alone._aborted = dist.group.WORLD if is_aborted else None
        with pytest.raises(RepeatStep if is_aborted else StopIteration):
            next(running)
        assert alone._kept.has_all(0, [0]) is not is_aborted


def test_a_wait_for_the_device_keeps_no_news_out(
    alone: Elastic, lock_is_free: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Perhaps only the end of a lost process can end it."""
    model, free = fully_shard(nn.Linear(4, 4)), list[bool]()

    class Streams:
        def synchronize(self, _: object) -> None:
            free.append(lock_is_free())

    monkeypatch.setattr("fullshard.elastic.session.streams_of", lambda _: Streams())
    alone.begin(model, torch.optim.SGD(model.parameters(), 0.1))
    for _ in alone.run(RunOrder((0,), 0, 0, 1)):
        model(torch.ones(2, 4)).sum().backward()
    assert free == [True]


def test_an_error_that_quotes_the_backend_is_not_a_loss(alone: Elastic) -> None:
    alone.begin(model := fully_shard(nn.Linear(4, 4)), torch.optim.SGD(model.parameters(), 0.1))
    alone._row = ()  # it could not connect
    said = "[gloo/transport/tcp/pair.cc] Connection refused"
    assert alone.survives(RuntimeError(said), False)
    assert not alone.survives(ElasticError(f"process 0 could not connect with (0, 1): {said}"), False)


def test_buffers_that_a_program_writes_between_steps_are_kept_and_those_of_a_broken_step_are_not(
    alone: Elastic,
) -> None:
    model = fully_shard(nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    alone.begin(model, optimizer)
    began, breaks = list[float](), [True, False, False]
    while alone.step < 2:
        for step in alone.steps(2):
            with step:
                for _ in step:
                    began.append(float(model.running_mean[0]))  # type: ignore[index]
                    model(torch.full((2, 4), 10.0)).sum().backward()
                    if breaks.pop(0):
                        alone._leave_row()  # as if it had lost a process
                        raise RepeatStep
                optimizer.step()
            if alone.step == 1:
                model.running_mean.fill_(7.0)  # type: ignore[union-attr, operator]
            break  # a program may begin its loop again
    assert began == [0.0, 0.0, 7.0]


def test_ranks_may_ask_the_store_of_their_row(alone: Elastic) -> None:
    """What a comparison of ranks tells about a difference goes through it."""
    model = fully_shard(nn.Linear(4, 4))
    alone.begin(model, torch.optim.SGD(model.parameters(), 0.1))
    gc.collect()
    assert exchange_in_store(["here"], "key", dist.group.WORLD) == {0: ["here"]}
    store = default_store()
    assert not store.check(["another"])
    with pytest.raises(RuntimeError, match="has not answered in time"):
        store.wait(["another"], timedelta(seconds=0.2))


def test_what_cannot_be_right_is_refused(alone: Elastic) -> None:
    with pytest.raises(RuntimeError, match=r"elastic.begin\(model, optimizer\) must be called before"):
        next(alone.steps(1))
    model = fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises((TypeError, ValueError), match="micro_batches is 0"):
        alone.begin(model, optimizer, micro_batches=0)
    with pytest.raises((TypeError, ValueError), match="copy_every is -1"):
        alone.begin(model, optimizer, copy_every=-1)
    with pytest.raises(ValueError, match=r"copy_every=2 needs Elastic\(directory="):
        alone.begin(model, optimizer, copy_every=2)
    alone.begin(model, optimizer)
    with pytest.raises(RuntimeError, match="write `with step:`"):
        [*alone.steps(1)]
    with pytest.raises(RuntimeError, match="ended before its micro-batches did"), next(alone.steps(1)):
        pass


def test_metrics_begin_after_the_job(alone: Elastic, tmp_path: Path) -> None:
    model = fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    alone.begin(model, optimizer)
    with log_metrics(model, tmp_path / "metrics"):
        for step in alone.steps(2):
            with step:
                for _ in step:
                    model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
    lines = [json.loads(line) for line in (tmp_path / "metrics").read_text().splitlines()]
    assert [each["step"] for each in lines] == [0, 1]
    assert not [name for each in lines for name in each if name.startswith("change")]


def test_a_step_without_the_optimizer_is_an_error(alone: Elastic) -> None:
    model = fully_shard(nn.Linear(4, 4))
    alone.begin(model, torch.optim.SGD(model.parameters(), 0.1))
    step = next(alone.steps(1)).__enter__()
    for _ in step:
        model(torch.randn(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="the optimizer made no step in step 0"):
        step.__exit__(None, None, None)


def test_a_closed_job_leaves_nothing_behind(launched: None) -> None:
    elastic = Elastic(replicas=1)
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    elastic.close()  # before anything began
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert select._simulated is None


def test_an_error_of_the_user_is_not_swallowed(alone: Elastic) -> None:
    model = fully_shard(nn.Linear(4, 4))
    alone.begin(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(ZeroDivisionError), next(alone.steps(1)):
        1 / 0  # noqa: B018


def test_a_process_group_must_not_exist(alone: Elastic) -> None:
    assert dist.is_initialized()
    with pytest.raises(RuntimeError, match="a process group exists already"):
        Elastic(replicas=1)
    with pytest.raises(ValueError, match="replicas is 0"):
        Elastic(replicas=0)


def test_the_library_does_not_load_it() -> None:
    code = "import sys, fullshard; assert not [name for name in sys.modules if name.startswith('fullshard.elastic')]"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_undisturbed_jobs_are_reproducible() -> None:
    assert all(len(each) == 1 for each in undisturbed(2, 2, 6).digests(6).values())
