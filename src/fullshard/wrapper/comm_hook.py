"""Gradients reduced by a function of the user's, in the form that ``torch.distributed.algorithms`` has them.

Owns the transport by which the engine calls such a hook. Compression, sums and divisions are the hook's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm.transport import GatherRoute, MovesPrivately, ReduceRoute, Reduction, Transfer
from fullshard.device import Done, Pending
from fullshard.group.group import Group

Hook = Callable[..., Any]


def use_hook(groups: Sequence[Group], state: object, hook: Hook) -> None:
    """Reduce the gradients of ``groups`` by ``hook`` from now on."""
    transport = _HookTransport(state, hook)
    for group in groups:
        if group.data.shard_group is None:
            group.options.all_reduce = partial(hook, state)
            group.options.divide_factor = 1.0
        else:
            group.use_transport(reduce=transport)


class _HookTransport(MovesPrivately):
    """Reduces flat sections by a hook; it gathers nothing."""

    name = "hook"

    def __init__(self, state: object, hook: Hook) -> None:
        self._state, self._hook = state, hook

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def gather_route(self, transfers: Sequence[Transfer], process_group: dist.ProcessGroup, tag: int) -> GatherRoute:
        raise NotImplementedError("a communication hook reduces and does not gather")

    def reduce_route(self, transfers: Sequence[Transfer], process_group: dist.ProcessGroup, tag: int) -> ReduceRoute:
        return _HookRoute([transfer.full for transfer in transfers], partial(self._hook, self._state))


class _HookRoute:
    def __init__(self, fulls: Sequence[torch.Tensor], hook: Hook) -> None:
        self._fulls, self._hook = fulls, hook

    def start(self, shards: Sequence[torch.Tensor], reduction: Reduction) -> Pending:
        for full, shard in zip(self._fulls, shards, strict=True):
            # Hooks that compress swap the data of what they are given: aliases, for the views here are used again.
            reduced = torch.empty(shard.shape, dtype=full.dtype, device=full.device)
            self._hook(full.detach(), reduced)
            shard.copy_(reduced)
        return Done()
