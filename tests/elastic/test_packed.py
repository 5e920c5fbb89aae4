"""Tensors in one piece of memory (:mod:`fullshard.elastic.packed`)."""

from __future__ import annotations

import torch

from fullshard.elastic.packed import copy_of, pack, places_of, unpack


def test_tensors_of_any_kind_are_packed() -> None:
    tensors = [
        torch.arange(6.0).view(2, 3).t(),
        torch.empty(0, 3),
        torch.tensor(True),
        torch.ones(3).bfloat16(),
        torch.tensor([1j]),
    ]
    found = unpack(pack(tensors))
    assert [(each.shape, each.dtype) for each in found] == [(each.shape, each.dtype) for each in tensors]
    assert all(torch.equal(one, other) for one, other in zip(found, tensors, strict=True))
    assert unpack(pack([])) == []
    (empty,) = unpack(pack([torch.empty(0)]))
    assert empty.shape == (0,)


def test_a_packed_tensor_is_a_copy_in_the_packed_memory() -> None:
    tensor = torch.zeros(4)
    packed = pack([tensor])
    tensor.fill_(1.0)
    (copied,) = unpack(packed)
    assert not copied.any()
    copied.fill_(2.0)
    assert unpack(packed)[0].eq(2.0).all(), "it is not copied again"
    again = copy_of(packed.memory)
    packed.memory[:] = bytes(packed.memory.nbytes)
    assert unpack(packed._replace(memory=again))[0].eq(2.0).all()
    assert copy_of(memoryview(b"")) == b""


def test_no_two_tensors_share_64_bytes() -> None:
    nbytes, places = places_of([torch.zeros(1), torch.zeros(17), torch.zeros(1).bool()])
    assert [start for start, *_ in places] == [0, 64, 192]
    assert nbytes == 256
