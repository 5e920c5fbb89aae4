"""Encodings keep what their formats promise, for numbers of every magnitude, with the kernels and without them."""

from __future__ import annotations

import math
import os
import sys
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fullshard.encodings import Encoding, add_scaled, encoding, fused_kernels
from fullshard.wire_policy import EncodingName
from tests.harness.compare import WITH_TORCH

NAMES: tuple[EncodingName, ...] = ("bf16", "fp8", "int8", "int4")
BLOCKS = (8, 24, 128)
SMALLEST, LARGEST = 2.0**-149, torch.finfo(torch.float32).max
each_encoding = pytest.mark.parametrize("name", NAMES)
#: The long lane looks at more examples.
unhurried = settings(deadline=None, max_examples=150 if WITH_TORCH in os.environ else 40)

NUMBERS = st.one_of(
    st.floats(-8, 8, width=32),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.sampled_from([0.0, -0.0, SMALLEST, -SMALLEST, 2.0**-126, LARGEST, -LARGEST, 1.0, 256.0, 1e-30]),
)
ODD = st.sampled_from([math.inf, -math.inf, math.nan])


def made(name: EncodingName, block: int) -> Encoding:
    found = encoding(name, block)
    assert found is not None
    return found


def encoded(of: Encoding, values: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(of.nbytes(values.numel()), dtype=torch.uint8)
    of.encode(values, out, torch.empty_like(values))
    return out


def decoded(of: Encoding, data: torch.Tensor, numel: int) -> torch.Tensor:
    values, factor = of.decode(data, numel)
    return values.double() * float(factor)  # in fp64, so that the format alone is seen


def by_any_path(of: Encoding, values: torch.Tensor) -> torch.Tensor:
    """A chunk as a device encodes it, which has no kernels."""
    out = encoded(of, values)
    finite = values.nan_to_num(0.0, 0.0, 0.0).abs().amax()
    factor = 1 / float(out[-16:-12].view(torch.float32)) if finite > 0 else 1.0
    of.encode_any((values * factor).view(-1, of.block), of.rows(out, values.numel()))
    return out


def bounds(name: EncodingName, values: torch.Tensor, block: int) -> torch.Tensor:
    """The largest error of each number, by the format. What is too small beside the largest number of the chunk for
    the range of a scale is within the last term."""
    blocks = values.double().view(-1, block)
    finite = torch.where(blocks.isfinite(), blocks, 0.0)
    is_odd = ~blocks.isfinite().all(1, keepdim=True)
    largest, all_of_it = finite.abs().amax(1, keepdim=True), float(finite.abs().amax())
    low = torch.where(blocks.isfinite(), blocks, math.inf).amin(1, keepdim=True).nan_to_num(0.0, 0.0, 0.0)
    high = torch.where(blocks.isfinite(), blocks, -math.inf).amax(1, keepdim=True).nan_to_num(0.0, 0.0, 0.0)
    match name:
        case "bf16":
            bound = finite.abs() / 2**8 + 2.0**-134
            bound = torch.where(finite.abs() > torch.finfo(torch.bfloat16).max, math.inf, bound)  # rounds to infinity
        case "fp8":
            mantissa, smallest = torch.where(is_odd, 2**-3, 2**-4), torch.where(is_odd, 2.0**-32, 2.0**-18)
            bound = finite.abs() * mantissa * 1.001 + largest * smallest + all_of_it * 2.0**-115
        case "int8":
            step = (high - low) / torch.where(is_odd, 252, 255)
            bound = 0.5001 * step + largest * 2.0**-22 + all_of_it * 2.0**-115
        case _:
            step = (high - low) / torch.where(is_odd, 12, 15)
            bound = 0.501 * step + largest * 2.0**-9 + all_of_it * 2.0**-32
            bound = bound + 2.0**-146  # the smallest scale of fp16, behind the largest power of two
    return (bound + SMALLEST).expand_as(blocks).reshape(-1)


def check(name: EncodingName, block: int, numbers: list[float]) -> None:
    of, values = made(name, block), torch.tensor(numbers, dtype=torch.float32)
    for data in (encoded(of, values), by_any_path(of, values) if name != "bf16" else encoded(of, values)):
        found, finite = decoded(of, data, values.numel()), values.isfinite()
        assert torch.equal(found[~finite].isnan(), values[~finite].isnan())
        infinite = values.isinf()
        assert torch.equal(found[infinite], values[infinite].double())
        error, bound = (found - values.double())[finite].abs(), bounds(name, values, block)[finite]
        assert bool((error <= bound).all()), (error - bound).max()


@each_encoding
@given(data=st.data(), block=st.sampled_from(BLOCKS))
@unhurried
def test_an_error_is_within_the_step_of_its_block(name: EncodingName, data: st.DataObject, block: int) -> None:
    few = data.draw(st.lists(NUMBERS, min_size=1, max_size=2 * block))
    check(name, block, (few * (2 * block))[: 2 * block])


@each_encoding
@given(data=st.data(), block=st.sampled_from(BLOCKS))
@unhurried
def test_infinities_and_nan_stay_in_their_places(name: EncodingName, data: st.DataObject, block: int) -> None:
    few = data.draw(st.lists(NUMBERS | ODD, min_size=1, max_size=block))
    odd = data.draw(st.lists(ODD, min_size=1, max_size=4))
    check(name, block, (few * block)[:block] + odd + [0.5] * (block - len(odd)))


@each_encoding
def test_random_numbers_of_each_magnitude_keep_the_same_share(name: EncodingName) -> None:
    for block in BLOCKS:
        values = torch.rand(64 * block, generator=torch.Generator().manual_seed(0)).sub_(0.5).mul_(2).double()
        for magnitude in (SMALLEST, 2.0**-140, 2.0**-126, 1e-30, 1.0, 1e30, 3e38):
            check(name, block, (values * magnitude).tolist())


@each_encoding
@given(number=NUMBERS, block=st.sampled_from(BLOCKS))
@example(0.0, 128)
@example(SMALLEST, 8)
@example(-LARGEST, 24)
@unhurried
def test_blocks_of_one_number_keep_it(name: EncodingName, number: float, block: int) -> None:
    of, values = made(name, block), torch.full((2 * block,), number)
    found = decoded(of, encoded(of, values), values.numel())
    if name == "bf16":
        assert torch.equal(found.float(), values.bfloat16().float())
    else:  # as scales of fp32, or of fp16 behind a power of two
        rtol = {"int4": 2**-10, "fp8": 2**-22}.get(name, 2**-23)
        assert torch.allclose(found, values.double(), rtol=rtol, atol=2.0**-146)


@pytest.mark.parametrize("block", BLOCKS)
@each_encoding
def test_encoding_is_deterministic(name: EncodingName, block: int) -> None:
    of, values = made(name, block), torch.randn(50 * block, generator=torch.Generator().manual_seed(0))
    values[7] = math.inf
    first = encoded(of, values)
    assert torch.equal(first, encoded(of, values))
    found, _ = of.decode(first, values.numel())
    again, _ = of.decode(first, values.numel())
    assert torch.equal(found, again)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("name", "codes"), [("fp8", 0), ("int8", 1), ("int4", 1)])
