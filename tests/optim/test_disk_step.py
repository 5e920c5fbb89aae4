"""Training from a disk is training in memory, to the last bit."""

from __future__ import annotations

import gc
import tempfile
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fullshard import DiskError, DiskOffloadPolicy, OffloadPolicy, checkpoint, fully_shard
from fullshard.disk.file import DiskFile, DiskStaging
from fullshard.disk.tensor import DiskTensor
from fullshard.optim import disk_step, local_step
from tests.harness import World, ranks
from tests.harness.models import shard_each
from tests.harness.slow import slow, some

STEPS = 4


def build(policy: OffloadPolicy, zero_stage: int = 3) -> Any:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(96, 384), nn.ReLU(), nn.Linear(384, 96), nn.LayerNorm(96)) for _ in range(3)]
    model = nn.Sequential(*blocks)
    return shard_each(*model, model, offload_policy=policy, zero_stage=zero_stage)


def train(model: Any, optimizer: torch.optim.Optimizer, world: World, steps: range = range(STEPS)) -> None:
    for step in steps:
        for micro_batch in range(2):
            torch.manual_seed(10 * step + micro_batch)
            batch = torch.randn(world.size, 4, 96)[world.rank]
            model(batch).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    found: list[Any] = []
    for param in model.parameters():
        found += [param.detach(), *(value for _, value in sorted(optimizer.state.get(param, {}).items()))]
    tensors = [each for each in found if isinstance(each, Tensor)]
    return [(each.to_local() if isinstance(each, DTensor) else each).clone() for each in tensors]


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "AdamW foreach amsgrad": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "two groups": lambda params: torch.optim.AdamW(
        [{"params": [each], "lr": 0.01 * (number % 3)} for number, each in enumerate(params)]
    ),
}
SHARES: dict[str, dict[str, Any]] = {
    "all": {},
    "state": {"parameters": False},
    "half": {"parameters": 0.5},
    "half of the state": {"parameters": False, "optimizer_state": 0.5},
    "cached, little staging": {"direct": False, "staging_bytes": 1},
}


@ranks(1, 2)
@pytest.mark.parametrize("name", some(OPTIMIZERS, ["two groups"]))
def test_a_step_from_the_disk_is_the_step_in_memory(world: World, name: str) -> None:
    compare(world, name, "all")


@ranks(2)
@pytest.mark.parametrize("shares", some(SHARES, ["half"]))
def test_a_share_may_be_on_the_disk(world: World, shares: str) -> None:
    compare(world, "AdamW", shares)


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_every_stage_may_be_on_the_disk(world: World, zero_stage: int) -> None:
    compare(world, "AdamW", "all", zero_stage)


def compare(world: World, name: str, shares: str, zero_stage: int = 3) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as directory:
        patch.setattr(disk_step, "BLOCK", 1 << 14)  # so that these parameters are stepped on in pieces
        patch.setattr("fullshard.disk.file.BLOCK", 1 << 14)
        found = []
        for policy in (OffloadPolicy(), DiskOffloadPolicy(directory, **SHARES[shares])):
            model = build(policy, zero_stage)
            optimizer = OPTIMIZERS[name](model.parameters())
            train(model, optimizer, world)
            found.append(values(model, optimizer))
        on_disk = [isinstance(each.to_local(), DiskTensor) for each in model.parameters()]
        assert any(on_disk) == ("state" not in shares)
        assert len(found[0]) == len(found[1])
        assert all(map(torch.equal, *found))


