"""DTensors with ragged cuts: what torch does with them is what it does with the whole tensor, or an error."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fullshard import Ragged, checkpoint, fully_shard
from fullshard.ragged import RaggedShard
from tests.checkpoint.test_save import run
from tests.harness import RankPool, World, ranks
from tests.harness.models import seeded


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 10, bias=False), nn.Linear(10, 6, bias=False), nn.Linear(6, 7))


class Scale(nn.Module):
    """A scalar, of which every rank has all."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def sharded(rows: int | None, seed: int = 0) -> Any:
    """A model whose matrices are cut between blocks of so many rows (0: evenly)."""
    placement = None if rows == 0 else Ragged(rows=rows)
    return fully_shard(seeded(build, seed), shard_placement_fn=lambda param: placement if param.ndim > 1 else None)


def wholes(tensors: Iterable[Any]) -> list[Tensor]:
    return [each.detach().full_tensor() for each in tensors]


def assert_same(found: Iterable[Any], expected: Iterable[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.full_tensor() if isinstance(one, DTensor) else one, other)


def test_a_placement_is_equal_to_one_with_the_same_cuts() -> None:
    one = RaggedShard(0, (0, 6, 10), "w")
    assert one == RaggedShard(0, (0, 6, 10))
    assert len({one, RaggedShard(0, (0, 6, 10)), RaggedShard(0, (0, 3, 10)), Shard(0)}) == 3
    assert not one == Shard(0)  # noqa: SIM201
    assert not Shard(0) == one  # noqa: SIM201
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one
    assert repr(one) == "RaggedShard(dim=0, cuts=(0, 6, 10))"
    with pytest.raises(ValueError, match="cuts 10 rows over 2 ranks, and was asked to cut 9 over 2"):
        one.part(torch.zeros(9), 0)


ELEMENTWISE: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda p: (2 * p + p.abs().sqrt()) / 3,
    "comparison": lambda p: p > 0,
    "conversion": lambda p: p.to(torch.bfloat16).clone(),
    "likes": torch.zeros_like,
    "in place": lambda p: p.clone().mul_(2).add_(p),
    "second result": lambda p: torch.frexp(p)[1],
}


@ranks(2, 3)
@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_operators_compute_element_by_element(world: World, kind: str) -> None:
    model, function = sharded(3), ELEMENTWISE[kind]
    if kind == "second result":
        try:
            function(distribute_tensor(torch.ones(4), init_device_mesh("cpu", (world.size,)), [Replicate()]))
        except NotImplementedError:
            pytest.skip("this torch has no rule for frexp of any DTensor")
    for param, whole in zip(model.parameters(), seeded(build).parameters(), strict=True):
        assert_same([function(param.detach())], [function(whole.detach())])


@ranks(2, 3)
def test_lists_of_tensors_have_cuts_of_their_own(world: World) -> None:
    params = [param.detach() for param in sharded(3).parameters()]
    wholes = [param.detach() for param in seeded(build).parameters()]
    assert_same(torch._foreach_mul(params, 2.0), torch._foreach_mul(wholes, 2.0))
    assert_same(torch._foreach_add(params[:3], params[:3]), torch._foreach_add(wholes[:3], wholes[:3]))


REFUSED: dict[str, Callable[[Any], Any]] = {
    "view": lambda p: p.view(-1),
    "transpose": lambda p: p.t(),
    "matmul": lambda p: p @ p.new_ones(p.shape[1], 2),
    "mean": lambda p: p.mean(),
    "maximum": lambda p: p.max(),
    "index": lambda p: p[0],
    "concatenate": lambda p: torch.cat([p, p]),
    "maxima of lists": lambda p: torch._foreach_max([p]),
    "other cuts": lambda p: p + distribute_tensor(torch.ones(10, 8), p.device_mesh, [Shard(0)]),
    "broadcast": lambda p: p + distribute_tensor(torch.ones(8), p.device_mesh, [Replicate()]),
}


