"""What the heap keeps for the steps of a model goes with the model."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fullshard.buffer import heap

PROGRAM = """
import gc
import os
import torch
import torch.distributed as dist
from fullshard import fully_shard

torch.set_num_threads(1)
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def train(width):
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(24)])
    for module in (*model, model):
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(8, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


train(16)  # what is loaded at the first use
gc.collect()
before = resident()
train(1024)  # 96 MiB of parameters
gc.collect()
print(resident() - before)
"""


def printed_by(program: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in heap._SETTINGS}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
@pytest.mark.skipif(not heap.set_option(heap.MMAP_THRESHOLD, heap._LARGEST_PIECE), reason="not glibc")
def test_the_memory_of_a_model_is_given_back_with_it() -> None:
    assert float(printed_by(PROGRAM)) < 40


BOUNDED = """
import os
import torch
from fullshard.buffer.heap import bound_freed


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


bound_freed(2**26)
before, pieces = resident(), [torch.ones(2**18) for _ in range(400)]  # of a MiB
del pieces[::2], pieces[::2]  # every fourth stays, so that the others are holes
holes = resident()
bound_freed(2**26)
print(holes - before, resident() - before, float(sum(each.sum() for each in pieces)))
pieces += [torch.ones(2**18) for _ in range(40)]
del pieces[-40:]
held = resident()
bound_freed(2**26)
print(held - resident())
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(heap._libc, "mallinfo2"), reason="not glibc")
def test_freed_memory_between_what_is_in_use_is_bounded() -> None:
    holes, returned, total, kept = map(float, printed_by(BOUNDED).split())
    assert holes > 350
    assert returned < 150
    assert total == 100 * 2**18
    assert kept < 8, "little that was freed stays for the next pieces"


AT_ONCE = """
import os
import torch
from fullshard.buffer.heap import MMAP_THRESHOLD, keep_freed, return_at_once, set_option


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


set_option(MMAP_THRESHOLD, 2**25)
earlier = [torch.ones(2**18) for _ in range(100)]  # of a MiB
del earlier[::3], earlier[::2]  # what stays is between holes
return_at_once()
before = resident()
keep_freed(owner := torch.nn.Linear(1, 1), 2**30)
pieces = [torch.ones(2**18) for _ in range(100)]
del pieces[:99]
print(resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(heap._libc, "mallinfo2"), reason="not glibc")
def test_nothing_that_was_freed_is_kept_where_memory_is_scarce() -> None:
    assert float(printed_by(AT_ONCE)) < 8


class Owner:
    pass


@pytest.mark.skipif(any(name in os.environ for name in heap._SETTINGS), reason="the user has decided")
def test_the_threshold_is_that_of_the_largest_that_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    for name, value in {"_asked": {}, "kept": 0, "set_option": lambda *args: told.append(args) or True}.items():
        monkeypatch.setattr(heap, name, value)
    small, large = Owner(), Owner()
    heap.keep_freed(small, 2**27)
    heap.keep_freed(large, 2**40)
    assert heap.kept == 2**31 - 1
    del large
    assert heap.kept == 2**27
    del small
    assert heap.kept == 0
    thresholds = [value for option, value in told if option == heap.TRIM_THRESHOLD]
    assert thresholds == [2**27, 2**31 - 1, 2**27, heap.KEPT_BY_ITSELF]
