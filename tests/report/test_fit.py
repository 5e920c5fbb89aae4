"""Whether a step fits into the memory of a device."""

from __future__ import annotations

import torch
from torch import nn

import fullshard
from fullshard.report.explain import explain
from fullshard.report.fit import fit_into


def linear() -> nn.Module:
    return fullshard.fully_shard(nn.Linear(1024, 1024, bias=False))


#: Bytes of the weight and of a rank's shard.
WEIGHT, SHARD = 4 * 2**20, 2**20


def test_a_step_fits_to_the_byte() -> None:
    batch = torch.empty(256, 1024, device="meta")
    found = explain(linear, ranks=4, batch=batch, device_memory="1GB")
    needed = max(phase.nbytes for phase in found.memory)
    assert found.fit is not None
    assert found.fit.needed == needed > 4 * SHARD + 2 * WEIGHT + 256 * 1024 * 4
    assert found.fit.fits
    assert "yes, with" in str(found)
    assert "Not counted: temporary memory" in str(found)
    exact, short = (fit_into(size, found.memory, True) for size in (needed, needed - 1))
    assert (exact.fits, exact.missing, short.fits, short.missing) == (True, 0, False, 1)
    assert "no, short by 1 B" in str(short)


def test_what_is_not_counted_is_said() -> None:
    assert "Not counted: activations, temporary memory" in str(explain(linear, ranks=4, device_memory="80GB"))
    assert explain(linear, ranks=4).fit is None, "the memory of the CPU is not the ranks' own"


def test_offloaded_parameters_take_no_memory_of_the_device() -> None:
    def offloaded() -> nn.Module:
        policy = fullshard.CPUOffloadPolicy(pin_memory=False)
        return fullshard.fully_shard(nn.Linear(1024, 1024, bias=False), offload_policy=policy)

    kept, off = (explain(build, ranks=4, device_memory="80GB") for build in (linear, offloaded))
    assert kept.fit is not None
    assert off.fit is not None
    assert off.memory[0].parts == (("shards on the CPU", 1, SHARD), ("optimizer state on the CPU", 1, 2 * SHARD))
    assert off.memory[0].nbytes == kept.memory[0].nbytes
    assert off.memory[0].on_device == 0
    assert 3 * SHARD <= kept.fit.needed - off.fit.needed <= 4 * SHARD  # and the gradients