@ranks(2)
@pytest.mark.parametrize("kind", REFUSED)
def test_operators_that_torch_cannot_follow_name_the_parameter(world: World, kind: str) -> None:
    model = sharded(3)
    even = distribute_tensor(torch.ones(10, 8), model[0].weight.device_mesh, [Shard(0)])
    with pytest.raises((NotImplementedError, RuntimeError), match=r"parameter '0.weight' of shape \(10, 8\)"):
        REFUSED[kind](model[0].weight.detach())
    assert even.mean().full_tensor() == 1  # torch's own rules are as before
    assert even.t().full_tensor().shape == (8, 10)


NORMS: dict[str, Callable[[list[Any], float], Any]] = {
    "norm": lambda params, order: torch.linalg.vector_norm(params[0], order),
    "norms of a list": lambda params, order: torch._foreach_norm(params, order)[1],
    "total norm": torch.nn.utils.get_total_norm,
}


@ranks(2, 3)
@pytest.mark.parametrize("order", [1, 2, 0, 0.5, torch.inf, -torch.inf, -1])
def test_norms_of_each_order_are_those_of_the_whole_or_refused(world: World, order: float) -> None:
    whole = [param.detach() for param in seeded(build).parameters()][:2]
    parts, lacking = ([param.detach() for param in sharded(rows).parameters()][:2] for rows in (2, None))
    for norm in NORMS.values():
        torch.testing.assert_close(norm(parts, order).full_tensor(), norm(whole, order))
        if 0 <= order < torch.inf:
            torch.testing.assert_close(norm(lacking, order).full_tensor(), norm(whole, order))
        else:  # a norm of nothing has no value
            with pytest.raises(NotImplementedError, match=r"parameter '0.weight' of shape \(10, 8\)"):
                norm(lacking, order)


@ranks(2, 3)
def test_norms_and_clipping_are_those_of_the_whole(world: World) -> None:
    whole = nn.Sequential(seeded(build), Scale())
    model: Any = fully_shard(copy.deepcopy(whole), shard_placement_fn=lambda param: Ragged() if param.ndim else None)
    for each in (model, whole):
        each(torch.ones(3, 8)).square().mean().backward()
    found = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.01)
    assert isinstance(found, DTensor)
    torch.testing.assert_close(found.full_tensor(), expected)
    for param, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), other.grad)


@ranks(2, 3)
@pytest.mark.parametrize("rows", [None, 3])
def test_redistribution_to_other_placements_and_back(world: World, rows: int | None) -> None:
    param, whole = sharded(rows)[0].weight.detach(), seeded(build)[0].weight.detach()
    for placement in (
        Replicate(),
        Shard(0),
        Shard(1),
        RaggedShard(0, [10 * (rank > 0) for rank in range(world.size + 1)]),
    ):
        other = param.redistribute(placements=[placement])
        assert other.placements == (placement,)
        assert_same([other, other.redistribute(placements=param.placements)], [whole, whole])
        back = other.redistribute(placements=param.placements)
        assert torch.equal(back.to_local(), param.to_local())
        target = torch.zeros_like(param)
        assert_same([target.copy_(other)], [whole])
    chunks = whole.chunk(world.size)
    assert torch.equal(param.redistribute(placements=[Shard(0)]).to_local(), chunks[world.rank])


@ranks(2)
def test_tensors_are_copied_and_pickled(world: World) -> None:
    model, expected = sharded(3), [param.detach() for param in seeded(build).parameters()]
    assert_same(copy.deepcopy(model).parameters(), expected)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert_same(torch.load(file, weights_only=True).values(), expected)
    values = DTensor.from_local(  # as torchao makes its state
        model[0].weight.to_local(),
        model[0].weight.device_mesh,
        model[0].weight.placements,
        shape=(10, 8),
        stride=(8, 1),
    )
    assert_same([values], expected[:1])


