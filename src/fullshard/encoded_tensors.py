"""Tensors that are encoded, decoded and added up as parcels.

The CPU takes one parcel at a time, whose numbers stay in its caches. A device takes many together, because each kernel
that it starts costs more than a small parcel: their numbers stand end to end, at most :data:`TOGETHER` of them, so that
the memory that this takes has a limit. Owns the two ways. It knows no ranks and no parameters, and leaves the formats
to :mod:`fullshard.encodings`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from fullshard.device import is_host
from fullshard.encodings import Encoding, Numbers, add_scaled
from fullshard.torch_private import Tensors, foreach_copy

#: Numbers that a device encodes or decodes together: 64 MiB of fp32. A parcel may be larger.
TOGETHER = 2**24


class EncodedTensors(NamedTuple):
    """Tensors that are encoded as one parcel, and the parcel.

    Attributes:
        starts: where the numbers of each tensor begin in the parcel, on a boundary of blocks.
        numel: numbers of the parcel, a multiple of a block.
        encoded: the parcel. Empty if other ranks' parcels are added up.
        sources: the tensors that are encoded, or to which others are added.
        targets: where decoded numbers or sums go.
        lost: what was lost before, and after that what is lost now.
    """

    starts: Sequence[int]
    numel: int
    encoded: torch.Tensor
    sources: Tensors = ()
    targets: Tensors = ()
    lost: Tensors = ()

    def cut(self, values: torch.Tensor) -> list[torch.Tensor]:
        """The numbers of each tensor."""
        tensors = self.sources or self.targets
        return [
            values[start : start + each.numel()].view(each.shape)
            for start, each in zip(self.starts, tensors, strict=True)
        ]

    @property
    def ends(self) -> list[int]:
        """Where the numbers of each tensor end."""
        tensors = self.sources or self.targets
        return [start + each.numel() for start, each in zip(self.starts, tensors, strict=True)]


def encode_each(encoding: Encoding, parcels: Sequence[EncodedTensors], scratch: torch.Tensor) -> Iterator[None]:
    """Encode parcels on the CPU, and yield after each, which may be sent. Then decode it to its targets, if it has any,
    or keep what is lost."""
    for parcel in parcels:
        values = scratch[: parcel.numel]
        source = parcel.sources[0]
        is_run = len(parcel.sources) == 1 and source.dtype == torch.float32 and source.numel() == parcel.numel
        if parcel.lost or not is_run or not source.is_contiguous():
            source = _fill(encoding, parcel, values)
        is_finite = encoding.encode(source, parcel.encoded, values)
        yield
        if parcel.targets:
            _decode(encoding, parcel)
        elif parcel.lost:
            decoded, inverse = encoding.decode(parcel.encoded, parcel.numel)
            values.sub_(decoded).mul_(inverse)
            if not is_finite:
                values.nan_to_num_(0.0, 0.0, 0.0)  # an infinity is not to stay for ever
            foreach_copy(parcel.lost, parcel.cut(values))


def encode_together(encoding: Encoding, parcels: Sequence[EncodedTensors]) -> None:
    """Encode parcels on a device, and keep what is lost, by a number of kernels that depends on their size alone."""
    for some in _batches(parcels):
        sources = [each for parcel in some for each in parcel.sources]
        lost = [each for parcel in some for each in parcel.lost]
        if isinstance(encoding, Numbers) and not lost:
            foreach_copy(_numbers(encoding, some), sources)
            continue
        values = _join(some, sources)
        if lost:
            values.add_(_join(some, lost))
        starts = accumulate((parcel.numel for parcel in some), initial=0)
        ends = [start + end for start, parcel in zip(starts, some, strict=False) for end in parcel.ends]
        gaps, lasts = _gaps(tuple(ends), encoding.block, values.device)
        if len(gaps) and not isinstance(encoding, Numbers):  # they would change the scales of their blocks
            values[gaps] = values[lasts]
        numels = [parcel.numel for parcel in some]
        encoding.encode_together(values, numels, [parcel.encoded for parcel in some], bool(lost))
        if lost:
            foreach_copy(lost, _cut(some, values))


def decode_tensors(encoding: Encoding, parcels: Sequence[EncodedTensors]) -> None:
    """Decode parcels to their targets."""
    if parcels and is_host(parcels[0].encoded.device):
        for parcel in parcels:
            _decode(encoding, parcel)
        return
    for some in _batches(parcels):
        if isinstance(encoding, Numbers):
            decoded = _numbers(encoding, some)
        else:
            each = [parcel.encoded for parcel in some], [parcel.numel for parcel in some]
            decoded = _cut(some, encoding.decode_together(*each))
        foreach_copy([each for parcel in some for each in parcel.targets], decoded)


def add_up(
    encoding: Encoding,
    parcels: Sequence[EncodedTensors],
    others: Sequence[Sequence[torch.Tensor]],
    divide_: Callable[[torch.Tensor], None],
    scratch: torch.Tensor,
) -> None:
    """Write sums to targets: of sources, of what was lost before, which becomes zero, and of encoded numbers.

    Args:
        parcels: how the sums lie.
        others: parcels that lie like these, of each other rank.
        divide_: is called with each sum, and changes it in place.
        scratch: memory for the numbers of a parcel on the CPU.
    """
    on_host = bool(parcels) and is_host(parcels[0].sources[0].device)
    first = 0
    for some in [[parcel] for parcel in parcels] if on_host else _batches(parcels, len(others)):
        numels = [parcel.numel for parcel in some]
        if on_host:
            total = scratch[: numels[0]]
            foreach_copy(_cut(some, total), some[0].sources)
        else:
            total = _join(some, [each for parcel in some for each in parcel.sources], encoding.dtype)
        lost = [each for parcel in some for each in parcel.lost]
        for each, own in zip(_cut(some, total), lost, strict=True) if lost else ():
            each.add_(own)
            own.zero_()
        encoded = [each[first : first + len(some)] for each in others]
        first += len(some)
        if on_host:
            for (each,) in encoded:
                add_scaled(total, *encoding.decode(each, numels[0]))
        else:
            count = max(1, TOGETHER // len(total))  # ranks at a time
            for ranks in (encoded[at : at + count] for at in range(0, len(encoded), count)):
                every = [each for rank in ranks for each in rank]
                encoding.add_together(total, every, numels * len(ranks), len(ranks))
        divide_(total)
        foreach_copy([each for parcel in some for each in parcel.targets], _cut(some, total))


def _fill(encoding: Encoding, parcel: EncodedTensors, values: torch.Tensor) -> torch.Tensor:
    """The numbers of a parcel on the CPU, with what was lost before. What is left of a block repeats the last number
    before it."""
    cut = parcel.cut(values)
    foreach_copy(cut, parcel.lost or parcel.sources)
    for each, source in zip(cut, parcel.sources, strict=True) if parcel.lost else ():
        each.add_(source)
    for end in parcel.ends:
        if end % encoding.block:
            values[end : end + -end % encoding.block] = values[end - 1]
    return values


def _decode(encoding: Encoding, parcel: EncodedTensors) -> None:
    values, factor = encoding.decode(parcel.encoded, parcel.numel)
    for target, each in zip(parcel.targets, parcel.cut(values), strict=True):
        torch.mul(each, factor, out=target)


def _batches(parcels: Sequence[EncodedTensors], times: int = 1) -> Iterator[list[EncodedTensors]]:
    """The parcels, as many together as have at most :data:`TOGETHER` numbers so many times, or one."""
    some, numel = list[EncodedTensors](), 0
    for parcel in parcels:
        if some and (numel + parcel.numel) * times > TOGETHER:
            yield some
            some, numel = [], 0
        some.append(parcel)
        numel += parcel.numel
    if some:
        yield some


def _numbers(encoding: Numbers, parcels: Sequence[EncodedTensors]) -> list[torch.Tensor]:
    """The numbers of each tensor of parcels, in their encodings."""
    return [each for parcel in parcels for each in parcel.cut(encoding.numbers(parcel.encoded, parcel.numel))]


def _cut(parcels: Sequence[EncodedTensors], values: torch.Tensor) -> list[torch.Tensor]:
    """The numbers of each tensor of parcels whose numbers stand end to end."""
    parts = values.split([parcel.numel for parcel in parcels])
    return [each for parcel, part in zip(parcels, parts, strict=True) for each in parcel.cut(part)]


def _join(parcels: Sequence[EncodedTensors], tensors: Tensors, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Tensors that lie like those of parcels, end to end."""
    values = torch.empty(sum(parcel.numel for parcel in parcels), dtype=dtype, device=tensors[0].device)
    foreach_copy(_cut(parcels, values), tensors)
    return values


@lru_cache(maxsize=256)
def _gaps(ends: tuple[int, ...], block: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What is left of the blocks in which tensors end, and the last number before each: made once, since this waits for
    the device."""
    gaps = [at for end in ends for at in range(end, end + -end % block)]
    lasts = [end - 1 for end in ends for _ in range(-end % block)]
    with torch.inference_mode(False):
        return torch.tensor(gaps, dtype=torch.long).to(device), torch.tensor(lasts, dtype=torch.long).to(device)
