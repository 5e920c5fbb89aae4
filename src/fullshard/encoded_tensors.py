"""Tensors that are encoded, decoded and added up as chunks.

The CPU takes one chunk at a time, whose numbers stay in its caches. A device takes many together, because each kernel
that it starts costs more than a small chunk: their numbers stand end to end, at most :data:`TOGETHER` of them, so that
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

#: Numbers that a device encodes or decodes together: 64 MiB of fp32. A chunk may be larger.
TOGETHER = 2**24


class EncodedTensors(NamedTuple):
    """Tensors that are encoded as one chunk, and the chunk.

    Attributes:
        starts: where the numbers of each tensor begin in the chunk, on a boundary of blocks.
        numel: numbers of the chunk, a multiple of a block.
        encoded: the chunk. Empty if other ranks' chunks are added up.
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
        each = zip(self.starts, self.ends, self.sources or self.targets, strict=True)
        return [values[start:end].view(tensor.shape) for start, end, tensor in each]

    @property
    def ends(self) -> list[int]:
        """Where the numbers of each tensor end."""
        return [start + each.numel() for start, each in zip(self.starts, self.sources or self.targets, strict=True)]


def encode_each(encoding: Encoding, chunks: Sequence[EncodedTensors], scratch: torch.Tensor) -> Iterator[None]:
    """Encode chunks on the CPU, and yield after each, which may be sent. Then decode it to its targets, if it has any,
    or keep what is lost."""
    for chunk in chunks:
        values = scratch[: chunk.numel]
        source = chunk.sources[0]
        is_run = len(chunk.sources) == 1 and source.dtype == torch.float32 and source.numel() == chunk.numel
        if chunk.lost or not is_run or not source.is_contiguous():
            source = _fill(encoding, chunk, values)
        is_finite = encoding.encode(source, chunk.encoded, values)
        yield
        if chunk.targets:
            _decode(encoding, chunk)
        elif chunk.lost:
            decoded, inverse = encoding.decode(chunk.encoded, chunk.numel)
            values.sub_(decoded).mul_(inverse)
            if not is_finite:
                values.nan_to_num_(0.0, 0.0, 0.0)  # an infinity is not to stay for ever
            foreach_copy(chunk.lost, chunk.cut(values))


def encode_together(encoding: Encoding, chunks: Sequence[EncodedTensors]) -> None:
    """Encode chunks on a device, and keep what is lost, by a number of kernels that depends on their size alone."""
    for some in _batches(chunks):
        sources = [each for chunk in some for each in chunk.sources]
        lost = [each for chunk in some for each in chunk.lost]
        if isinstance(encoding, Numbers) and not lost:
            foreach_copy(_numbers(encoding, some), sources)
            continue
        values = _join(some, sources)
        if lost:
            values.add_(_join(some, lost))
        starts = accumulate((chunk.numel for chunk in some), initial=0)
        ends = [start + end for start, chunk in zip(starts, some, strict=False) for end in chunk.ends]
        gaps, lasts = _gaps(tuple(ends), encoding.block, values.device)
        if len(gaps) and not isinstance(encoding, Numbers):  # they would change the scales of their blocks
            values[gaps] = values[lasts]
        numels = [chunk.numel for chunk in some]
        encoding.encode_together(values, numels, [chunk.encoded for chunk in some], bool(lost))
        if lost:
            foreach_copy(lost, _cut(some, values))


def decode_tensors(encoding: Encoding, chunks: Sequence[EncodedTensors]) -> None:
    """Decode chunks to their targets."""
    if chunks and is_host(chunks[0].encoded.device):
        for chunk in chunks:
            _decode(encoding, chunk)
        return
    for some in _batches(chunks):
        if isinstance(encoding, Numbers):
            decoded = _numbers(encoding, some)
        else:
            each = [chunk.encoded for chunk in some], [chunk.numel for chunk in some]
            decoded = _cut(some, encoding.decode_together(*each))
        foreach_copy([each for chunk in some for each in chunk.targets], decoded)