def test_devices_encode_and_decode_as_kernels_do(name: EncodingName, block: int, codes: int) -> None:
    """With the same scales. A number in the middle of two levels may go to either; in int8 a device rounds a product
    before it adds it, and the kernels do not."""
    of, generator = made(name, block), torch.Generator().manual_seed(0)
    for exponent in range(-30, 30, 5):
        values = torch.randn(40 * block, generator=generator) * 10.0**exponent
        rows = of.rows(encoded(of, values), values.numel())
        kernels, devices = of._decode(rows), of.decode_any(rows)
        rounding = kernels.abs().amax(1, keepdim=True) * (2.0**-23 if name == "int8" else 0.0)
        assert bool(((kernels - devices).abs() <= rounding).all())
        rows, other = (of.rows(data, values.numel()) for data in (encoded(of, values), by_any_path(of, values)))
        assert torch.equal(of._scales(rows), of._scales(other))
        if isinstance(of, type(made("fp8", 8))):
            assert torch.equal(rows, other)
            continue
        difference = (of._codes(rows).int() - of._codes(other).int()).abs()  # type: ignore[attr-defined]
        assert int(difference.max()) <= codes
        assert float(difference.float().mean()) < 0.1


@pytest.mark.parametrize(("name", "nbytes"), [("bf16", 256), ("fp8", 132), ("int8", 136), ("int4", 68)])
def test_a_block_of_128_numbers_takes_so_many_bytes(name: EncodingName, nbytes: int) -> None:
    of = made(name, 128)
    assert of.nbytes(128 * 1000) == -(-nbytes * 1000 // 16) * 16 + 16
    assert of.nbytes(128 * 1000) == len(encoded(of, torch.zeros(128 * 1000)))


@each_encoding
def test_only_dtypes_that_take_more_bytes_are_encoded(name: EncodingName) -> None:
    of = made(name, 128)
    assert of.saves(torch.float32)
    assert of.saves(torch.bfloat16) == of.saves(torch.float16) == (name != "bf16")
    others = (torch.float64, torch.complex64, torch.int32, torch.uint8, torch.float8_e4m3fn)
    assert not any(map(of.saves, others))


@pytest.mark.parametrize("factor", [0.25, torch.tensor([0.25])], ids=["number", "tensor"])
def test_decoded_numbers_are_added_with_their_factor(factor: float | torch.Tensor) -> None:
    total = torch.ones(4)
    add_scaled(total, torch.arange(4.0), factor)
    assert total.tolist() == [1.0, 1.25, 1.5, 1.75]


@each_encoding
def test_numbers_stay_as_they_are_while_they_are_encoded(name: EncodingName) -> None:
    of, values = made(name, 8), torch.randn(80, generator=torch.Generator().manual_seed(0))
    before, out = values.clone(), torch.zeros(of.nbytes(80), dtype=torch.uint8)
    is_finite = of.encode(values, out, torch.empty_like(values))
    assert torch.equal(values, before)
    values[3] = math.nan
    assert not of.encode(values, out, torch.empty_like(values))
    assert is_finite == (name != "bf16"), "which is not looked for in bf16"


def test_exact_is_no_encoding() -> None:
    assert encoding("exact", 128) is None


def test_without_a_compiler_for_triton_operations_of_torch_encode_and_say_so() -> None:
    assert fused_kernels(torch.device("cpu")) is None
    without = mock.Mock(encode=mock.Mock(side_effect=RuntimeError("no C")))
    with (
        mock.patch.dict(sys.modules, {"fullshard.fused": without}),
        mock.patch.object(torch.version, "cuda", "13.0"),
        mock.patch.object(torch, "ones", return_value=torch.ones(8)),
        pytest.warns(UserWarning, match="Triton cannot compile for cuda: RuntimeError: no C"),
    ):
        assert fused_kernels(torch.device("cuda")) is None
    fused_kernels.cache_clear()
