"""What sharding costs the host: time and calls for each group in a step, where communication is free.

One process simulates a rank of many, and collectives do nothing. A chain of small blocks is run forward and
backward; what the same chain costs without sharding is subtracted, so that what is left is the library's own, and it is
divided by the number of blocks.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.contenders import ALONE, FSDP1, FSDP2, LEAST, Contender, ours
from benchmarks.figures import Spread, spread
from benchmarks.models import Chain
from benchmarks.ranks import run_simulated

_WARM_UP = 4


@dataclass(frozen=True)
class Host:
    """Costs for each group in a step.

    Args:
        seconds: median over rounds of what the library itself takes, with lower and upper quartile.
        calls: calls of Python and of C functions, which are the same in every step.
    """

    transport: str
    seconds: Spread
    calls: float


def measure_host(world_size: int, counts: list[int], groups: int, rounds: int) -> dict[str, Any]:
    """For each number of parameters in a group, and each contender, its costs."""
    return {"ranks": world_size, "counts": run_simulated(_measure, world_size, counts, groups, rounds)}


def _measure(counts: list[int], groups: int, rounds: int) -> dict[int, dict[str, Any]]:
    contenders = [*ours(every_transport=False), FSDP2, FSDP1, LEAST, ALONE]
    library = _free_collectives()
    found = {count: _measure_count(contenders, count, groups, rounds) for count in counts}
    del library
    return found


def _measure_count(contenders: list[Contender], count: int, groups: int, rounds: int) -> dict[str, Any]:
    models: dict[str, nn.Module] = {}
    for contender in contenders:
        chain = Chain(groups, count)
        models[contender.name] = contender.wrap(chain, list(chain.blocks))
    for model in models.values():
        for _ in range(_WARM_UP):
            _run(model)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    order = list(models)
    for number in range(rounds):
        random.Random(number).shuffle(order)
        for name in order:
            seconds[name].append(_run(models[name]))
    calls = {name: _count_calls(model) for name, model in models.items()}
    found: dict[str, Any] = {}
    for contender in contenders[:-1]:
        pairs = zip(seconds[contender.name], seconds[ALONE.name], strict=True)
        own = spread([(sharded - alone) / groups for sharded, alone in pairs])
        found[contender.name] = vars(
            Host(contender.transport, own, (calls[contender.name] - calls[ALONE.name]) / groups)
        )
    return found


def _run(model: nn.Module) -> float:
    """A forward and a backward; the optimizer's part is not the library's."""
    x = torch.ones(1024, requires_grad=True)
    begin = time.process_time()  # nothing waits here, and other programs on the machine do not count
    model(x).sum().backward()
    seconds = time.process_time() - begin
    for param in model.parameters():
        param.grad = None
    return seconds


class _Catch(TorchDispatchMode):
    """Keeps what the last operator returned."""

    result: Any = None

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.result = func(*args, **(kwargs or {}))
        return self.result


def _free_collectives() -> torch.library.Library:
    """Collectives that do nothing while the result lives. Those of the fake group copy something for each rank."""
    tensor = torch.empty(dist.get_world_size())
    catch = _Catch()  # type: ignore[no-untyped-call]
    with catch:
        dist.reduce_scatter(tensor[:1], list(tensor.split(1)))
    _, ended = catch.result

    def nothing(output: torch.Tensor, *others: Any) -> tuple[torch.Tensor, Any]:
        return output, ended

    library = torch.library.Library("c10d", "IMPL")
    for name in ("_allgather_base_", "_reduce_scatter_base_"):
        library.impl(name, nothing, "CPU", allow_override=True)
    return library


def _count_calls(model: nn.Module) -> int:
    count = 0

    def notice(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    x = torch.ones(1024, requires_grad=True)
    sys.setprofile(notice)
    try:
        model(x).sum().backward()
    finally:
        sys.setprofile(None)
    for param in model.parameters():
        param.grad = None
    return count
