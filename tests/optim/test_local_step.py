"""Steps on local tensors are the steps on DTensors, to the bit, whatever a user does in between."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import fullshard
from fullshard.torch_private import local_of
from tests.fully_shard.cases import inputs, local
from tests.harness import World, ranks
from tests.harness.compare import each_block
from tests.harness.models import MixedDtypes, OddParameters, Transformer, seeded, token_batch
from tests.harness.slow import slow, some
from tests.optim.cases import (
    BEYOND_TORCH,
    FOREACH,
    FUSED,
    LOOP,
    OPTIMIZERS,
    Pair,
    assert_same,
    backward,
    on_dtensors,
    runs_on_local,
    sharded,
    state_of,
)
from tests.parity.test_composition import split_over

QUICK = [
    "SGD loop",
    "Adagrad foreach",
    "RMSprop momentum centered foreach",
    "AdamW loop",
    "AdamW foreach",
    "AdamW fused",
]
HOW = pytest.mark.parametrize("how", [FOREACH, FUSED, *slow(LOOP)], ids=["foreach", "fused", "loop"])


@ranks(1, 2, 3)
@pytest.mark.parametrize("name", some([name for name in OPTIMIZERS if name not in BEYOND_TORCH], QUICK[-2:]))
def test_steps_are_those_on_dtensors(world: World, name: str) -> None:
    cls, options = OPTIMIZERS[name]
    pair = Pair(cls, **options)
    for seed in range(4):
        pair.step(seed)


@ranks(1, 2, 3)
@pytest.mark.parametrize("name", some(OPTIMIZERS, QUICK))
def test_steps_are_those_of_plain_tensors(world: World, name: str) -> None:
    cls, options = OPTIMIZERS[name]
    model = sharded()
    plain = [nn.Parameter(local(param).clone()) for param in model.parameters()]
    optimizer, reference = cls(model.parameters(), **options), cls(plain, **options)
    for seed in range(4):
        backward(model, seed)
        for mine, theirs in zip(model.parameters(), plain, strict=True):
            theirs.grad = None if mine.grad is None else local(mine.grad).clone()
        assert runs_on_local(optimizer)
        reference.step()
        assert_same(model.parameters(), plain)
    for (one, _, mine), (other, _, theirs) in zip(state_of(optimizer), state_of(reference), strict=True):
        assert one == other
        assert torch.equal(local(mine), theirs)
        assert isinstance(mine, DTensor) == (one not in ("step", "eta", "mu", "mu_product"))


@ranks(2)
def test_state_that_is_missing_is_made_anew(world: World) -> None:
    pair = Pair(torch.optim.SGD, momentum=0.9)
    pair.step(0)
    for optimizer in pair.optimizers:
        for entry in optimizer.state.values():
            entry["momentum_buffer"] = None
    pair.step(1)
    assert all(isinstance(entry["momentum_buffer"], DTensor) for entry in pair.optimizers[0].state.values())


@ranks(2, 4)
@HOW
def test_parameters_of_several_dtypes(world: World, how: dict[str, bool]) -> None:
    mesh = world.mesh(2, 2, names=("replicate", "shard")) if world.size == 4 else None
    pair = Pair(torch.optim.Adam, **how)
    pair.models = [sharded(MixedDtypes, mesh=mesh) for _ in range(2)]
    pair.optimizers = [
        type(old)(model.parameters(), lr=0.02, **how) for old, model in zip(pair.optimizers, pair.models, strict=True)
    ]
    for seed in range(3):
        pair.step(seed)


@pytest.mark.slow
@ranks(4)
@HOW
def test_beside_tensor_parallel(world: World, how: dict[str, bool]) -> None:
    mesh = world.mesh(2, 2, names=("data", "tensor"))
    pair = Pair()
    for number, cls in enumerate((torch.optim.Adam, on_dtensors(torch.optim.Adam))):
        model = seeded(lambda: Transformer(hidden=18))
        split_over(mesh["tensor"], model)
        each_block(mesh=mesh["data"])(fullshard, model)
        pair.models[number] = model
        pair.optimizers[number] = cls(model.parameters(), lr=0.02, **how)
    for seed in range(3):
        for model in pair.models:
            model(*token_batch(3, 5)(seed)).square().mean().backward()
        assert runs_on_local(pair.optimizers[0])
        pair.optimizers[1].step()
        pair.check()


@ranks(2)
@HOW
def test_outside_of_a_step_everything_is_a_dtensor(world: World, how: dict[str, bool]) -> None:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), **how)
    groups, params, state = optimizer.param_groups, list(model.parameters()), optimizer.state
    backward(model, 0)
    gradients = [param.grad for param in params]
    optimizer.step()
    assert optimizer.param_groups is groups
    assert optimizer.state is state
    assert all(one is other for one, other in zip(groups[0]["params"], params, strict=True))
    assert all(param.grad is grad for param, grad in zip(params, gradients, strict=True))
    trained = [param for param in params if param.requires_grad]
    assert list(state) == trained
    for param in trained:
        assert list(state[param]) == ["step", "exp_avg", "exp_avg_sq"]
        assert isinstance(state[param]["exp_avg"], DTensor)
        assert state[param]["exp_avg"].shape == param.shape
        assert not isinstance(state[param]["step"], DTensor)
    entries = [list(entry.values()) for entry in state.values()]
    backward(model, 1)
    optimizer.step()
    for entry, before in zip(state.values(), entries, strict=True):
        assert all(one is other for one, other in zip(entry.values(), before, strict=True)), "the same tensors stay"


@ranks(2)
def test_state_shares_the_memory_of_the_step(world: World) -> None:
    pair = Pair(torch.optim.SGD, momentum=0.9)
    pair.step()
    for optimizer in pair.optimizers:
        for entry in optimizer.state.values():
            entry["momentum_buffer"].mul_(3.0)
    pair.step(1)


@ranks(2)
def test_gradients_are_not_kept_by_a_step(world: World) -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model, 0)
    gradients = [weakref.ref(local_of(param.grad)) for param in model.parameters() if param.grad is not None]
    optimizer.step()
    optimizer.zero_grad()
    assert [reference() for reference in gradients] == [None] * len(gradients)


@ranks(2)
def test_a_step_is_noticed_by_the_next_gather(world: World) -> None:
    model = sharded(reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    backward(model, 0)
    before = model(inputs(1))
    optimizer.step()
    assert not torch.equal(model(inputs(1)), before)


@ranks(2)
def test_hooks_of_the_user_run_outside_of_the_local_step(world: World) -> None:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    seen: list[str] = []

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        seen.append("before")
        assert all(isinstance(param, DTensor) for param in optimizer.param_groups[0]["params"])
        optimizer.param_groups[0]["lr"] = 0.0
        for param in model.parameters():
            if param.grad is not None:
                param.grad = param.grad * 2

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        seen.append("after")
        assert all(isinstance(entry["exp_avg"], DTensor) for entry in optimizer.state.values())
        for param, entry in optimizer.state.items():
            assert torch.allclose(local(entry["exp_avg"]), 0.1 * local(param.grad))

    for _ in range(2):  # hooks that were there before the first step, and hooks that came after it
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        optimizer.state.clear()
        backward(model, 0)
        values = [local(param).clone() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        assert_same(model.parameters(), values)
    assert seen == ["before", "after", "before", "before", "after", "after"]


@ranks(2)
def test_learning_rates_of_a_scheduler(world: World) -> None:
    pair = Pair(torch.optim.SGD, momentum=0.9, lr=0.1)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in pair.optimizers]
    for seed in range(4):
        pair.step(seed)
        for scheduler in schedulers:
            scheduler.step()
    assert pair.optimizers[0].param_groups[0]["lr"] == 0.1 * 0.5**4


@ranks(2)
def test_groups_that_differ_and_one_that_is_added(world: World) -> None:
    pair = Pair()
    for number, (model, old) in enumerate(list(pair.both)):
        first, *rest = model.parameters()
        pair.optimizers[number] = type(old)([{"params": [first], "lr": 0.1}, {"params": rest[2:]}], weight_decay=0.1)
    for seed in range(4):
        pair.step(seed)
        if seed == 1:
            for model, optimizer in pair.both:
                optimizer.add_param_group({"params": list(model.parameters())[1:3], "betas": (0.5, 0.9)})
        if seed == 2:
            for optimizer in pair.optimizers:  # the same parameters in the same order, in other groups
                one, two = optimizer.param_groups[:2]
                one["params"].append(two["params"].pop(0))


@ranks(2)
def test_gradients_come_and_go(world: World) -> None:
    pair = Pair(foreach=True)
    for seed in range(5):
        for model in pair.models:
            backward(model, seed)
            for number, param in enumerate(model.parameters()):
                if param.grad is not None and (number + seed) % 3 == 0:
                    param.grad = None
        for optimizer in pair.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=seed % 2 == 0)
        pair.check()


@ranks(2)
def test_state_is_replaced(world: World) -> None:
    pair = Pair(torch.optim.Adam, amsgrad=True)
    pair.step(0)
    kept = [copy.deepcopy(optimizer.state_dict()) for optimizer in pair.optimizers]
    pair.step(1)
    for optimizer in pair.optimizers:
        entry = next(iter(optimizer.state.values()))
        entry["exp_avg"] = entry["exp_avg"] * 2
    pair.step(2)
    for optimizer, state in zip(pair.optimizers, kept, strict=True):
        optimizer.load_state_dict(state)
    pair.step(3)
    for optimizer in pair.optimizers:
        del optimizer.state[next(iter(optimizer.state))]
    pair.step(4)
    for optimizer in pair.optimizers:
        optimizer.state.clear()
    pair.step(5)
    for optimizer in pair.optimizers:
        one, two = [entry for param, entry in optimizer.state.items() if param.shape == (5, 6)] * 2
        one["exp_avg"], two["exp_avg_sq"] = two["exp_avg_sq"], one["exp_avg"]
    pair.step(6)


@ranks(2)
def test_old_state_is_not_kept_when_other_is_loaded(world: World) -> None:
    model = sharded()
    optimizer = torch.optim.Adam(model.parameters())
    backward(model, 0)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    old = weakref.ref(local_of(next(iter(optimizer.state.values()))["exp_avg"]))
    optimizer.load_state_dict(state)
    assert old() is None


@ranks(2)
@pytest.mark.parametrize("how", ["assign", "to", "to_empty"])
def test_parameters_are_replaced(world: World, how: str) -> None:
    pair = Pair(torch.optim.SGD, momentum=0.9, foreach=True)
    pair.step(0)
    for model in pair.models:
        state = {name: value.clone() for name, value in model.state_dict().items()}
        if how == "to":
            model.to(torch.float64)
        elif how == "to_empty":
            model.to_empty(device="cpu")
            model.load_state_dict(state)
        else:
            model.load_state_dict(state, assign=True)
    if how == "to":
        for model, optimizer in pair.both:
            optimizer.state.clear()
            model(inputs().double()).sum().backward()
        assert runs_on_local(pair.optimizers[0])
        pair.optimizers[1].step()
        pair.check()
    elif how == "to_empty":
        pair.step(1)
    else:  # other parameters, so another optimizer
        for number, (model, old) in enumerate(list(pair.both)):
            pair.optimizers[number] = type(old)(model.parameters(), lr=0.1)
        pair.step(1)


@ranks(2)
def test_plain_parameters_beside_sharded_ones(world: World) -> None:
    model, adapter = sharded(), nn.Linear(6, 6)
    plain = copy.deepcopy(adapter)
    optimizer = torch.optim.AdamW([*adapter.parameters(), *model.parameters()], fused=True)
    reference = torch.optim.AdamW(plain.parameters(), fused=True)
    for seed in range(3):
        for module in (adapter, plain):
            module(inputs(seed)).square().sum().backward()
        backward(model, seed)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
        assert_same(adapter.parameters(), plain.parameters())
    assert not isinstance(optimizer.state[adapter.weight]["exp_avg"], DTensor)
    assert isinstance(optimizer.state[model.gain]["exp_avg"], DTensor)


@ranks(2)
@HOW
@pytest.mark.parametrize("overflow", [False, True])
def test_scaled_gradients(world: World, how: dict[str, bool], overflow: bool) -> None:
    pair = Pair(torch.optim.Adam, **how)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2)]
    for seed in range(3):
        for (model, optimizer), scaler in zip(pair.both, scalers, strict=True):
            loss = model(inputs(seed)).square().mean()
            scaler.scale(loss * (1e38 if overflow and world.rank == 1 and seed == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert not hasattr(optimizer, "found_inf")
        pair.check()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0 ** (9 if overflow else 10)
    steps = {entry["step"].item() for entry in pair.optimizers[0].state.values()}
    assert steps == {2.0 if overflow else 3.0}


class Heavy(Optimizer):
    """An optimizer whose state of a parameter is a tensor, and no dict of them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                before = self.state.get(param)
                self.state[param] = param.grad.clone() if before is None else param.grad.lerp(before, 0.5)
                param.sub_(self.state[param], alpha=0.1)


