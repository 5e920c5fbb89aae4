"""Tensors whose values are on a disk do what tensors in memory do."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fullshard.disk.file import BLOCK, DiskFile
from fullshard.disk.tensor import DiskTensor, in_memory_order


@pytest.fixture
def file(tmp_path: Path) -> DiskFile:
    return DiskFile(tmp_path)


def pair(file: DiskFile, *shape: int) -> tuple[DiskTensor, Tensor]:
    values = torch.rand(*shape) + 0.5
    return DiskTensor.holding(file, values, "a tensor"), values.clone()


CHANGES: list[Callable[[Any, Tensor], object]] = [
    lambda x, y: x.mul_(2),
    lambda x, y: x.copy_(y),
    lambda x, y: x.zero_(),
    lambda x, y: x.fill_(3),
    lambda x, y: x[1:3].copy_(y[1:3]),
    lambda x, y: x[0].add_(1),
    lambda x, y: x.t()[2].zero_(),
    lambda x, y: x.view(-1)[5:].mul_(3),
    lambda x, y: x.copy_(x.t().contiguous().t() * 2),
    lambda x, y: x.copy_(x),
    lambda x, y: x.addcmul_(y, y, value=0.5),
    lambda x, y: x.split(2)[1].neg_(),
    lambda x, y: torch.add(y, 1, out=x),
    lambda x, y: torch._foreach_mul_([x, y], 2),
    lambda x, y: torch._foreach_add_([x, y.clone()], [y, y], alpha=2),
    lambda x, y: torch._foreach_addcdiv_([x], [y], [y + 1], [0.5]),
    lambda x, y: torch._foreach_copy_([x], [y]),
    lambda x, y: x.clamp_(max=1).sqrt_(),
]


def test_a_change_changes_what_is_on_the_disk(file: DiskFile) -> None:
    for number, change in enumerate(CHANGES):
        (mine, theirs), other = pair(file, 4, 6), torch.rand(4, 6)
        before = mine.region.writes
        change(mine, other.clone())
        change(theirs, other.clone())
        assert torch.equal(mine, theirs), number
        assert mine.region.writes > before, number


READS: list[Callable[[Any], Any]] = [
    lambda x: x + 1,
    lambda x: x[2],
    lambda x: x.sum().item(),
    lambda x: x.t() @ x,
    lambda x: x.norm(),
    lambda x: x.isfinite().all(),
    lambda x: torch._foreach_norm([x, x * 2]),
    lambda x: torch.zeros_like(x),
    lambda x: torch.full_like(x, 2, dtype=torch.float64),
    lambda x: x.new_zeros(3),
    lambda x: x.to(torch.bfloat16),
    lambda x: x.clone().numpy().tolist(),
    lambda x: torch.stack([x, x]),
    lambda x: copy.deepcopy(x),
]


def test_a_read_gives_what_is_on_the_disk(file: DiskFile) -> None:
    mine, theirs = pair(file, 4, 6)
    for number, read in enumerate(READS):
        one, other = read(mine), read(theirs)
        pairs = zip(one, other, strict=True) if isinstance(one, (tuple, list)) else [(one, other)]
        for found, expected in pairs:
            assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected)), number


def test_lists_of_tensors_are_taken_one_by_one(file: DiskFile, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = [pair(file, 100)[0] for _ in range(5)]
    sizes, real = list[int](), torch.empty

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        sizes.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    torch._foreach_add_(mine, mine)
    assert len(sizes) == 5, "a tensor that is in the operation twice is read once"


def test_an_operation_that_would_give_it_other_memory_is_refused(file: DiskFile) -> None:
    mine, theirs = pair(file, 4)
    with pytest.raises(RuntimeError, match=r"resize_ on DiskTensor.*offloaded to a disk"):
        mine.resize_(8)
    with pytest.raises(RuntimeError, match=r"offloaded to a disk: clone it first"):
        mine.view(torch.int32)
    for share in (mine.share_memory_, lambda: torch.from_dlpack(mine)):  # which would read from address 0
        with pytest.raises(RuntimeError, match=r"on DiskTensor.*offloaded to a disk: copy its values first"):
            share()
    assert torch.equal(mine, theirs)


def test_its_values_go_to_numpy_and_python(file: DiskFile) -> None:
    numpy = pytest.importorskip("numpy")
    mine, theirs = pair(file, 3, 2)
    for array in (mine.numpy(), mine.detach().t().numpy().T, numpy.asarray(mine)):
        assert numpy.array_equal(array, theirs.numpy())
    assert mine.tolist() == theirs.tolist()
    assert f"{mine[0, 1]:.3f}" == f"{theirs[0, 1]:.3f}"
    numpy.array(mine)[0] = 7  # a copy
    with pytest.raises(ValueError, match="read-only"):  # or it would be lost
        mine.numpy()[0] = 7


def test_it_is_pickled_as_a_plain_tensor(file: DiskFile) -> None:
    mine, theirs = pair(file, 3, 2)
    buffer = io.BytesIO()
    torch.save(mine, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)
    assert type(loaded) is Tensor
    assert torch.equal(loaded, theirs)


def test_a_memory_order_is_kept(file: DiskFile) -> None:
    values = torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)
    mine = DiskTensor.holding(file, values, "")
    assert mine.stride() == values.stride()
    assert torch.equal(mine, values)
    with pytest.raises(AssertionError, match="gaps"):
        in_memory_order(torch.rand(4, 4)[:, :2])


def test_its_parts_are_its_values(file: DiskFile) -> None:
    mine, theirs = pair(file, BLOCK // 2)
    parts = [*mine.parts()]
    assert len(parts) == 2
    assert torch.equal(torch.cat(parts), theirs)
    assert torch.equal(torch.cat([*mine[3:].parts()]), theirs[3:])
