"""Who is compared: fullshard with each of its transports, torch's FSDP2, FSDP1 and DDP, and training without others.

A :class:`Contender` knows how its library is applied to a model, the way its documentation tells, and nothing of what
is measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fullshard
from benchmarks.least import shard_least
from fullshard.buffer import heap
from fullshard.comm import select

_VARIABLE = "FULLSHARD_TRANSPORT"


#: Bytes: twice the largest piece that the heap may serve, see M_MMAP_THRESHOLD in mallopt(3).
_GLIBC_KEEPS = 2 * 32 * 2**20


@dataclass(frozen=True)
class Contender:
    """A way to train a model on the ranks of the default process group.

    Args:
        name: how tables call it.
        library: ``fullshard``, ``wrapper`` (its second front end), ``FSDP2``, ``FSDP1``, ``DDP``, ``alone``, or
            ``least``, where next to nothing but calls of torch is left of a library.
        transport: which transport of fullshard moves its buffers.
        forced: whether it is asked for by name, and not what fullshard chooses by itself here.
    """

    name: str
    library: str
    transport: str = ""
    forced: bool = False

    @property
    def is_sharded(self) -> bool:
        return self.library in ("fullshard", "wrapper", "FSDP2", "FSDP1")

    def settle_heap(self) -> None:
        """Let ``malloc`` keep as much freed memory as it does in a process of this contender alone.

        fullshard tells glibc what to keep, for the whole process. Where nobody does, glibc keeps at most as much as
        :data:`_GLIBC_KEEPS` once large pieces have been freed.
        """
        if heap.kept:
            heap.set_option(
                heap.TRIM_THRESHOLD, heap.kept if self.library in ("fullshard", "wrapper") else _GLIBC_KEEPS
            )

    def wrap(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        reshard: bool | None = None,
        materialize: Callable[[nn.Module], None] | None = None,
        casts: bool = False,
    ) -> nn.Module:
        """Shard (or replicate) ``model``, with a group for each of ``blocks`` and one for the rest.

        Args:
            reshard: free parameters after forward; ``None`` leaves the choice for the root to the library.
            materialize: gives a module on the meta device its values, for the library that does so while it shards.
            casts: compute in bf16 and reduce in fp32, for those of ``fully_shard``.
        """
        if self.library == "alone":
            return model
        if self.library == "least":
            return shard_least(model, blocks)
        if self.library == "DDP":
            return DistributedDataParallel(model)
        if self.library == "FSDP1":
            return _wrap_fsdp1(torch_fsdp, model, blocks, reshard, materialize)
        if self.library == "FSDP2":
            return _wrap_composable(torch_fsdp, model, blocks, reshard, casts)
        with _transport(self.transport if self.forced else ""):
            if self.library == "wrapper":
                return _wrap_fsdp1(fullshard, model, blocks, reshard, materialize)
            return _wrap_composable(fullshard, model, blocks, reshard, casts)


def _wrap_composable(
    library: Any, model: nn.Module, blocks: Sequence[nn.Module], reshard: bool | None, casts: bool
) -> nn.Module:
    policy = library.MixedPrecisionPolicy(*([torch.bfloat16, torch.float32] if casts else []))
    for block in blocks:
        library.fully_shard(block, reshard_after_forward=reshard is not False, mp_policy=policy)
    library.fully_shard(model, reshard_after_forward=reshard, mp_policy=policy)
    return model


def _wrap_fsdp1(
    library: Any,
    model: nn.Module,
    blocks: Sequence[nn.Module],
    reshard: bool | None,
    materialize: Callable[[nn.Module], None] | None,
) -> nn.Module:
    strategies = library.ShardingStrategy
    wrapped: nn.Module = library.FullyShardedDataParallel(
        model,
        sharding_strategy=strategies.SHARD_GRAD_OP if reshard is False else strategies.FULL_SHARD,
        auto_wrap_policy=torch_fsdp.wrap.CustomPolicy(lambda module: any(module is block for block in blocks)),
        device_id=torch.device("cpu"),
        use_orig_params=True,
        param_init_fn=materialize,
    )
    return wrapped


@contextmanager
def _transport(name: str) -> Iterator[None]:
    """Groups made inside use the transport of that name."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before


FSDP2 = Contender("torch FSDP2", "FSDP2")
FSDP1 = Contender("torch FSDP1", "FSDP1")
DDP = Contender("DDP", "DDP")
ALONE = Contender("no communication", "alone")
LEAST = Contender("torch's calls alone", "least")


def ours(every_transport: bool = True) -> list[Contender]:
    """fullshard with the transport that it chooses here, and then with every other that works here."""
    group, device = dist.group.WORLD, torch.device("cpu")
    assert group is not None
    chosen = select.select_transport(group, device).name
    found = [Contender("fullshard", "fullshard", chosen)]
    if every_transport:
        found.append(Contender("fullshard, wrapper", "wrapper", chosen))
    for name in ("shm", "p2p", "collective") if every_transport else ():  # those of one host
        with _transport(name):
            try:
                usable = select.select_transport(group, device)
            except ValueError:
                continue
        if usable.name != chosen:
            found.append(Contender(f"fullshard, {name}", "fullshard", name, forced=True))
    return found