def train(model: Any, optimizer: Any, seed: int) -> None:
    model(torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@ranks(2, 3)
@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
def test_optimizers_step_on_ragged_dtensors(world: World, how: dict[str, bool]) -> None:
    """With a closure, no step is on local tensors."""
    found = []
    for model in (sharded(3), seeded(build)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **how)

        def closure(model: Any = model, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = model(torch.ones(3, 8)).square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        found.append([each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def state_of(model: Any, optimizer: Any) -> list[Tensor]:
    names = ("exp_avg", "exp_avg_sq")
    return wholes([*model.parameters(), *(optimizer.state[p][name] for p in model.parameters() for name in names)])


@ranks(3)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(before, after, marks=() if (before, after) in ((None, 3), (0, None)) else pytest.mark.slow)
        for before in (None, 3, 0)
        for after in (None, 3, 0)
    ],
)
def test_checkpoints_are_loaded_into_other_cuts(
    world: World, tmp_path: Path, before: int | None, after: int | None
) -> None:
    model, found = sharded(before), sharded(after, seed=1)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, found)]
    train(model, optimizers[0], 1)
    train(found, optimizers[1], 2)
    checkpoint.save(tmp_path / "ours", model, optimizers[0])
    checkpoint.load(tmp_path / "ours", found, optimizers[1])
    assert_same(state_of(found, optimizers[1]), expected := state_of(model, optimizers[0]))
    train(found, optimizers[1], 3)
    states = [
        dict(zip(("model", "optimizer"), get_state_dict(*each), strict=True))
        for each in ((model, optimizers[0]), (found, optimizers[1]))
    ]
    torch_dcp.save(states[0], checkpoint_id=tmp_path / "torch")
    torch_dcp.load(states[1], checkpoint_id=tmp_path / "torch")
    assert_same(state_of(found, optimizers[1]), expected)
    full = dict(zip(model.state_dict(), expected, strict=False))
    set_model_state_dict(
        found, {name: 2 * whole for name, whole in full.items()}, options=StateDictOptions(full_state_dict=True)
    )
    assert_same(found.parameters(), [2 * whole for whole in full.values()])


def save_state(world: World, folder: Path, rows: int | None) -> list[Tensor]:
    model = sharded(rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, 1)
    checkpoint.save(folder / "ours", model, optimizer)
    torch_dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "torch")
    return state_of(model, optimizer)


def load_state(world: World, folder: Path, rows: int | None) -> tuple[list[Tensor], list[Tensor]]:
    model = sharded(rows, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, 2)
    checkpoint.load(folder / "ours", model, optimizer)
    found = state_of(model, optimizer)
    other = sharded(rows, seed=1)
    torch_dcp.load({"model": other.state_dict()}, checkpoint_id=folder / "torch")
    return found, wholes(other.parameters())


@pytest.mark.parametrize(
    ("before", "after"),
    [(3, 0), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((None, 3), (3, None), (0, None)))],
)
def test_checkpoints_are_loaded_by_other_numbers_of_ranks(
    rank_pool: RankPool, tmp_path: Path, before: int | None, after: int | None
) -> None:
    expected = run(rank_pool, save_state, 2, tmp_path, before)[0]
    for size in (1, 3):
        for found, by_torch in run(rank_pool, load_state, size, tmp_path, after):
            assert_same(found, expected)
            assert_same(by_torch, expected[: len(by_torch)])


@ranks(2)
def test_parameters_that_cannot_be_ragged_are_named(world: World) -> None:
    model = nn.Sequential(nn.Linear(8, 10))
    with pytest.raises(ValueError, match=r"Ragged\(.*tile=\(2, 2\)\) for parameter '0.bias' of shape \(10,\)"):
        fully_shard(model, shard_placement_fn=lambda param: Ragged(tile=(2, 2)))
    linear = nn.Linear(8, 10, bias=False)
    linear.weight = nn.Parameter(
        distribute_tensor(linear.weight.detach(), world.mesh(1, 2, names=("dp", "tp"))["tp"], [Shard(0)])
    )
    with pytest.raises(ValueError, match="parameter 'weight', which is a DTensor already"):
        fully_shard(linear, mesh=world.mesh(1, 2, names=("dp", "tp"))["dp"], shard_placement_fn=lambda param: Ragged())
