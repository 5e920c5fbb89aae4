"""Triton kernels that encode and decode blocks in one launch, with the bits of the operations of torch.

Owns the kernels and their launch. :mod:`fullshard.encodings` owns the formats, and imports this file on GPUs that have
Triton. What a block is in bytes, and the operations that these kernels repeat, stand there.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

#: The formats, in their numbers of :class:`Format`.
INT8, INT4, FP8 = 0, 1, 2
#: The largest block: more numbers do not fit in the registers of a multiprocessor.
MOST = 8192
_TILE = 2048  # numbers that one program encodes or decodes, or one block
_LARGEST_TILE, _PARTIALS = 4096, 512  # numbers of a step of the search for the largest, and programs that search


class Format(NamedTuple):
    """A format, see :class:`fullshard.encodings.Encoding`."""

    number: int
    block: int
    exponent: int


def encode(form: Format, values: torch.Tensor, encoded: torch.Tensor, tail: torch.Tensor, keeps_lost: bool) -> None:
    """Encode a chunk.

    Args:
        values: fp32, 1-D. Become what the encoding loses of them with ``keeps_lost``.
        encoded: the bytes of its blocks.
        tail: one fp32 number: the power of two by which to multiply decoded numbers.
    """
    programs = min(_PARTIALS, triton.cdiv(values.numel(), _LARGEST_TILE))
    largest = torch.empty(programs, dtype=torch.int32, device=values.device)
    launch(_find_largest, programs, 8, values.view(torch.int32), largest, values.numel(), _LARGEST_TILE)
    blocks = values.numel() // form.block
    given = values, largest, *_views(form, encoded), tail, blocks, programs, triton.next_power_of_2(programs)
    _launch_blocks(_encode_blocks, form, blocks, *given, form.exponent, keeps_lost)


def decode(
    form: Format, encoded: torch.Tensor, powers: torch.Tensor, chunk_of: torch.Tensor, out: torch.Tensor, adds: bool
) -> None:
    """Decode blocks, or add those of several ranks up, rank by rank, and the sums to ``out``.

    Args:
        encoded: the bytes of blocks, those of each rank end to end.
        powers: by which to multiply the decoded numbers of each chunk.
        chunk_of: the chunk of each block.
        out: fp32, 1-D: the numbers of all blocks or, if they are added up, of one rank.
    """
    blocks = out.numel() // form.block
    given = *_views(form, encoded), powers, chunk_of, out, blocks, len(chunk_of) // blocks
    _launch_blocks(_decode_blocks, form, blocks, *given, adds)


def launch(kernel: Any, programs: int, warps: int, *args: Any) -> None:
    """Start a kernel on the current stream. Products and sums are rounded one by one, as they are without Triton."""
    device = args[0].device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[(programs,)](*args, num_warps=warps, enable_fp_fusion=False)


def _launch_blocks(kernel: Any, form: Format, blocks: int, *args: Any) -> None:
    width = triton.next_power_of_2(form.block)
    rows = max(1, _TILE // width)
    launch(kernel, triton.cdiv(blocks, rows), max(4, rows * width // 512), *args, form.number, form.block, width, rows)


def _views(form: Format, encoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes, and the same as scales."""
    return encoded, encoded.view(torch.float16 if form.number == INT4 else torch.float32)


