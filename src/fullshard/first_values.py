"""Whether the ranks began with the same values. With different seeds they would shard different models, silently.

Programs may load values after sharding, so ranks compare at the first forward, and only parameters that still have the
values with which they were sharded. By then each rank has only its part of them. So before sharding, a hash of a few
elements of each parameter is kept. It costs milliseconds, and nothing in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
import torch.distributed as dist

from fullshard.comm.process_group import gather_objects, has_peers
from fullshard.disk.tensor import DiskTensor
from fullshard.group.mesh import DataMesh
from fullshard.group.param_group import ParamGroup
from fullshard.group.parameter import ShardedParameter
from fullshard.group.verify import compare
from fullshard.schedule.schedule import Schedule, Scheduled, first_checks
from fullshard.torch_private import plain_parts

_SAMPLES = 63  # odd, so that equal values do not cancel out


class FirstValues:
    """Hashes of the values of parameters that are about to be sharded."""

    def __init__(self, params: Sequence[ShardedParameter]) -> None:
        self._params = params
        self._whole = _hashes([param.values for param in params])
        self._chunks: list[int | None] = []

    def keep(self, group: ParamGroup) -> None:
        """Keep them for ``group``, which has just sharded the parameters."""
        self._chunks = _hashes([param.values for param in self._params])
        group.first_values = self

    def unchanged(self) -> list[int | None]:
        """The hash of each parameter. ``None`` where this rank has none of its values, or they have changed."""
        now = _hashes([param.values for param in self._params])
        pairs = zip(self._whole, self._chunks, now, strict=True)
        return [None if None in (before, after) or before != after else whole for whole, before, after in pairs]

    def assumed(self, unchanged: Sequence[int | None]) -> list[int | None]:
        """The same, where a parameter of which this rank has nothing is assumed to have changed as all others have."""
        has_changed = any(
            each is None and chunk is not None for each, chunk in zip(unchanged, self._chunks, strict=True)
        )
        return [
            whole if chunk is None and not has_changed else each
            for whole, chunk, each in zip(self._whole, self._chunks, unchanged, strict=True)
        ]


@torch.no_grad()
def _hashes(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """A hash of a few elements of each tensor; ``None`` for those without values in memory."""
    samples = {}
    for index, tensor in enumerate(tensors):
        inner = () if isinstance(tensor, DiskTensor) else plain_parts(tensor)
        parts = [part.reshape(-1) for part in inner if part.numel() and not part.is_meta]
        flat = [torch.view_as_real(part).view(-1) if part.is_complex() else part for part in parts]
        flat = [part.view(torch.uint8) if part.itemsize == 1 else part for part in flat]
        taken = [part[:: max(1, part.numel() // _SAMPLES)][:_SAMPLES].double() for part in flat]
        if taken:
            samples[index] = torch.cat(taken)[:_SAMPLES] if len(taken) > 1 else taken[0]
    found: list[int | None] = [None] * len(tensors)
    if samples:
        lengths = [len(each) for each in samples.values()]
        every = torch.cat([*samples.values()]).cpu().split(lengths)  # one copy from a device
        rows = torch.nn.utils.rnn.pad_sequence(list(every), batch_first=True)
        digests = reduce(torch.bitwise_xor, rows.view(torch.int64).unbind(1))
        for index, digest in zip(samples, digests.tolist(), strict=True):
            found[index] = digest
    return found


def _compare(schedule: Schedule, unit: Scheduled) -> None:
    """Compare the values with which parameters of a tree were sharded, at its first forward.

    Raises:
        ValueError: on every rank, if a parameter had different values on two ranks, and has them still.
    """
    found: dict[dist.ProcessGroup, list[tuple[str, int | None, int | None]]] = {}
    for group in sorted(schedule.groups, key=lambda group: group.tag):
        values, group.first_values = group.first_values, None
        if not isinstance(values, FirstValues):
            continue
        unchanged = values.unchanged()
        names = [param.name for param in group.params]
        entries = [*zip(names, unchanged, values.assumed(unchanged), strict=True)]
        for process_group in filter(has_peers, (group.data.replicate_group, group.data.shard_group)):
            assert process_group is not None
            found.setdefault(process_group, []).extend(entries)
    for process_group, every in found.items():
        if len({*gather_objects(hash(tuple(assumed or 0 for *_, assumed in every)), process_group)}) == 1:
            continue
        told = dict(
            zip(
                dist.get_process_group_ranks(process_group),
                gather_objects([known for _, known, _ in every], process_group),
                strict=True,
            )
        )
        for index, (name, *_) in enumerate(every):
            have = {rank: known[index] for rank, known in told.items() if known[index] is not None}
            first = next(iter(have), 0)
            if other := next((rank for rank in have if have[rank] != have[first]), None):
                error = ValueError(
                    f"the ranks began with different values: parameter '{name}' was sharded with other values on rank "
                    f"{other} than on rank {first}. Seed all ranks alike before the model is built, as by "
                    f"torch.manual_seed, or load one state dict on all of them before the first forward"
                )
                error.shown_by_rank = min(told)  # type: ignore[attr-defined]
                raise error


first_checks.append(_compare)


def verify_values(params: Sequence[ShardedParameter], data: DataMesh) -> None:
    """Compare all values of parameters that are about to be sharded, see :func:`~fullshard.group.verify.compare`."""
    described = [f"'{p.name}' with values of hash {_hash(p.local)}" for p in params]
    advice = "Seed all ranks alike before the model is built, or load one state dict on all of them"
    for group in (data.replicate_group, data.shard_group):
        compare(described, 0, group, "begin with different values", advice)


@torch.no_grad()
def _hash(tensor: torch.Tensor) -> str:
    """A text that distinguishes values: a hash of their bits, in which equal values cancel out, and their sum."""
    parts = [torch.view_as_real(part) if part.is_complex() else part for part in plain_parts(tensor)]
    if tensor.is_meta or not tensor.numel():
        return "none"
    return ", ".join(f"{torch.hash_tensor(part).item():x} ({part.sum(dtype=torch.float64).item():g})" for part in parts)
