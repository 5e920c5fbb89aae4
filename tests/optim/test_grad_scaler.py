"""A step that overflows on one rank is skipped by all, and otherwise the numbers are those of torch's scaler."""

from __future__ import annotations

import inspect
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import sharded_grad_scaler
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fullshard.optim import ShardedGradScaler
from tests.fully_shard.cases import local
from tests.harness import World, ranks
from tests.harness.slow import slow
from tests.optim.cases import sharded

TORCHS = sharded_grad_scaler.ShardedGradScaler
Cut = Callable[[World, int], Tensor]


def part(world: World, size: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """This rank's part of a parameter: rank 0 has all of it if it has one element."""
    shares = torch.randn(size, generator=torch.Generator().manual_seed(size)).chunk(world.size)
    mine = shares[world.rank] if world.rank < len(shares) else torch.empty(0)
    return nn.Parameter(mine.to(dtype))


def parts(world: World) -> list[nn.Parameter]:
    """A flat parameter, fragments of which the last ranks have none, in several dtypes, and one without a gradient."""
    return [
        part(world, 24),
        part(world, 1),
        part(world, 2, torch.float16),
        part(world, 6, torch.bfloat16),
        nn.Parameter(torch.zeros(0)),
        nn.Parameter(torch.ones(3)),
    ]


def give_gradients(params: Sequence[Tensor], seed: int, scale: float, poison: float | None = None) -> None:
    """The same gradients for the same seed, times ``scale``; the last element of the last that has one is poisoned."""
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator) * scale).to(param.dtype)
    if poison is not None:
        next(p.grad for p in reversed(params) if p.grad is not None and p.numel()).view(-1)[-1] = poison


def scaler(cls: type = ShardedGradScaler, **options: Any) -> Any:
    """A scaler for the CPU that grows at each second step, after it was used for a loss.

    Torch's takes the group that was the world when it was imported, if it is given none.
    """
    if cls is TORCHS:
        options["process_group"] = dist.group.WORLD
    made = cls("cpu", **{"init_scale": 8.0, "growth_interval": 2, **options})
    made.scale(torch.ones(()))
    return made


class Run:
    def __init__(self, cls: type, params: Sequence[nn.Parameter], momentum: float = 0.9, **options: Any) -> None:
        self.params = list(params)
        self.optimizer = torch.optim.SGD(self.params, lr=0.1, momentum=momentum)
        self.scaler = scaler(cls, **options)

    def step(self, seed: int, poison: float | None, unscale_first: bool = False) -> None:
        give_gradients(self.params[:-1], seed, self.scaler.get_scale(), poison)
        if unscale_first:
            self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def test_the_constructor_is_torchs() -> None:
    def named(cls: type) -> list[tuple[str, Any]]:
        return [(p.name, p.default) for p in inspect.signature(cls).parameters.values()]

    assert named(ShardedGradScaler)[:-1] == named(TORCHS)[:-1]
    assert named(ShardedGradScaler)[-1] == ("process_group", None)  # which is what torch's is until there is a world
    assert issubclass(ShardedGradScaler, torch.amp.GradScaler)


@ranks(1, 2, 3)
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_steps_and_scales_are_torchs(world: World, poison: float, unscale_first: bool) -> None:
    """Steps 0, 1, 2 poison nothing, this rank alone, or all; growth, back-off and gradients are compared to the bit."""
    ours, theirs = Run(ShardedGradScaler, parts(world)), Run(TORCHS, parts(world))
    for seed in range(9):
        poisoned = [False, world.rank == seed % world.size, True][seed % 3] and seed % 2 == 1
        for run in (ours, theirs):
            run.step(seed, poison if poisoned else None, unscale_first)
        assert ours.scaler.state_dict() == theirs.scaler.state_dict()
        for mine, torchs in zip(ours.params, theirs.params, strict=True):
            assert torch.equal(mine, torchs)
            assert (mine.grad is None) == (torchs.grad is None)
            assert mine.grad is None or torch.equal(mine.grad.nan_to_num(), torchs.grad.nan_to_num())
    assert ours.scaler.get_scale() != 8.0


@ranks(2, 3)
def test_a_rank_without_any_gradient_takes_part(world: World) -> None:
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    run = Run(ShardedGradScaler, params[: 1 + (world.rank == 0)])  # others have one parameter and no gradient for it
    run.step(0, math.nan if world.rank == 0 else None)
    assert torch.equal(run.params[0], torch.ones(3))
    assert run.scaler.get_scale() == 4.0


@ranks(2)
def test_several_optimizers_share_one_scale(world: World) -> None:
    first, second = Run(ShardedGradScaler, parts(world)), Run(ShardedGradScaler, parts(world))
    second.scaler = first.scaler
    before = second.params[0].detach().clone()
    for run, poison in ((first, math.inf if world.rank == 0 else None), (second, None)):
        give_gradients(run.params[:-1], 0, 8.0, poison)
        run.scaler.step(run.optimizer)
    first.scaler.update()
    assert not torch.equal(second.params[0], before), "its own gradients were finite"
    assert first.scaler.get_scale() == 4.0