@triton.jit(do_not_specialize=["numel"])
def _find_largest(values, largest, numel, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bits of the largest finite magnitude that each program finds. They are ordered as the numbers are."""
    start, most = tl.program_id(0) * TILE, tl.zeros([TILE], tl.int32)
    while start < numel:  # the interpreter knows no range whose bounds are arguments
        at = start + tl.arange(0, TILE)
        bits = tl.load(values + at, mask=at < numel, other=0) & 0x7FFFFFFF
        most = tl.maximum(most, tl.where(bits < 0x7F800000, bits, 0))
        start += tl.num_programs(0) * TILE
    tl.store(largest + tl.program_id(0), tl.max(most, 0))


@triton.jit(do_not_specialize=["blocks", "partials"])
def _encode_blocks(  # type: ignore[no-untyped-def]
    values,
    largest,
    codes_at,
    scales_at,
    tail,
    blocks,
    partials,
    PARTIALS: tl.constexpr,
    EXPONENT: tl.constexpr,
    KEEPS: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    each = tl.arange(0, PARTIALS)
    most = tl.max(tl.load(largest + each, mask=each < partials, other=0), 0)
    power = EXPONENT - tl.where(most == 0, 0, (most >> 23) - 126)
    power = tl.minimum(tl.maximum(power, -126), 126)
    by, inverse = ((power + 127) << 23).to(tl.float32, bitcast=True), ((127 - power) << 23).to(tl.float32, bitcast=True)
    if tl.program_id(0) == 0:
        tl.store(tail, inverse)

    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    col = tl.arange(0, WIDTH)[None, :]
    is_in = (row < blocks) & (col < BLOCK)
    numbers = tl.load(values + row * BLOCK + col, mask=is_in, other=0.0) * by
    is_finite = (numbers.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
    finite = tl.where(is_finite, numbers, 0.0)
    is_plain = tl.min(is_finite.to(tl.int32), 1, keep_dims=True) != 0
    if FORMAT == 2:
        high = tl.max(tl.abs(finite), 1, keep_dims=True)
        scale = tl.maximum(tl.div_rn(high, tl.where(is_plain, 448.0, 57344.0)), 1.1754943508222875e-38)
        shares = tl.div_rn(numbers, scale)
        codes = tl.where(is_plain, _to_float8(shares, 3), _to_float8(shares, 2))
        low = scale
    else:
        is_number = is_in & is_finite
        low = tl.min(tl.where(is_number, numbers, float("inf")), 1, keep_dims=True)
        high = tl.max(tl.where(is_number, numbers, float("-inf")), 1, keep_dims=True)
        has_numbers = low <= high
        low, high = tl.where(has_numbers, low, 0.0) + 0.0, tl.where(has_numbers, high, 0.0)  # no -0.0
        levels = 255 if FORMAT == 0 else 15
        marks = tl.where(is_plain, 0, 3)
        if FORMAT == 1:
            low = low.to(tl.float16).to(tl.float32)
        scale = tl.div_rn(high - low, (levels - marks).to(tl.float32))
        if FORMAT == 1:
            scale = scale.to(tl.float16).to(tl.float32)
        scale = tl.where(scale <= 0, 1.0, scale)
        shares = tl.div_rn(finite - low, scale)
        shares = (shares + 12582912.0) - 12582912.0  # to the nearest integer, of two to the even one
        shares = tl.minimum(tl.maximum(shares, 0.0), 255.0)
        codes = tl.maximum(tl.minimum(shares.to(tl.int32) + marks, levels), marks)
        codes = tl.where(is_finite, codes, tl.where(numbers != numbers, 2, tl.where(numbers > 0, 1, 0)))
    scale = tl.where(is_plain, scale, -scale)

    if FORMAT == 1:
        place = scales_at + row * (BLOCK // 4 + 2) + BLOCK // 4
        pairs = tl.sum(tl.reshape(codes << (col & 1) * 4, [ROWS, WIDTH // 2, 2]), 2)
        byte = tl.arange(0, WIDTH // 2)[None, :]
        is_byte = (row < blocks) & (byte < BLOCK // 2)
        tl.store(codes_at + row * (BLOCK // 2 + 4) + byte, pairs.to(tl.uint8), mask=is_byte)
        tl.store(place, scale.to(tl.float16), mask=row < blocks)
        tl.store(place + 1, low.to(tl.float16), mask=row < blocks)
    elif FORMAT == 0:
        place = scales_at + row * (BLOCK // 4 + 2) + BLOCK // 4
        tl.store(codes_at + row * (BLOCK + 8) + col, codes.to(tl.uint8), mask=is_in)
        tl.store(place, scale, mask=row < blocks)
        tl.store(place + 1, low, mask=row < blocks)
    else:
        tl.store(codes_at + row * (BLOCK + 4) + col, codes.to(tl.uint8), mask=is_in)
        tl.store(scales_at + row * (BLOCK // 4 + 1) + BLOCK // 4, scale, mask=row < blocks)

    if KEEPS:
        lost = (numbers - _from_codes(codes, scale, low, FORMAT)) * inverse
        is_lost = (lost.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
        tl.store(values + row * BLOCK + col, tl.where(is_lost, lost, 0.0), mask=is_in)


@triton.jit
def _to_float8(numbers, MANTISSA: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bits of numbers in float8_e4m3fn or float8_e5m2, of two as near the even ones, as torch converts them. No
    finite number is too large."""
    SHIFT: tl.constexpr = 23 - MANTISSA
    BIAS: tl.constexpr = 7 if MANTISSA == 3 else 15
    SMALL: tl.constexpr = 2.0 ** (SHIFT + 1 - BIAS)
    bits = numbers.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # The bits that a denormal number has are the last ones of a sum, which rounds it.
    denormal = (size.to(tl.float32, bitcast=True) + SMALL).to(tl.int32, bitcast=True) - ((128 + SHIFT - BIAS) << 23)
    normal = (size - ((127 - BIAS) << 23) + ((1 << (SHIFT - 1)) - 1) + ((size >> SHIFT) & 1)) >> SHIFT
    codes = tl.where(size < ((128 - BIAS) << 23), denormal, normal)
    if MANTISSA == 2:
        codes = tl.where(size < 0x7F800000, codes, tl.where(size > 0x7F800000, 0x7F, 0x7C))
    return codes | ((bits >> 24) & 0x80)


@triton.jit
def _from_codes(codes, scale, low, FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """What codes mean."""
    is_odd = scale < 0
    if FORMAT == 2:  # the bits of fp16, of which one format has the upper half, and the other a number 256 times larger
        upper = (codes << 8).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        shifted = (((codes & 0x80) << 8) | ((codes & 0x7F) << 7)).to(tl.uint16)
        numbers = shifted.to(tl.float16, bitcast=True).to(tl.float32) * (scale * 256.0)
        return tl.where(is_odd, upper * -scale, numbers)
    else:
        codes -= tl.where(is_odd, 3, 0)
        numbers = low + codes.to(tl.float32) * tl.abs(scale)
        odd = tl.where(codes == -3, float("-inf"), tl.where(codes == -2, float("inf"), float("nan")))
        return tl.where(codes < 0, odd, numbers)


@triton.jit
def _load_blocks(  # type: ignore[no-untyped-def]
    codes_at,
    scales_at,
    powers,
    chunk_of,
    row,
    is_row,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The numbers of blocks."""
    col = tl.arange(0, WIDTH)[None, :]
    is_in = is_row & (col < BLOCK)
    if FORMAT == 2:
        codes = tl.load(codes_at + row * (BLOCK + 4) + col, mask=is_in, other=0).to(tl.int32)
        scale = tl.load(scales_at + row * (BLOCK // 4 + 1) + BLOCK // 4, mask=is_row, other=1.0)
        low = scale
    else:
        place = scales_at + row * (BLOCK // 4 + 2) + BLOCK // 4
        if FORMAT == 1:
            pairs = tl.load(codes_at + row * (BLOCK // 2 + 4) + col // 2, mask=is_in, other=0).to(tl.int32)
            codes = (pairs >> (col & 1) * 4) & 15
        else:
            codes = tl.load(codes_at + row * (BLOCK + 8) + col, mask=is_in, other=0).to(tl.int32)
        scale = tl.load(place, mask=is_row, other=1.0).to(tl.float32)
        low = tl.load(place + 1, mask=is_row, other=0.0).to(tl.float32)
    power = tl.load(powers + tl.load(chunk_of + row, mask=is_row, other=0), mask=is_row, other=1.0)
    return _from_codes(codes, scale, low, FORMAT) * power


@triton.jit(do_not_specialize=["blocks", "ranks"])
def _decode_blocks(  # type: ignore[no-untyped-def]
    codes_at,
    scales_at,
    powers,
    chunk_of,
    out,
    blocks,
    ranks,
    ADDS: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    col = tl.arange(0, WIDTH)[None, :]
    is_row, target = row < blocks, out + row * BLOCK + col
    if ADDS:
        numbers = tl.zeros([ROWS, WIDTH], tl.float32)
        while ranks > 0:
            numbers += _load_blocks(codes_at, scales_at, powers, chunk_of, row, is_row, FORMAT, BLOCK, WIDTH)
            row += blocks
            ranks -= 1
        numbers = tl.load(target, mask=is_row & (col < BLOCK), other=0.0) + numbers
    else:
        numbers = _load_blocks(codes_at, scales_at, powers, chunk_of, row, is_row, FORMAT, BLOCK, WIDTH)
    tl.store(target, numbers, mask=is_row & (col < BLOCK))
