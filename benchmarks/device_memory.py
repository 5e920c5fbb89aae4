"""Memory of a device in a step, in bytes that the allocator has given: fullshard beside torch's FSDP2.

Nothing is measured on a device: a process is one rank of many, as in :mod:`benchmarks.launches`, and the allocator of
the CPU tells what it gives and takes back. Computing is in bf16, shards and reductions are in fp32. Models are small,
and so is what fullshard takes for large memory of a device::

    python -m benchmarks.device_memory
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.contenders import FSDP2, Contender
from benchmarks.launches import OURS, simulated_device
from benchmarks.models import Work
from benchmarks.ranks import run_simulated
from fullshard.buffer import slots
from fullshard.group import comm_context
from fullshard.schedule import schedule

#: By how much the models are smaller than those that a device trains.
_SCALE = 2**8
#: Models in which most memory is that of blocks, of the embedding and the head, and of activations.
WORKS = (
    Work("blocks", blocks=4, width=512, sequence=16, vocabulary=64),
    Work("vocabulary", blocks=4, width=256, sequence=16, vocabulary=16_384),
    Work("activations", blocks=6, width=256, sequence=1024, vocabulary=1024),
)


def measure_device_memory(world_size: int = 8) -> dict[str, dict[str, dict[str, int]]]:
    """By work and contender: bytes at the peak of forward and of backward above what the shards take, and between
    them."""
    return {
        work.name: {each.name: run_simulated(_measure, world_size, each, work) for each in (OURS, FSDP2)}
        for work in WORKS
    }


def _measure(contender: Contender, work: Work) -> dict[str, int]:
    with (
        mock.patch.object(slots, "LARGE", slots.LARGE // _SCALE),
        mock.patch.object(comm_context, "LARGE", slots.LARGE // _SCALE),
        mock.patch.object(schedule, "EARLY", schedule.EARLY // _SCALE),
        simulated_device() if contender == OURS else nullcontext(),
    ):
        whole = work.build()
        model = contender.wrap(whole, list(whole.blocks), casts=True)

        def step() -> None:
            loss = model(work.batch(0, 0))
            with record_function("between"):
                pass
            loss.backward()
            model.zero_grad()

        for _ in range(3):
            step()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            step()
    events: list[Any] = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    found = {"forward": 0, "between": 0, "backward": 0}
    now, phase = 0, "forward"
    for event in events:
        if event.name() == "between":
            found["between"], phase = now, "backward"
        elif event.name() == "[memory]":
            now += event.nbytes()
            found[phase] = max(found[phase], now)
    return found


if __name__ == "__main__":
    for name, each in measure_device_memory().items():
        ours, theirs = each.values()
        for phase in ours:
            ratio = ours[phase] / theirs[phase]
            print(f"{name:12} {phase:9} {ours[phase] / 2**20:8.1f} {theirs[phase] / 2**20:8.1f} MiB  {ratio:.2f}")