@ranks(1)
def test_state_that_was_loaded_goes_to_the_disk(world: World, tmp_path: Path) -> None:
    policy = DiskOffloadPolicy(tmp_path)
    model, other = build(policy), build(policy)
    optimizer, loaded = (torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, other))
    train(model, optimizer, world)
    checkpoint.save(f"{tmp_path}/checkpoints", model, optimizer)
    checkpoint.load(f"{tmp_path}/checkpoints", other, loaded)
    for each in (loaded.state[param]["exp_avg"].to_local() for param in other.parameters() if param.numel() > 20000):
        assert isinstance(each, DiskTensor)
    train(model, optimizer, world, range(STEPS, STEPS + 2))
    train(other, loaded, world, range(STEPS, STEPS + 2))
    assert all(map(torch.equal, values(model, optimizer), values(other, loaded)))
    plain = build(OffloadPolicy())
    in_memory = torch.optim.AdamW(plain.parameters(), lr=0.01)
    checkpoint.load(f"{tmp_path}/checkpoints", plain, in_memory)
    train(plain, in_memory, world, range(STEPS, STEPS + 2))
    assert all(map(torch.equal, values(model, optimizer), values(plain, in_memory)))


@ranks(1)
def test_an_optimizer_that_needs_whole_parameters_is_refused(world: World, tmp_path: Path) -> None:
    model = build(DiskOffloadPolicy(tmp_path))
    optimizer = local_step(torch.optim.AdamW(model.parameters()), whole=True)
    model(torch.ones(1, 96)).sum().backward()
    with pytest.raises(ValueError, match=r"does not compute element by element, and the state of '0\.0\.weight'"):
        optimizer.step()


