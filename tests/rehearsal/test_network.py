"""The simulated network: its collectives take their time, and all ranks have this rank's data."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fullshard.rehearsal import network

PROGRAM = """
import sys, time
import torch
import torch.distributed as dist
from fullshard.rehearsal.network import RehearsalError, connect

network = connect(2, 8, latency=0.01, bandwidth=1e6, in_python=sys.argv[1] == "python")
assert bool(network.why) == (sys.argv[1] == "python"), network.why
dist.init_process_group("nccl", world_size=8, rank=0)
assert (dist.get_rank(), dist.get_world_size()) == (2, 8)

whole, part = torch.zeros(16), torch.tensor([1.0, 2.0])
dist.all_gather_into_tensor(whole, part)
assert whole.tolist() == [1, 2] * 8
whole = torch.arange(16.0)
dist.reduce_scatter_tensor(part, whole)
assert part.tolist() == [32, 40]
dist.reduce_scatter_tensor(part, whole, op=dist.ReduceOp.AVG)
assert part.tolist() == [4, 5]
inside = whole.view(8, 2)[2]
dist.all_gather_into_tensor(whole, inside)  # in place
assert whole.tolist() == [4, 5] * 8
dist.all_reduce(counts := torch.tensor([3]))
assert counts.tolist() == [24]
dist.all_reduce(highest := torch.tensor([3.0]), op=dist.ReduceOp.MAX)
assert highest.tolist() == [3]
dist.all_to_all_single(received := torch.zeros(8), torch.arange(8.0))
assert received.tolist() == [2] * 8
dist.broadcast(part, 0)
every = [None] * 8
dist.all_gather_object(every, "mine")
assert every == ["mine"] * 8
assert dist.new_group([2, 3], backend="gloo").size() == 2
dist.send(part, 3)
dist.recv(whole[:2], 1)
dist.barrier()

before, begin = network.totals()["all-gather"], time.perf_counter()
works = [dist.all_gather_into_tensor(torch.zeros(8 * 2500), torch.ones(2500), async_op=True) for _ in range(2)]
assert time.perf_counter() - begin < 0.16  # nobody has waited for them
for work in works:
    work.wait()
after, seconds = network.totals()["all-gather"], time.perf_counter() - begin
assert (after.count - before.count, after.bytes - before.bytes) == (2, 140_000)
assert abs(after.seconds - before.seconds - 0.16) < 1e-6  # 2 x (latency + 70 kB)
assert seconds >= 0.16  # one link carries them, one after the other

for refused, words in (
    (lambda: dist.recv(torch.zeros(3), 1), "has not sent such a message itself"),
    (lambda: dist.distributed_c10d._get_default_store().get("theirs"), "waits in the store"),
    (lambda: torch.multiprocessing.spawn(print), "only one rank is there"),
    (lambda: dist.all_reduce(part, op=dist.ReduceOp.PRODUCT), "cannot be simulated"),
):
    try:
        refused()
    except (RehearsalError, RuntimeError) as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)
"""


@pytest.mark.parametrize("how", ["python", pytest.param("native", marks=pytest.mark.slow)])
def test_collectives_take_their_time_and_bring_what_equal_ranks_would(how: str) -> None:
    """In a process of its own, as the functions of torch.distributed are replaced; *native* needs a compiler."""
    command = [sys.executable, "-c", PROGRAM, how]
    subprocess.run(command, check=True, env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}, timeout=280)


def test_the_source_of_the_backend_is_part_of_the_package() -> None:
    assert network._SOURCE.is_file()
