"""Clipping parts of gradients is clipping the gradients."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.optim.clip import clip_local_shards
from tests.harness import World, ranks

CPU = torch.device("cpu")
NORMS = pytest.mark.parametrize("p", [1, 2.0, 0.5, "inf"])
#: Sizes of gradients: most ranks have nothing of the first, and one parameter is empty.
SHARDED, WHOLE = (1, 17, 0, 64, 5), (3, 0, 8)


def gradients(sizes: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def with_gradient(grad: Tensor) -> nn.Parameter:
    param = nn.Parameter(torch.zeros_like(grad))
    param.grad = grad.clone()
    return param


def cut(grad: Tensor, world: World) -> Tensor:
    chunks = grad.chunk(world.size)
    return chunks[world.rank] if world.rank < len(chunks) else grad[:0]


class Case:
    def __init__(self, world: World, dtype: torch.dtype = torch.float32, whole: tuple[int, ...] = WHOLE) -> None:
        self.world = world
        self.reference = [with_gradient(g) for g in gradients(SHARDED, dtype, 0) + gradients(whole, dtype, 1)]
        self.sharded = [with_gradient(cut(g, world)) for g in gradients(SHARDED, dtype, 0)]
        self.whole = [with_gradient(g) for g in gradients(whole, dtype, 1)]
        for params in (self.sharded, self.whole):
            params.append(nn.Parameter(torch.ones(2)))  # unused in forward

    def clip(self, max_norm: float, p: Any, group: dist.ProcessGroup | None = None) -> Tensor:
        return clip_local_shards(dict.fromkeys(self.sharded, 1), self.whole, max_norm, p, group, CPU)

    def parts_of_reference(self) -> list[Tensor]:
        grads = [param.grad for param in self.reference]
        return [cut(grad, self.world) for grad in grads[: len(SHARDED)]] + grads[len(SHARDED) :]  # type: ignore[misc]

    def parts(self) -> list[Tensor]:
        return [param.grad for param in self.sharded + self.whole if param.grad is not None]


@ranks(1, 2, 3)
@NORMS
@pytest.mark.parametrize("max_norm", [0.1, 1, 1e6])
@pytest.mark.parametrize("whole", [WHOLE, ()], ids=["both", "sharded"])
def test_norm_and_gradients_are_those_of_clipping_unsharded(
    world: World, p: Any, max_norm: float, whole: tuple[int, ...]
) -> None:
    case = Case(world, whole=whole)
    expected = nn.utils.clip_grad_norm_(
        [param for param in case.reference if param.numel()], max_norm, float(p), foreach=False
    )
    before = case.parts()[1].clone()
    total = case.clip(max_norm, p)
    torch.testing.assert_close(total, expected)
    assert total.ndim == 0
    for mine, theirs in zip(case.parts(), case.parts_of_reference(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert (max_norm == 1e6) == torch.equal(case.parts()[1], before)
    assert_alike(total)


def assert_alike(total: Tensor) -> None:
    """To the bit, NaN too: ranks whose factors differ drift apart."""
    bits = total.float().view(torch.int32)
    others = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
    dist.all_gather(others, bits)
    assert all(torch.equal(bits, other) for other in others)


@ranks(2)
@NORMS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_accumulated_in_full_precision_and_returned_as_they_are_but_for_fp16(
    world: World, dtype: torch.dtype, p: Any
) -> None:
    case = Case(world, dtype)
    exact = torch.linalg.vector_norm(torch.cat([param.grad.double() for param in case.reference]), float(p))  # type: ignore[union-attr]
    total = case.clip(1.0, p)
    returned = torch.float32 if dtype == torch.float16 else dtype
    assert total.dtype == returned
    torch.testing.assert_close(total, exact.float().to(returned), rtol=torch.finfo(torch.float16).eps, atol=0)
    factor = min(1.0, 1.0 / exact.item())
    for mine, theirs in zip(case.parts(), case.parts_of_reference(), strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine, (theirs.double() * factor).to(dtype), rtol=2e-2, atol=1e-6)


@ranks(2)
def test_the_norm_of_many_small_halves_does_not_stall(world: World) -> None:
    """In fp16 a sum of 40,000 ones ends at 2,048."""
    param = with_gradient(torch.ones(20_000, dtype=torch.float16))
    assert clip_local_shards({param: 1}, [], 1e6, 1, None, CPU) == 40_000


@ranks(2)
def test_dtypes_that_differ_promote_as_torchs_do(world: World) -> None:
    low, full = with_gradient(torch.full((2,), 3.0, dtype=torch.bfloat16)), with_gradient(torch.full((2,), 4.0))
    total = clip_local_shards({low: 1}, [full], 1.0, 1, None, CPU)
    assert total.dtype == torch.float32
    assert total == 2 * 6 + 8
    assert low.grad is not None
    assert full.grad is not None
    assert low.grad.dtype == torch.bfloat16
    torch.testing.assert_close(full.grad, torch.full((2,), 0.2))


@ranks(2, 3)
@NORMS
def test_a_rank_without_gradients_warns_and_has_the_norm_of_the_others(world: World, p: Any) -> None:
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(0))]
    if world.rank == 0:
        params[0].grad = torch.tensor([3.0, -4.0])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            total = clip_local_shards(dict.fromkeys(params, 1), [], 1.0, p, None, CPU)
        assert total == torch.linalg.vector_norm(torch.tensor([3.0, -4.0]), float(p))
    else:
        with pytest.warns(UserWarning, match=f"no gradient on rank {world.rank}; .* as torch.float32"):
            total = clip_local_shards(dict.fromkeys(params, 1), [], 1.0, p, None, CPU)
    assert_alike(total)


@ranks(1, 2)
@NORMS
def test_without_gradients_anywhere_the_norm_is_zero(world: World, p: Any) -> None:
    with pytest.warns(UserWarning, match="found no gradient"):
        total = clip_local_shards({nn.Parameter(torch.ones(2)): 1}, [], 1.0, p, None, CPU)
    assert total == 0
    assert total.dtype == torch.float32


@ranks(2, 3)
@NORMS
@pytest.mark.parametrize("poison", [math.inf, math.nan])
@pytest.mark.parametrize("culprit", [0, -1], ids=["first", "last"])
def test_what_is_not_finite_on_one_rank_is_so_on_all(world: World, p: Any, poison: float, culprit: int) -> None:
    """A maximum of floats may lose a NaN, and on some ranks only."""
    case = Case(world)
    if world.rank == culprit % world.size:
        case.parts()[1][0] = poison
    total = case.clip(1.0, p)
    assert total.isnan() if math.isnan(poison) else total.isinf()
    assert_alike(total.nan_to_num())


@ranks(4)
@NORMS
def test_a_part_that_several_ranks_of_the_group_have_counts_once(world: World, p: Any) -> None:
    """As where some modules are sharded over all ranks, and others inside of nodes and replicated over these."""
    hybrid, full = with_gradient(torch.full((1,), 3.0 + world.rank % 2)), with_gradient(torch.ones(2))
    total = clip_local_shards({hybrid: 2, full: 1}, [], 1.0, p, None, CPU)
    expected = torch.linalg.vector_norm(torch.tensor([3.0, 4.0, *[1.0] * 8]), float(p))
    torch.testing.assert_close(total, expected)


@ranks(2)
@NORMS
def test_without_sharded_parameters_ranks_clip_apart(world: World, p: Any) -> None:
    """The group may have fewer ranks than the world, or there may be none to name."""
    if world.rank == 0:
        param = with_gradient(torch.tensor([3.0, -4.0]))
        norm = torch.linalg.vector_norm(torch.tensor([3.0, -4.0]), float(p))
        torch.testing.assert_close(clip_local_shards({}, [param], 1.0, p, None, CPU), norm)
        torch.testing.assert_close(param.grad, torch.tensor([3.0, -4.0]) / norm)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert clip_local_shards({}, [], 1.0, p, None, CPU) == 0


@ranks(2)
def test_one_number_is_communicated(world: World) -> None:
    calls: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        reduce = dist.all_reduce
        patch.setattr(dist, "all_reduce", lambda t, *a, **k: (calls.append(t.numel()), reduce(t, *a, **k))[1])
        Case(world).clip(1.0, 2)
        Case(world).clip(1.0, math.inf)
    assert calls == [1, 1]


@pytest.mark.parametrize("p", [0, -1, -math.inf, math.nan])
def test_norms_that_are_none_are_refused(p: float) -> None:
    with pytest.raises(ValueError, match=r"norm_type is .*; expected a number above 0"):
        clip_local_shards({}, [], 1.0, p, None, CPU)


@ranks(2)
@pytest.mark.parametrize("p", [1, 2, 3])
def test_gradients_of_fp16_are_scaled_by_a_norm_that_fp16_cannot_hold(world: World, p: int) -> None:
    """60,000 is finite in fp16, and the norm of two of them is not: its factor would be 0."""
    params = [with_gradient(torch.full((4,), 60_000.0, dtype=torch.float16)) for _ in range(2)]
    total = clip_local_shards({params[0]: 1}, params[1:], 8000.0, p, None, CPU)
    assert total.item() == pytest.approx(60_000 * 12 ** (1 / p))
    expected = torch.full((4,), 8000.0 / 12 ** (1 / p))
    for param in params:
        assert param.grad is not None
        torch.testing.assert_close(param.grad.float(), expected, rtol=2e-3, atol=0)