@ranks(2, 3)
@pytest.mark.parametrize("unscale_first", [False, True])
def test_fused_optimizers_skip_together(world: World, unscale_first: bool) -> None:
    """Their step unscales by itself and never calls ``unscale_``; torch's scaler lets the other ranks step."""
    param = nn.Parameter(torch.ones(4))
    optimizer, ours = torch.optim.AdamW([param], lr=0.1, fused=True), scaler()
    for seed, poison in enumerate((math.inf if world.rank == 1 else None, None)):
        before = param.detach().clone()
        give_gradients([param], 0, ours.get_scale(), poison)
        if unscale_first:
            ours.unscale_(optimizer)
        ours.step(optimizer)
        ours.update()
        assert torch.equal(param, before) == (seed == 0), "all skip the first step, and none the second"
    assert ours.get_scale() == 4.0
    whole = nn.Parameter(torch.ones(4))
    give_gradients([whole], 0, 1.0)
    torch.optim.AdamW([whole], lr=0.1, fused=True).step()
    assert torch.allclose(param, whole), "one step, with the scale divided out"


@ranks(1, 2, 3)
@pytest.mark.parametrize("fused", [False, True])
def test_training_with_fully_shard_is_training_without_a_scale(world: World, fused: bool) -> None:
    """OddParameters has scalars, which are replicated, beside sharded parameters."""
    models = [sharded(), sharded()]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.02, fused=fused) for model in models]
    ours = scaler(growth_interval=100)
    for seed in range(3):
        for model, optimizer, scale in zip(models, optimizers, (True, False), strict=True):
            batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
            loss = model(batch).square().mean()
            (ours.scale(loss) if scale else loss).backward()
            if scale:
                ours.step(optimizer)
                ours.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
    for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(local(mine), local(theirs))


@ranks(2, 3)
@pytest.mark.parametrize("fused", [False, True])
def test_an_infinity_in_the_last_shard_stops_all(world: World, fused: bool) -> None:
    model = sharded()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, fused=fused)
    before = [local(param).clone() for param in model.parameters()]
    ours = scaler()
    ours.scale(model(torch.ones(4, 6)).square().mean()).backward()
    if world.rank == world.size - 1:
        next(local(p.grad) for p in model.parameters() if local(p).numel()).view(-1)[0] = math.inf
    ours.step(optimizer)
    ours.update()
    assert all(torch.equal(local(param), kept) for param, kept in zip(model.parameters(), before, strict=True))
    assert ours.get_scale() == 4.0


@ranks(2)
def test_plain_gradients_and_dtensors_of_several_meshes_mix(world: World) -> None:
    one_rank = torch.distributed.device_mesh.DeviceMesh("cpu", [world.rank])
    params = [
        nn.Parameter(torch.ones(2)),
        nn.Parameter(distribute_tensor(torch.ones(4), world.mesh(), [Replicate()])),
        nn.Parameter(distribute_tensor(torch.ones(4), world.mesh(), [Shard(0)])),
        nn.Parameter(DTensor.from_local(torch.ones(2), one_rank, [Shard(0)])),
    ]
    optimizer, ours = torch.optim.SGD(params, lr=1.0, foreach=False), scaler()
    for poison in (None, math.inf):
        for param in params:
            param.grad = torch.ones_like(param) * ours.get_scale()
        if poison and world.rank:
            local(params[3].grad)[0] = poison
        ours.step(optimizer)
        ours.update()
    assert all(torch.equal(local(param), torch.zeros_like(local(param))) for param in params), "one step of the two"
    assert ours.get_scale() == 4.0


@pytest.mark.slow
@ranks(4)
def test_process_groups_skip_apart_unless_a_mesh_joins_them(world: World) -> None:
    mesh = world.mesh(2, 2, names=("dp", "tp"))
    for joined in (False, True):
        plain = torch.ones(2)
        param = nn.Parameter(distribute_tensor(plain, mesh["tp"], [Shard(0)]) if joined else plain)
        optimizer, ours = torch.optim.SGD([param], lr=1.0), scaler(process_group=mesh["dp"].get_group())
        param.grad = torch.ones_like(param) * 8
        if world.rank == 3:
            local(param.grad)[-1] = math.inf
        ours.step(optimizer)
        ours.update()
        skipped = ours.get_scale() == 4.0
        assert skipped == torch.equal(local(param), torch.ones_like(local(param)))
        assert skipped == (joined or world.rank in (1, 3)), "ranks 1 and 3 replicate the same part"


@ranks(1, 2)
def test_state_is_torchs_and_moves_between_scalers(world: World) -> None:
    run = Run(ShardedGradScaler, parts(world))
    run.step(0, None)
    theirs = scaler(TORCHS)
    theirs.load_state_dict(run.scaler.state_dict())
    copied = pickle.loads(pickle.dumps(run.scaler))
    assert copied.state_dict() == theirs.state_dict() == run.scaler.state_dict()
    assert copied.state_dict()["_growth_tracker"] == 1
    run.scaler = copied
    run.scaler.scale(torch.ones(()))
    run.step(1, None)
    assert copied.get_scale() == 16.0


@ranks(2)
@pytest.mark.parametrize("said", [False, *slow(True)])
def test_one_number_is_communicated_for_each_optimizer(world: World, said: bool) -> None:
    calls: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        reduce = dist.all_reduce
        patch.setattr(dist, "all_reduce", lambda t, *a, **k: (calls.append(t.numel()), reduce(t, *a, **k))[1])
        model, ours = sharded(), scaler(process_group=dist.group.WORLD if said else None)
        ours.scale(model(torch.ones(4, 6)).sum()).backward()
        calls.clear()
        ours.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert calls == [1]
