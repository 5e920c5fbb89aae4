"""How numbers become fewer bytes on the wire, and numbers again.

An :class:`Encoding` turns a *chunk*, a run of fp32 numbers, into bytes. It cuts the numbers into *blocks*, each with a
scale of its own. Owns the formats, and knows no ranks and no parameters::

    a block   x_0 ... x_127                                   fp32
    int8      q_0 ... q_127 | scale | low                     x = low + q * scale
    int4      q_0 q_1 | ... | q_126 q_127 | scale | low       the same, two in a byte; scale and low in fp16
    fp8       q_0 ... q_127 | scale                           x = q * scale, q in float8_e4m3fn
    bf16      x_0 ... x_127

Behind its blocks a chunk has a power of two, by which its numbers were multiplied: so scales have the range of fp32.
A negative scale marks a block with infinities or NaN. Some of its codes mean these, the others its finite numbers.

The formats int8 and int4 are those of torch's quantized embeddings, whose kernels are used on the CPU.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType

import torch

from fullshard.device import is_host
from fullshard.torch_private import foreach_copy
from fullshard.wire_policy import EncodingName

Factor = float | torch.Tensor  # a power of two: a number on the CPU, and a tensor of one on a device

_TAIL = 16  # bytes behind the blocks of a chunk: a power of two, and a gap, so that the next chunk is aligned
_MOST = 126  # the largest power of two of which fp32 has the inverse
_MARKS = 3  # codes that mean no number


class Encoding:
    """A format of chunks.

    Args:
        block: the numbers of a block. Small blocks are closer to the numbers and take more bytes.
    """

    #: The largest number of a chunk is brought between this power of two and half of it.
    _exponent = 0
    #: Of decoded numbers.
    dtype = torch.float32
    #: The format's number in :mod:`fullshard.fused`.
    _fused: int | None = None

    def __init__(self, block: int) -> None:
        self.block = block
        self._row = self._bytes_of_block()

    def nbytes(self, numel: int) -> int:
        """Bytes of a chunk of ``numel`` numbers, a multiple of ``block``."""
        return -(-(numel // self.block * self._row) // _TAIL) * _TAIL + _TAIL

    def saves(self, dtype: torch.dtype) -> bool:
        """Whether numbers of a dtype take fewer bytes when they are encoded."""
        return dtype.is_floating_point and 2 <= dtype.itemsize <= 4 and self._row < self.block * dtype.itemsize

    def encode(self, values: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> bool:
        """Encode a chunk, without a synchronization if it is on a device.

        Args:
            values: fp32, 1-D.
            out: uint8, 1-D, of :meth:`nbytes`, starting on a 4-byte boundary.
            scratch: like ``values``, and perhaps these: for the numbers multiplied by the power of two.

        Returns:
            whether it is known that all numbers are finite.
        """
        blocks, rows = scratch.view(-1, self.block), self.rows(out, values.numel())
        tail = out[-_TAIL : -_TAIL + 4].view(torch.float32)
        if not is_host(values.device):
            largest = torch.linalg.vector_norm(_finite(values), math.inf)
            exponent = torch.rsub(torch.frexp(largest)[1], self._exponent).clamp_(-_MOST, _MOST)
            by = exponent.add_(127).bitwise_left_shift_(23).view(torch.float32)  # two to this power
            torch.mul(values, by, out=scratch)
            torch.reciprocal(by, out=tail[0])
            self.encode_any(blocks, rows)
            return False
        highest = float(torch.maximum(values.amax(), -values.amin()))
        is_finite = math.isfinite(highest)
        if not is_finite:
            highest = float(_finite(values).abs().amax())
        factor = 2.0 ** max(-_MOST, min(_MOST, self._exponent - math.frexp(highest)[1])) if highest > 0 else 1.0
        torch.mul(values, factor, out=scratch)
        tail.fill_(1 / factor)
        self._encode(blocks, rows)
        if not is_finite:
            is_odd = ~blocks.isfinite().all(1)
            odd = rows[is_odd]
            self.encode_any(blocks[is_odd], odd)
            rows[is_odd] = odd
        return is_finite

    def decode(self, encoded: torch.Tensor, numel: int) -> tuple[torch.Tensor, Factor]:
        """The numbers of a chunk, fp32 and 1-D, and the power of two by which to multiply them."""
        rows, by = self.rows(encoded, numel), encoded[-_TAIL : -_TAIL + 4].view(torch.float32)
        if not is_host(encoded.device):
            return self.decode_any(rows).view(-1), by
        blocks, scales = self._decode(rows), self._scales(rows)[:, 0]
        if float(scales.amin()) < 0:
            is_odd = scales < 0
            blocks[is_odd] = self.decode_any(rows[is_odd])
        return blocks.view(-1), float(by)

    def encode_together(
        self, values: torch.Tensor, numels: Sequence[int], outs: Sequence[torch.Tensor], keeps_lost: bool
    ) -> None:
        """Encode chunks on a device, by a number of kernels that does not depend on theirs. All get one power of two.

        Args:
            values: the numbers of all chunks end to end, whose memory is used. They become what is lost of them, zero
                for infinities and NaN, with ``keeps_lost``.
            numels: how many each chunk has.
            outs: where each is encoded, see :meth:`encode`.
        """
        encoded = values.new_empty(self.nbytes(values.numel()), dtype=torch.uint8)
        sizes = [each // self.block * self._row for each in numels]
        rows, power = encoded[: sum(sizes)], encoded[-_TAIL : -_TAIL + 4]
        if fused := self._kernels(values.device):
            fused.encode(self._format(fused), values, rows, power.view(torch.float32), keeps_lost)
        else:
            self.encode(values, encoded, values)
            if keeps_lost:
                decoded, inverse = self.decode(encoded, values.numel())
                values.sub_(decoded)
                if isinstance(inverse, torch.Tensor):
                    values.mul_(inverse)
                values.nan_to_num_(0.0, 0.0, 0.0)
        targets = [out[:size] for out, size in zip(outs, sizes, strict=True)]
        powers = [out[-_TAIL : -_TAIL + 4] for out in outs]
        foreach_copy([*targets, *powers], [*rows.split(sizes), *[power] * len(outs)])

    def decode_together(self, encoded: Sequence[torch.Tensor], numels: Sequence[int]) -> torch.Tensor:
        """The numbers of chunks on a device, end to end, by a number of kernels that does not depend on theirs."""
        rows, powers, chunk_of = self._joined(encoded, numels)
        if fused := self._kernels(rows.device):
            out = powers.new_empty(sum(numels))
            fused.decode(self._format(fused), rows, powers, chunk_of, out, adds=False)
            return out
        blocks = self.decode_any(rows.view(-1, self._row))
        return blocks.mul_(powers[chunk_of, None]).view(-1)

    def add_together(
        self, total: torch.Tensor, encoded: Sequence[torch.Tensor], numels: Sequence[int], ranks: int
    ) -> None:
        """Add the chunks of so many ranks, those of each end to end, to the ``total`` on a device."""
        if fused := self._kernels(total.device):
            fused.decode(self._format(fused), *self._joined(encoded, numels), total, adds=True)
        else:
            total.add_(self.decode_together(encoded, numels).view(ranks, -1).sum(0))

    def _joined(
        self, encoded: Sequence[torch.Tensor], numels: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The bytes of all blocks of chunks end to end, the powers of two of the chunks, and the chunk of each
        block."""
        rows = torch.cat([self.rows(each, numel).view(-1) for each, numel in zip(encoded, numels, strict=True)])
        powers = torch.cat([each[-_TAIL : -_TAIL + 4] for each in encoded]).view(torch.float32)
        return rows, powers, _repeated(tuple(numel // self.block for numel in numels), rows.device)

    def _kernels(self, device: torch.device) -> ModuleType | None:
        """Triton's kernels for this format on a device, if there are any."""
        fused = None if self._fused is None else fused_kernels(device)
        return fused if fused and self.block <= fused.MOST else None

    def _format(self, fused: ModuleType) -> tuple[int, int, int]:
        return fused.Format(self._fused, self.block, self._exponent)

    def rows(self, encoded: torch.Tensor, numel: int) -> torch.Tensor:
        """The blocks of a chunk, as bytes."""
        return encoded[: numel // self.block * self._row].view(-1, self._row)

    def _bytes_of_block(self) -> int:
        raise NotImplementedError

    def _scales(self, rows: torch.Tensor) -> torch.Tensor:
        """What stands behind the codes of each block, as a view of the chunk: first the scale."""
        raise NotImplementedError

    def _encode(self, blocks: torch.Tensor, rows: torch.Tensor) -> None:
        """Encode finite numbers on the CPU."""
        self.encode_any(blocks, rows)

    def _decode(self, rows: torch.Tensor) -> torch.Tensor:
        """Decode them."""
        return self.decode_any(rows)

    def encode_any(self, blocks: torch.Tensor, rows: torch.Tensor) -> None:
        """Encode any numbers on any device."""
        raise NotImplementedError

    def decode_any(self, rows: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class _Integers(Encoding):
    """Levels at equal distances, from the lowest number of a block to the highest. In a block with infinities or NaN,
    the codes 0 to 2 mean -inf, inf and NaN."""

    _levels: int
    _scale_dtype: torch.dtype
    _kernel: str

    def _scales(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:, -2 * self._scale_dtype.itemsize :].view(self._scale_dtype)

    def _codes(self, rows: torch.Tensor) -> torch.Tensor:
        """The codes of blocks, one in a byte."""
        raise NotImplementedError

    def _set_codes(self, rows: torch.Tensor, codes: torch.Tensor) -> None:
        raise NotImplementedError

    def _encode(self, blocks: torch.Tensor, rows: torch.Tensor) -> None:
        rows.copy_(getattr(torch.ops.quantized, f"embedding_bag_{self._kernel}_prepack")(blocks))
        if self._scale_dtype == torch.float16:  # which may round the lowest number of equal ones above the highest
            self._scales(rows)[:, 0].clamp_(min=0)

    def _decode(self, rows: torch.Tensor) -> torch.Tensor:
        decoded: torch.Tensor = getattr(torch.ops.quantized, f"embedding_bag_{self._kernel}_unpack")(rows)
        return decoded

    def encode_any(self, blocks: torch.Tensor, rows: torch.Tensor) -> None:
        finite, scales = _finite(blocks), self._scales(rows)
        is_number = blocks == finite
        is_plain = is_number.all(-1, keepdim=True)
        lowest = blocks.masked_fill(is_odd := ~is_number, math.inf).amin(-1, keepdim=True)
        scales[:, 1:] = _finite(lowest).add_(0.0)  # of two zeros, which are equal, the positive one
        high = _finite(blocks.masked_fill(is_odd, -math.inf).amax(-1, keepdim=True))
        low, marks = scales[:, 1:].float(), torch.rsub(is_plain.float(), _MARKS, alpha=_MARKS)
        scale = ((high - low) / (self._levels - marks)).to(self._scale_dtype)
        scale = scale.masked_fill_(scale <= 0, 1)
        scales[:, :1] = torch.where(is_plain, scale, -scale)
        codes = (finite.sub_(low)).div_(scale.float()).round_().add_(marks).clamp_(max=self._levels)
        torch.maximum(codes, marks, out=codes)
        self._set_codes(rows, torch.where(is_number, codes, blocks.nan_to_num(2, 1, 0)).to(torch.uint8))

    def decode_any(self, rows: torch.Tensor) -> torch.Tensor:
        codes, (scale, low) = self._codes(rows).float(), self._scales(rows).float().split(1, 1)
        codes = codes.add_(scale < 0, alpha=-_MARKS)
        blocks = (codes * scale.abs()).add_(low)  # rounded twice, everywhere: not every addcmul is
        for code, value in enumerate((-math.inf, math.inf, math.nan)):
            blocks.masked_fill_(codes == code - _MARKS, value)
        return blocks


class Int8(_Integers):
    _levels, _scale_dtype, _kernel, _exponent, _fused = 255, torch.float32, "byte", 100, 0

    def _bytes_of_block(self) -> int:
        return self.block + 8

    def _codes(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:, : self.block]

    def _set_codes(self, rows: torch.Tensor, codes: torch.Tensor) -> None:
        rows[:, : self.block] = codes


class Int4(_Integers):
    _levels, _scale_dtype, _kernel, _exponent, _fused = 15, torch.float16, "4bit", 14, 1

    def _bytes_of_block(self) -> int:
        return self.block // 2 + 4

    def _codes(self, rows: torch.Tensor) -> torch.Tensor:
        pairs = rows[:, : self.block // 2]
        return torch.stack((pairs & 15, pairs >> 4), 2).flatten(1)

    def _set_codes(self, rows: torch.Tensor, codes: torch.Tensor) -> None:
        rows[:, : self.block // 2] = codes[:, ::2] | codes[:, 1::2] << 4


class Fp8(Encoding):
    """Floating point with 3 bits of mantissa, or with 2 in blocks with infinities or NaN, which that format has."""

    _fused = 2

    def _bytes_of_block(self) -> int:
        return self.block + 4

    def _scales(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:, self.block :].view(torch.float32)

    def _encode(self, blocks: torch.Tensor, rows: torch.Tensor) -> None:
        self._scales(rows).copy_(scale := self._scale(blocks, torch.float8_e4m3fn))
        rows[:, : self.block] = (blocks / scale).to(torch.float8_e4m3fn).view(torch.uint8)

    def _scale(self, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The scale with which the largest number of a block becomes the largest of ``dtype``."""
        largest = torch.maximum(blocks.amax(1, keepdim=True), -blocks.amin(1, keepdim=True))
        # By a tensor: instead of dividing by a number, GPUs multiply by its inverse.
        return (largest / largest.new_full((), torch.finfo(dtype).max)).clamp_min_(torch.finfo(torch.float32).tiny)

    def _decode(self, rows: torch.Tensor) -> torch.Tensor:
        # As fp16 the shifted bits are a number 256 times smaller: torch converts fp8 itself, but much more slowly.
        bits = rows[:, : self.block].view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
        return bits.view(torch.float16).float().mul_(self._scales(rows) * 256)

    def encode_any(self, blocks: torch.Tensor, rows: torch.Tensor) -> None:
        finite, is_odd = _finite(blocks), ~blocks.isfinite().all(1, keepdim=True)
        self._encode(finite, rows)
        scale = self._scale(finite, torch.float8_e5m2)
        codes = (blocks / scale).to(torch.float8_e5m2).view(torch.uint8)
        rows[:, : self.block] = torch.where(is_odd, codes, rows[:, : self.block])
        self._scales(rows).copy_(torch.where(is_odd, -scale, self._scales(rows)))

    def decode_any(self, rows: torch.Tensor) -> torch.Tensor:
        scale, codes = self._scales(rows), rows[:, : self.block]
        odd = codes.contiguous().view(torch.float8_e5m2).float() * -scale
        return torch.where(scale < 0, odd, self._decode(rows))


class Numbers(Encoding):
    """Numbers like others, of another dtype. There are no scales, and no powers of two."""

    stored: torch.dtype

    def _bytes_of_block(self) -> int:
        return self.stored.itemsize * self.block

    def numbers(self, encoded: torch.Tensor, numel: int) -> torch.Tensor:
        """Those of a chunk, as a view."""
        return encoded[: numel * self.stored.itemsize].view(self.stored)

    def add_together(
        self, total: torch.Tensor, encoded: Sequence[torch.Tensor], numels: Sequence[int], ranks: int
    ) -> None:
        joined = torch.cat([*map(self.numbers, encoded, numels)])
        total.add_(joined.view(ranks, -1).sum(0, dtype=self.dtype))


class Bf16(Numbers):
    """The upper half of each number. Infinities and NaN are numbers too."""

    stored = torch.bfloat16

    def encode(self, values: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> bool:
        if values is not scratch:
            scratch.copy_(values)
        self.numbers(out, values.numel()).copy_(values)
        return False

    def decode(self, encoded: torch.Tensor, numel: int) -> tuple[torch.Tensor, Factor]:
        return self.numbers(encoded, numel), 1.0


class Unencoded(Numbers):
    """Numbers as they are, to add them up like others, and only on a device.

    Args:
        source: their dtype.
        dtype: in which to add them up.
    """

    def __init__(self, source: torch.dtype, dtype: torch.dtype) -> None:
        self.stored, self.dtype = source, dtype
        super().__init__(block=1)


@lru_cache(maxsize=256)
def _repeated(counts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The number 0 so many times, then 1, and so on: made once, since this waits for the device."""
    with torch.inference_mode(False):
        return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts, dtype=torch.long)).to(device)


@lru_cache(maxsize=64)
def fused_kernels(device: torch.device) -> ModuleType | None:
    """:mod:`fullshard.fused`, on a GPU of CUDA on which Triton works."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    try:
        from fullshard import fused

        trial = torch.ones(8, device=device)
        fused.encode(fused.Format(fused.FP8, 8, 0), trial, trial.new_empty(12, dtype=torch.uint8), trial[:1], False)
    except ImportError:
        return None
    except Exception as error:  # it compiles for this device, and needs a compiler of C for that
        warnings.warn(
            f"Triton cannot compile for {device}: {type(error).__name__}: {error}. Messages are encoded and decoded by "
            "operations of torch, which is slower",
            stacklevel=2,
        )
        return None
    return fused


def add_scaled(total: torch.Tensor, values: torch.Tensor, factor: Factor) -> None:
    """Add decoded numbers to a sum."""
    if isinstance(factor, torch.Tensor):
        total.addcmul_(values, factor)
    else:
        total.add_(values, alpha=factor)


def _finite(values: torch.Tensor) -> torch.Tensor:
    """The values, with zeros for infinities and NaN."""
    return values.nan_to_num(0.0, 0.0, 0.0)


_ENCODINGS: dict[EncodingName, type[Encoding]] = {"bf16": Bf16, "fp8": Fp8, "int8": Int8, "int4": Int4}


@lru_cache(maxsize=64)
def encoding(name: EncodingName, block: int) -> Encoding | None:
    """The encoding of a name; ``None`` for "exact", which encodes nothing."""
    return None if name == "exact" else _ENCODINGS[name](block)
