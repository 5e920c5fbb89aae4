"""Triton's kernels write and read the bits of torch's operations: on a GPU or, without one, in Triton's interpreter."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any, Self
from unittest import mock

import pytest
import torch
import triton
from benchmarks.launches import Counts, _Unordered
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fullshard import encodings, fused
from fullshard.device import CPU
from fullshard.encoded_tensors import EncodedTensors, add_up, decode_tensors, encode_together
from fullshard.encodings import Encoding
from fullshard.wire_policy import EncodingName
from tests.comm.test_encoded import launches_of_messages
from tests.harness import World, ranks
from tests.simulated import simulate
from tests.test_encodings import made

ROOT = Path(__file__).parent.parent
#: Kernels that write the messages of a gather and read them, and the same of a reduction, on any number of ranks.
COUNTED = (11, 5, 10, 10)
EXTREMES = [0.0, -0.0, 2.0**-149, -(2.0**-149), 2.0**-126, 3.4e38, -3.4e38, 1.0, 1.5, 2.5, 448.0, 57344.0]
ODD = [float("inf"), float("-inf"), float("nan")]
each_format = pytest.mark.parametrize("name", ["fp8", "int8", "int4"])


@pytest.fixture
def device() -> Iterator[torch.device]:
    """A device that has the kernels."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU
    with simulate(_Unordered()), kernels(fused):
        yield device


def kernels(found: ModuleType | None) -> AbstractContextManager[object]:
    """Let encodings use the kernels on whatever device, or nowhere."""
    return mock.patch.object(encodings, "fused_kernels", return_value=found)


def numbers(kind: str, block: int) -> list[torch.Tensor]:
    """Tensors of several chunks, of whole blocks and less."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(count, generator=generator) for count in (3 * block, 7 * block - 5, block, 20 * block + 1)]
    match kind:
        case "denormal":
            return [each * 2.0**-140 for each in drawn]
        case "huge":
            return [each * 2.0**125 for each in drawn]
        case "of all magnitudes":
            return [each * 10.0 ** torch.randint(-40, 38, each.shape, generator=generator) for each in drawn]
        case "constant":
            return [torch.full_like(each, each[0]) for each in drawn]
        case "levels":  # and the middles between them
            return [(each * 20).round() / 2 for each in drawn]
        case "zero":
            return [each.mul(0) for each in drawn]
        case "extreme" | "infinite":
            values = torch.tensor(EXTREMES + (ODD if kind == "infinite" else []))
            few = torch.randint(0, 40, drawn[3].shape, generator=generator)
            drawn[3] = torch.where(few < len(values), values[few.clamp(max=len(values) - 1)], drawn[3])
            drawn[2] = torch.full_like(drawn[2], values[-1])
    return drawn


def exchange(of: Encoding, values: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The bytes of chunks, what is lost of their numbers, what they are decoded to, and sums over ranks."""
    values = [each.to(device) for each in values]
    numels = [-(-each.numel() // of.block) * of.block for each in values]
    encoded = [torch.zeros(of.nbytes(numel), dtype=torch.uint8, device=device) for numel in numels]
    lost, read, total, plain = ([torch.zeros_like(each) for each in values] for _ in range(4))
    lists = values, numels, encoded, lost, read
    chunks = [EncodedTensors((0,), n, e, [v], [r], [k]) for v, n, e, k, r in zip(*lists, strict=True)]
    encode_together(of, chunks)
    decode_tensors(of, chunks)
    again = [torch.zeros_like(each) for each in encoded]
    encode_together(of, [each._replace(encoded=e, lost=()) for each, e in zip(chunks, again, strict=True)])
    sums = [each._replace(targets=[t], lost=()) for each, t in zip(chunks, total, strict=True)]
    add_up(of, sums, [encoded, again, encoded], lambda _: None, plain[0])
    return [each.cpu() for each in (*encoded, *again, *lost, *read, *total)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """All NaN have the same."""
    return tensor if tensor.dtype == torch.uint8 else torch.where(tensor.isnan(), 0.5, tensor).view(torch.int32)


@each_format
@pytest.mark.parametrize("block", [8, 40, 128, 512])
@pytest.mark.parametrize(
    "kind", ["normal", "denormal", "huge", "of all magnitudes", "constant", "levels", "zero", "extreme", "infinite"]
)
def test_kernels_have_the_bits_of_operations_of_torch(
    device: torch.device, name: EncodingName, block: int, kind: str
) -> None:
    of, values = made(name, block), numbers(kind, block)
    with kernels(None):
        expected = exchange(of, values, CPU)
    for found, other in zip(exchange(of, values, device), expected, strict=True):
        assert torch.equal(bits(found), bits(other))


class Launches(Counts):
    """Counts kernels of Triton too, of which torch's dispatcher knows nothing. They need not run for that."""

    def __enter__(self) -> Self:
        self._kernels, self._launch = kernels(fused), mock.patch.object(fused, "launch", self._count)
        self._kernels.__enter__()
        self._launch.start()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._launch.stop()
        self._kernels.__exit__(*raised)

    def _count(self, *args: Any) -> None:
        self.cost.launches += 1


@ranks(2, 3)
@each_format
def test_no_more_than_15_kernels_write_or_read_all_messages(world: World, name: EncodingName) -> None:
    few, many = (launches_of_messages(world, name, count, Launches) for count in (2, 9))
    assert few == many, "with more parameters"
    assert tuple(few) == COUNTED


def test_kernels_compile_for_a_gpu_to_operations_that_round_each_result() -> None:
    """Without a GPU, which this process need not have: it may be the interpreter's."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.test_fused"]
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def compile_all() -> None:
    """Compile all kernels for an H100. None computes a product and a sum at once, divides imprecisely, or takes
    denormal numbers for zeros."""
    for number, block in itertools.product((fused.INT8, fused.INT4, fused.FP8), (40, 128, 8192)):
        form, values = fused.Format(number, block, 100), torch.zeros(4 * block)
        out = torch.zeros(4 * block, dtype=torch.uint8)
        with mock.patch.object(fused, "launch") as launch:
            for flag in (False, True):
                fused.encode(form, values, out, values[:1], flag)
                fused.decode(form, out, values, torch.zeros(4, dtype=torch.long), values, flag)
        for (kernel, _, warps, *args), _ in launch.call_args_list:
            assembly = compiled(kernel, warps, dict(zip(kernel.arg_names, args, strict=True)))
            assert not (found := re.findall(r"\S*(?:\.ftz|fma\.|\.approx|div\.full)\S*", assembly)), found
            print(kernel.__name__, number, block, "compiles")


def compiled(kernel: Any, warps: int, args: dict[str, Any]) -> str:
    """What a kernel is for an H100, after it was assembled."""
    constants = {name: value for name, value in args.items() if name.isupper()}
    types = {torch.float32: "*fp32", torch.float16: "*fp16", torch.int32: "*i32", torch.int64: "*i64"}
    types |= {torch.uint8: "*u8"}
    signature = {
        name: "constexpr" if name in constants else types[value.dtype] if isinstance(value, torch.Tensor) else "i32"
        for name, value in args.items()
    }
    source, target = ASTSource(kernel, signature, constants), GPUTarget("cuda", 90, 32)
    found = triton.compile(source, target=target, options={"num_warps": warps, "enable_fp_fusion": False})
    assert found.asm["cubin"]
    return str(found.asm["ptx"])


if __name__ == "__main__":
    compile_all()
