"""A store, and the watch of a process group of one rank over it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from fullshard.watch.watch import Watch


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))


@pytest.fixture
def watcher(store: Any) -> Any:
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield Watch(store)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def key(watcher: Watch) -> str:
    """What the keys of the reports begin with. It has the number of process groups that were tried before."""
    return watcher._reports._key
