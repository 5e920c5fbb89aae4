"""When a process begins to be watched: not before it waits for other ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard.comm.select import select_transport
from fullshard.comm.waits import WAITS, waiting
from fullshard.watch import watch
from tests.harness import World, ranks

ALONE = """
import atexit, sys, threading
register, registered = atexit.register, []
def note(function, *args, **kwargs):
    registered.append(str(getattr(function, "__module__", "")))
    return register(function, *args, **kwargs)
atexit.register = note
import torch
import torch.distributed as dist
import torch.distributed.tensor
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def seen():
    ours = [name for name in registered if name.startswith("fullshard")]
    return sorted(thread.name for thread in threading.enumerate()), sys.excepthook, ours, [*sys.meta_path]
before = seen()
import fullshard
assert seen() == before, seen()
model = fullshard.fully_shard(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
assert seen()[:3] == before[:3], seen()
assert [type(each).__module__ for each in sys.meta_path if each not in before[3]] == ["fullshard_at_start"]
"""


def test_nothing_starts_on_import_or_without_other_ranks() -> None:
    """No thread, no function at the end of the process or after an error; a finder only once something is sharded."""
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", ALONE], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def is_watched() -> bool:
    return watch._watch is not None and watch._watch.is_current and watch._watch.thread.is_alive()


@ranks(2, fresh=True)
def test_the_watch_starts_with_the_first_wait_for_other_ranks(world: World) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = "p2p"
    assert dist.group.WORLD is not None
    hook = sys.excepthook
    select_transport(dist.group.WORLD, torch.device("cpu"))
    assert (is_watched(), sys.excepthook) == (False, hook)
    fullshard.fully_shard(nn.Linear(4, 4))
    assert is_watched()


@ranks(2, fresh=True)
def test_with_checks_off_nothing_is_watched(world: World) -> None:
    os.environ["FULLSHARD_CHECKS"] = "0"
    model = fullshard.fully_shard(nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    assert not is_watched()


@ranks(2, fresh=True)
def test_a_store_that_serves_no_watch_is_asked_once(world: World) -> None:
    """Each wait begins with the question whether there is a watch."""
    asked: list[Any] = []

    def refuse(store: Any, before: Any) -> None:
        asked.append(store)
        raise RuntimeError("a store of another kind")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "Watch", refuse)
        for _ in range(3):
            with waiting("a comparison", None):
                assert WAITS.current is not None
    assert len(asked) == 1
    assert not is_watched()
