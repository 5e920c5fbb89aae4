"""Gathers and reductions at many sizes: messages between pairs of ranks beside the process group's own collectives.

It is the measurement from which the library chooses between the two, for ranks on several hosts. A group has the
parameters of a transformer's block; sizes are bytes of the whole group, rounded down to a width that 8 divides.
Transports take turns.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.models import Block
from benchmarks.ranks import run_ranks
from fullshard.buffer.plan import ParamShape, make_plan
from fullshard.comm.collective import CollectiveTransport
from fullshard.comm.point_to_point import PointToPointTransport
from fullshard.comm.transport import Reduction, Route, Transfer

#: Bytes that the exchanges of one turn move together, about; at least one is made.
_TURN = 16 * 2**20


def measure_exchanges(sizes: list[int], ranks: list[int], rounds: int) -> list[dict[str, Any]]:
    """For each number of ranks, size, exchange and transport: CPU seconds by round, all threads, mean of the ranks."""
    return [{"ranks": count, "sizes": _merge(run_ranks(_measure, count, sizes, rounds))} for count in ranks]


def _merge(by_rank: list[dict[int, Any]]) -> dict[int, Any]:
    return {
        size: {
            what: {name: {"cpu": _means([rank[size][what][name] for rank in by_rank])} for name in names}
            for what, names in found.items()
        }
        for size, found in by_rank[0].items()
    }


def _means(by_rank: list[list[float]]) -> list[float]:
    return [sum(taken) / len(taken) for taken in zip(*by_rank, strict=True)]


def _measure(sizes: list[int], rounds: int) -> dict[int, dict[str, dict[str, list[float]]]]:
    return {size: _take_turns(_exchanges(size), _count(size), rounds) for size in sizes}


def _count(size: int) -> int:
    """Exchanges that are timed together."""
    return min(40, max(1, _TURN // (size * dist.get_world_size())))


def _exchanges(size: int) -> dict[tuple[str, str], Callable[[], None]]:
    group, world_size = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    width = max(8, int((size / 48) ** 0.5) // 8 * 8)  # a block of this width has 48 width² bytes
    shapes = [ParamShape(name, tuple(param.shape)) for name, param in Block(width).named_parameters()]
    plan = make_plan(shapes, world_size)
    transfer = Transfer(plan, torch.zeros(plan.full_numel), torch.zeros(plan.shard_numel))
    found: dict[tuple[str, str], Callable[[], None]] = {}
    for transport in (PointToPointTransport(), CollectiveTransport()):
        found["gather", transport.name] = partial(_gather, transport.gather_route([transfer], group, 0))
        found["reduction", transport.name] = partial(_reduce, transport.reduce_route([transfer], group, 1), transfer)
    return found


def _gather(route: Route) -> None:
    route.start().finish()


def _reduce(route: Route, transfer: Transfer) -> None:
    route.start([transfer.shard], Reduction(transfer.plan.world_size)).finish()


def _take_turns(
    exchanges: dict[tuple[str, str], Callable[[], None]], count: int, rounds: int
) -> dict[str, dict[str, list[float]]]:
    seconds: dict[str, dict[str, list[float]]] = {}
    order = list(exchanges)
    for number in range(-1, rounds):
        random.Random(number).shuffle(order)
        for what, name in order:
            dist.barrier()
            begin = time.process_time()
            for _ in range(count):
                exchanges[what, name]()
            taken = (time.process_time() - begin) / count
            if number >= 0:
                seconds.setdefault(what, {}).setdefault(name, []).append(taken)
    return seconds