@ranks(1)
def test_a_disk_that_fails_in_a_step_names_the_parameter(world: World, tmp_path: Path) -> None:
    model = build(DiskOffloadPolicy(tmp_path))
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, world, range(1))

    def fail(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fullshard.disk.file.os.preadv", fail)
        with pytest.raises(DiskError, match=r"could not read .*'[\d.]+weight' in .*: Input/output error"):
            train(model, optimizer, world, range(1))


def train_in_backward(model: Any, world: World, change: bool) -> list[Tensor]:
    """Train with an optimizer for each parameter, which steps as soon as the gradient is there. Returns this rank's
    part of each parameter and state at the end. With ``change``, parameters and state change between steps."""
    optimizers = {param: torch.optim.AdamW([param], lr=0.01) for param in model.parameters()}
    for param, optimizer in optimizers.items():

        def step(param: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            grad = param.grad.to_local()  # type: ignore[union-attr]
            assert not isinstance(grad, DiskTensor), "a gradient that is used at once needs no disk"
            optimizer.step()
            optimizer.zero_grad()

        param.register_post_accumulate_grad_hook(step)
    for number in range(STEPS):
        torch.manual_seed(number)
        model(torch.randn(world.size, 4, 96)[world.rank]).square().mean().backward()
        assert all(param.grad is None for param in model.parameters())
        if change and number == 1:
            with torch.no_grad():
                for param, optimizer in optimizers.items():
                    param.mul_(0.5)
                    optimizer.state[param]["exp_avg"].mul_(0.5)
                    optimizer.load_state_dict(optimizer.state_dict())
    return [each for param, optimizer in optimizers.items() for each in values(nn.ParameterList([param]), optimizer)]


@ranks(1, 2)
@pytest.mark.parametrize("change", [True, *slow(False)])
@pytest.mark.parametrize("shares", ["half", *slow("all", "state", "cached, little staging")])
def test_optimizers_that_step_in_backward_read_ahead_what_is_there_then(
    world: World, shares: str, change: bool, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_step, "BLOCK", 1 << 14)
        patch.setattr("fullshard.disk.file.BLOCK", 1 << 14)
        used, take = list[bool](), disk_step.DiskStep._take_ahead

        def note(*given: Any) -> Any:
            used.append(bool(found := take(*given)))
            return found

        patch.setattr(disk_step.DiskStep, "_take_ahead", note)
        found = [
            train_in_backward(build(policy), world, change)
            for policy in (OffloadPolicy(), DiskOffloadPolicy(tmp_path, **SHARES[shares]))
        ]
        assert all(map(torch.equal, *found))
        assert sum(used) > len(used) // 2, "what is read ahead is used"
        assert all(used[len(used) * 3 // 4 :])


@ranks(1)
def test_a_gradient_that_no_hook_has_used_goes_to_the_disk(world: World, tmp_path: Path) -> None:
    found = []
    for policy in (OffloadPolicy(), DiskOffloadPolicy(tmp_path)):
        model = build(policy)
        seen: list[Tensor] = []

        def see(param: Any, seen: list[Tensor] = seen) -> None:
            seen.append(param.grad.to_local().clone())

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(see)
        for _ in range(2):
            model(torch.ones(1, 96)).square().mean().backward()
        grads = [param.grad.to_local() for param in model.parameters()]
        found.append([*seen, *(grad.clone() for grad in grads)])
    on_disk = [isinstance(grad, DiskTensor) for grad in grads]
    assert on_disk == [param.numel() > 20000 for param in model.parameters()]
    assert all(map(torch.equal, *found))


@ranks(1)
def test_a_step_uses_memory_again_and_no_more_than_it_may(world: World, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_step, "BLOCK", 1 << 14)
        patch.setattr("fullshard.disk.file.BLOCK", 1 << 14)
        policy = DiskOffloadPolicy(tmp_path, staging_bytes=1 << 19)
        model = build(policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        train(model, optimizer, world, range(2))
        (file,) = (each for each in DiskFile.opened() if each.directory == Path(tmp_path))
        taken, take = list[tuple[int, int]](), file.staging.take

        def note(*given: Any) -> Tensor:
            memory = take(*given)
            taken.append((memory.data_ptr(), memory.nbytes))
            return memory

        patch.setattr(file.staging, "take", note)
        train(model, optimizer, world, range(2, 4))
        assert sum(nbytes for _, nbytes in set(taken)) <= 1 << 19
        assert len(taken) > 4 * len(set(taken))
        assert file.staging._nbytes <= 1 << 19


@ranks(1)
def test_memory_of_different_sizes_is_bounded_too(world: World, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        model: Any = nn.Sequential(*(nn.Linear(192 + 4 * at, 196 + 4 * at) for at in range(24)))
        fully_shard(model, offload_policy=DiskOffloadPolicy(tmp_path, staging_bytes=1 << 22))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        alive, most, take = list[tuple[weakref.ref[Any], int]](), list[int](), DiskStaging.take

        def note(staging: DiskStaging, *given: Any) -> Tensor:
            memory = take(staging, *given)
            alive.append((weakref.ref(memory.untyped_storage()), memory.nbytes))
            most.append(sum(nbytes for storage, nbytes in alive if storage() is not None))
            return memory

        patch.setattr(DiskStaging, "take", note)
        for _ in range(3):
            model(torch.ones(1, 192)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert len(alive) > 100
        assert max(most) <= 1 << 22


@ranks(1)
def test_nothing_that_was_read_ahead_outlives_the_model(world: World, tmp_path: Path) -> None:
    model = build(DiskOffloadPolicy(tmp_path))
    optimizers = [torch.optim.AdamW([param], lr=0.01) for param in model.parameters()]
    for _ in range(3):
        model(torch.ones(1, 96)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    values(model, optimizers[-1])  # waits for what is still written
    lives = weakref.ref(model), *map(weakref.ref, model.parameters())
    del model, optimizer, optimizers
    gc.collect()
    assert [live() for live in lives] == [None] * len(lives)


@ranks(2)
def test_a_gradient_that_lies_otherwise_than_its_parameter(world: World, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(512, 256, bias=False)
    layer.weight = nn.Parameter(torch.randn(512, 256).t())
    before = layer.weight.detach().clone()
    model: Any = fully_shard(nn.Sequential(layer), offload_policy=DiskOffloadPolicy(tmp_path))
    (param,) = model.parameters()
    grad = torch.randn(before.shape)
    param.grad = distribute_tensor(grad, param.device_mesh, param.placements)
    torch.optim.SGD([param], lr=0.5).step()
    assert torch.equal(values(model, torch.optim.SGD([param]))[0], (before - 0.5 * grad).chunk(2)[world.rank])