@ranks(2)
def test_state_that_is_a_tensor_is_not_lost_when_it_is_replaced(world: World) -> None:
    model, plain = sharded(), seeded(OddParameters)
    optimizers = fullshard.optim.local_step(Heavy(model.parameters())), Heavy(plain.parameters())
    for seed in range(4):
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            backward(each, seed)
            optimizer.step()
            optimizer.zero_grad()
            for key in [*optimizer.state] if seed == 1 else ():
                optimizer.state[key] = optimizer.state[key] * 2
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs)


class Devices(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], torch.Tensor) and args[0].ndim and func.__name__.split(".")[0].endswith("_"):
            device = args[0].device.type
            if self.found[-1:] != [device]:
                self.found.append(device)
        return func(*args, **(kwargs or {}))


@ranks(1)
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("several_groups", [False, True])
def test_what_is_on_a_device_steps_before_what_is_on_the_cpu(world: World, cls: Any, several_groups: bool) -> None:
    """Its kernels then run while the CPU updates. Here the device is meta, which has no values."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = nn.Sequential(*copy.deepcopy(plain), *(nn.Linear(4, 4, device="meta") for _ in range(2)))
    for layer in model:
        fullshard.fully_shard(layer)
    optimizers = []
    for each in (plain, model):
        params = list(each.parameters())
        groups = [{"params": [param], "lr": 0.1 * at} for at, param in enumerate(params)]
        optimizers.append(cls(groups if several_groups else params))
    for _ in range(3):
        for param in (*plain.parameters(), *model.parameters()):
            param.grad = torch.ones_like(param)
        optimizers[0].step()
        with Devices() as devices:
            optimizers[1].step()
        assert devices.found[-2:] == ["meta", "cpu"]
        assert devices.found.count("cpu") == 1 or cls is torch.optim.Adagrad
    assert_same(plain.parameters(), map(local, list(model.parameters())[:4]))
    for param in model.parameters():
        assert {name: type(value) for name, value in optimizers[1].state[param].items()} == {
            name: DTensor if value.ndim else torch.Tensor
            for name, value in optimizers[0].state[next(plain.parameters())].items()
        }
