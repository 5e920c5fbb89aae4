"""What a rank writes down while it waits."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard.checkpoint.ranks import Ranks
from fullshard.comm import process_group
from fullshard.comm.waits import WAITS, PeerFailureError, describe, waiting
from fullshard.watch import watch
from tests.harness import World, ranks


def seen_in(wait: Callable[[], object], is_late: bool) -> list[str]:
    """What another thread sees meanwhile; a rank that is late waits for nobody."""
    seen: list[str] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.005):
            if (found := WAITS.current) is not None:
                seen.append(describe(found))

    dist.barrier()
    thread = threading.Thread(target=look)
    thread.start()
    time.sleep(0.2 if is_late else 0.0)
    wait()
    over.set()
    thread.join()
    return sorted(set(seen))


@ranks(2)
def test_every_wait_is_seen(world: World) -> None:
    """For ranks of which one is late: the other one waits, and says for what."""
    os.environ["FULLSHARD_TRANSPORT"] = "p2p"
    model = fullshard.FullyShardedDataParallel(nn.Linear(4, 4))
    separate = fullshard.fully_shard(nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    told, is_late = Ranks(None), world.rank == 1
    without_lengths = mock.patch.object(process_group, "gather_objects", lambda mine, _: [mine] * 2)  # another wait
    waits: dict[str, Callable[[], object]] = {
        "each rank's message to the first about a checkpoint": partial(without_lengths(told.gather_to_first), 1),
        "a question to all ranks": lambda: told.any(False),
        "the norm of the gradients": lambda: model.clip_grad_norm_(1.0),
        "a process group to be made": separate.set_separate_reduce_scatter_group,
    }
    for name, wait in waits.items():
        seen = seen_in(wait, is_late)
        assert is_late or name in seen, (name, seen)


@ranks(1)
@pytest.mark.parametrize(
    "error",
    [RuntimeError("of a user"), torch.OutOfMemoryError("no memory"), NotImplementedError("no such operation")],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_is_no_backends_stays_as_it_is(world: World, error: Exception) -> None:
    with pytest.raises(type(error)) as found, waiting("an all-reduce", None):
        raise error
    assert found.value.__class__ is error.__class__
    assert WAITS.current is None


@ranks(1)
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/b/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection reset"),
        RuntimeError("Application timeout caused pair closure"),
        dist.DistBackendError("NCCL communicator was aborted"),
    ],
    ids=["gloo", "gloo after a timeout", "NCCL"],
)
def test_an_error_of_a_backend_says_that_a_rank_was_lost(
    world: World, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_NEWS", 0.1)  # there are none
    lost = pytest.raises(PeerFailureError, match="lost its connection to another rank in an all-reduce")
    with lost as found, waiting("an all-reduce", None):
        raise error
    assert found.value.__cause__ is error
