"""Chunks on a device: encoded, decoded and added up in pieces of a limited size, with the same results."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch
from benchmarks.launches import _Unordered
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard import encoded_tensors
from fullshard.encoded_tensors import EncodedTensors, add_up, decode_tensors, encode_together
from fullshard.encodings import Encoding, Unencoded, encoding
from tests.simulated import simulate

COUNT, NUMEL = 12, 1024


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation returns, of chunks end to end or of blocks."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result._is_view():
            self.numel = max(self.numel, result.numel())
        return result


def exchange(of: Encoding, together: int) -> tuple[list[torch.Tensor], int]:
    """What chunks become, and the elements of the largest temporary tensor."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(NUMEL - 100, generator=generator) for _ in range(COUNT)]
    lost = [torch.zeros(NUMEL - 100, dtype=torch.bfloat16) for _ in values]
    read, total = ([torch.empty(NUMEL - 100) for _ in values] for _ in range(2))
    encoded = [torch.zeros(of.nbytes(NUMEL), dtype=torch.uint8) for _ in values]
    lists = values, read, lost, encoded, total
    each = [EncodedTensors((0,), NUMEL, e, [v], [r], [k]) for v, r, k, e, _ in zip(*lists, strict=True)]
    sums = [EncodedTensors((0,), NUMEL, e[:0], [v], [t]) for v, _, _, e, t in zip(*lists, strict=True)]
    with simulate(_Unordered()), mock.patch.object(encoded_tensors, "TOGETHER", together), Largest() as largest:
        encode_together(of, each)
        decode_tensors(of, each)
        add_up(of, sums, [encoded] * 5, lambda sum: None, torch.empty(0))
    for value, found, kept, sum in zip(values, read, lost, total, strict=True):
        assert torch.allclose(found + kept, value, atol=0.01)
        assert torch.allclose(sum, value + 5 * found, atol=1e-4)
    return read, largest.numel


@pytest.mark.parametrize("name", ["bf16", "fp8", "int8", "int4"])
def test_memory_has_a_limit_and_results_are_the_same(name: str) -> None:
    of = encoding(name, 128)  # type: ignore[arg-type]
    assert of is not None
    whole, at_once = exchange(of, 2**24)
    cut, most = exchange(of, 3 * NUMEL)
    assert at_once >= 5 * COUNT * NUMEL
    assert most <= 4 * 3 * NUMEL, "a few bytes of each number are elements too"
    assert all(torch.allclose(one, other, atol=0.5) for one, other in zip(whole, cut, strict=True))


def test_numbers_that_are_not_encoded_are_added_up_in_their_dtype() -> None:
    terms = [torch.arange(6.0, dtype=torch.bfloat16) for _ in range(3)]
    target = torch.empty(6)
    sums = [EncodedTensors((0,), 6, torch.empty(0, dtype=torch.uint8), [terms[0]], [target])]
    with simulate(_Unordered()):
        others = [[term.view(torch.uint8)] for term in terms[1:]]
        of = Unencoded(torch.bfloat16, torch.float32)
        add_up(of, sums, others, partial(torch.Tensor.div_, other=3), torch.empty(0))
    assert torch.equal(target, torch.arange(6.0))