def add_up(
    encoding: Encoding,
    chunks: Sequence[EncodedTensors],
    others: Sequence[Sequence[torch.Tensor]],
    divide_: Callable[[torch.Tensor], None],
    scratch: torch.Tensor,
) -> None:
    """Write sums to targets: of sources, of what was lost before, which becomes zero, and of encoded numbers.

    Args:
        chunks: how the sums lie.
        others: chunks that lie like these, of each other rank.
        divide_: is called with each sum, and changes it in place.
        scratch: memory for the numbers of a chunk on the CPU.
    """
    on_host = bool(chunks) and is_host(chunks[0].sources[0].device)
    first = 0
    for some in [[chunk] for chunk in chunks] if on_host else _batches(chunks, len(others)):
        numels = [chunk.numel for chunk in some]
        if on_host:
            total = scratch[: numels[0]]
            foreach_copy(_cut(some, total), some[0].sources)
        else:
            total = _join(some, [each for chunk in some for each in chunk.sources], encoding.dtype)
        lost = [each for chunk in some for each in chunk.lost]
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
        foreach_copy([each for chunk in some for each in chunk.targets], _cut(some, total))


def _fill(encoding: Encoding, chunk: EncodedTensors, values: torch.Tensor) -> torch.Tensor:
    """The numbers of a chunk on the CPU, with what was lost before. What is left of a block repeats the last number
    before it."""
    cut = chunk.cut(values)
    foreach_copy(cut, chunk.lost or chunk.sources)
    for each, source in zip(cut, chunk.sources, strict=True) if chunk.lost else ():
        each.add_(source)
    for end in chunk.ends:
        if end % encoding.block:
            values[end : end + -end % encoding.block] = values[end - 1]
    return values


def _decode(encoding: Encoding, chunk: EncodedTensors) -> None:
    values, factor = encoding.decode(chunk.encoded, chunk.numel)
    for target, each in zip(chunk.targets, chunk.cut(values), strict=True):
        torch.mul(each, factor, out=target)


def _batches(chunks: Sequence[EncodedTensors], times: int = 1) -> Iterator[list[EncodedTensors]]:
    """The chunks, as many together as have at most :data:`TOGETHER` numbers so many times, or one."""
    some, numel = list[EncodedTensors](), 0
    for chunk in chunks:
        if some and (numel + chunk.numel) * times > TOGETHER:
            yield some
            some, numel = [], 0
        some.append(chunk)
        numel += chunk.numel
    if some:
        yield some


def _numbers(encoding: Numbers, chunks: Sequence[EncodedTensors]) -> list[torch.Tensor]:
    """The numbers of each tensor of chunks, in their encodings."""
    return [each for chunk in chunks for each in chunk.cut(encoding.numbers(chunk.encoded, chunk.numel))]


def _cut(chunks: Sequence[EncodedTensors], values: torch.Tensor) -> list[torch.Tensor]:
    """The numbers of each tensor of chunks whose numbers stand end to end."""
    parts = values.split([chunk.numel for chunk in chunks])
    return [each for chunk, part in zip(chunks, parts, strict=True) for each in chunk.cut(part)]


def _join(chunks: Sequence[EncodedTensors], tensors: Tensors, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Tensors that lie like those of chunks, end to end."""
    values = torch.empty(sum(chunk.numel for chunk in chunks), dtype=dtype, device=tensors[0].device)
    foreach_copy(_cut(chunks, values), tensors)
    return values


@lru_cache(maxsize=256)
def _gaps(ends: tuple[int, ...], block: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What is left of the blocks in which tensors end, and the last number before each: made once, since this waits for
    the device."""
    gaps = [at for end in ends for at in range(end, end + -end % block)]
    lasts = [end - 1 for end in ends for _ in range(-end % block)]
    with torch.inference_mode(False):
        return torch.tensor(gaps, dtype=torch.long).to(device), torch.tensor(lasts, dtype=torch.long).to(device)
