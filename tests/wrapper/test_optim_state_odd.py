"""Optimizer state that is not as in the book: groups, frozen and ignored parameters, other dtypes, other keys."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import _NamedOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from fullshard.group.parameter import plain_name
from tests.checkpoint.cases import (
    CPU,
    LIBRARIES,
    OURS,
    TORCHS,
    assert_same,
    both_ways,
    choose,
    libraries,
    optimizer_of,
    quiet,
    to_dict,
    to_load,
    train,
    whole,
    with_optimizer,
    wrapped,
)
from tests.fully_shard.cases import first_of
from tests.harness import World, ranks
from tests.harness.models import MLP, seeded
from tests.harness.slow import slow


class Odd(Optimizer):
    """Keeps all kinds of state: a momentum in another dtype, a number, a text, a count on the optimizer itself."""

    def __init__(self, params: Any, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(params, {"lr": 0.1})
        self.dtype = dtype

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for options in self.param_groups:
            for param in options["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state.update(mean=torch.zeros_like(param, dtype=self.dtype), steps=0, kind="odd", none=None)
                    state["signs"] = torch.zeros_like(param, dtype=torch.bool)
                state["steps"] += 1
                state["mean"].add_(param.grad)
                state["signs"].copy_(param.grad > 0)
                param.data.sub_(state["mean"], alpha=options["lr"])


def saved_by(library: Any, make: Callable[[Any], Optimizer], build: Any = MLP, **options: Any) -> Any:
    """What a library saves after two steps, and what is loaded of that."""
    model = wrapped(library, build, **options)
    optimizer = make(model)
    choose(library, model, "FULL", offload_to_cpu=False)
    train(model, optimizer, range(2))
    with quiet():
        saved = library.methods.optim_state_dict(model, optimizer)
        return saved, library.methods.optim_state_dict_to_load(model, make(model), saved)


def two_groups(model: nn.Module) -> Optimizer:
    biases = [param for name, param in model.named_parameters() if name.endswith("bias")]
    others = [param for name, param in model.named_parameters() if not name.endswith("bias")]
    return torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": others, "lr": 0.1}], lr=0.02)


class Frozen(MLP):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block[0].bias.requires_grad_(False)


class Unused(MLP):
    """A parameter takes part in nothing, so that no optimizer has a state of it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].unused = nn.Parameter(torch.ones(3))


@ranks(2, 3)
def test_parameter_groups_frozen_and_unused_parameters_as_torch(world: World) -> None:
    for build in (MLP, Frozen, Unused):
        ours, theirs = (saved_by(library, two_groups, build, use_orig_params=True) for library in (OURS, TORCHS))
        assert_same(ours, theirs)
        assert len(ours[0]["param_groups"][0]["params"]) == 4


@ranks(2)
def test_groups_of_flat_parameters_as_torch(world: World) -> None:
    def halves(model: nn.Module) -> Optimizer:
        first, *rest = model.parameters()
        return torch.optim.Adam([{"params": [first]}, {"params": rest, "lr": 0.1}], lr=0.01)

    assert_same(saved_by(OURS, halves), saved_by(TORCHS, halves))


@ranks(2)
@both_ways
def test_ignored_parameters_keep_their_state(world: World, use_orig_params: bool) -> None:
    found = []
    for library in (OURS, TORCHS):
        model = seeded(MLP)
        kept = [model.scale, model.blocks[0][0].bias]
        how = {"device_id": CPU, "ignored_states": kept, "use_orig_params": use_orig_params}
        model.blocks[0] = library.wrap(model.blocks[0], **how)
        model, optimizer = with_optimizer(library.wrap(model, **how), "Adam")
        choose(library, model, "FULL", offload_to_cpu=False)
        train(model, optimizer, range(1))
        with quiet():
            saved = library.methods.optim_state_dict(model, optimizer)
            saved["param_groups"][0]["params"].sort()  # that of parameters(), in which torch has ignored ones first
            found.append((saved, library.methods.optim_state_dict_to_load(model, optimizer, saved)))
        assert_same(found[-1][1], optimizer.state_dict())
    assert_same(found[0][0], found[1][0])
    assert "scale" in found[0][0]["state"]


@ranks(2, 3)
@both_ways
def test_states_of_any_kind(world: World, use_orig_params: bool) -> None:
    model = wrapped(use_orig_params=use_orig_params)
    optimizer, plain = Odd(model.parameters()), seeded(MLP)
    expected = Odd(plain.parameters())
    train(model, optimizer, range(2))
    train(plain, expected, range(2))
    saved = to_dict(model, optimizer)
    for name, param in plain.named_parameters():
        assert_same(saved["state"][name], expected.state[param], name)
    assert saved["state"]["scale"]["mean"].dtype == torch.float64
    loaded = to_load(model, Odd(model.parameters()), saved)
    assert_same(loaded["state"], optimizer.state_dict()["state"])


@ranks(2)
def test_dtypes_that_differ_within_a_unit(world: World) -> None:
    model, optimizer = with_optimizer(wrapped(use_orig_params=True), "momentum", 1)
    for name, param in model.named_parameters():
        if name.endswith("bias") and param in optimizer.state:
            momentum = optimizer.state[param]["momentum_buffer"]
            optimizer.state[param]["momentum_buffer"] = momentum.bfloat16()
    saved = to_dict(model, optimizer)
    assert {name: state["momentum_buffer"].dtype for name, state in saved["state"].items()} == {
        name: torch.bfloat16 if name.endswith("bias") else torch.float32 for name in saved["state"]
    }
    assert_same(to_load(model, optimizer, saved)["state"], optimizer.state_dict()["state"])


@ranks(2, 3)
def test_states_that_only_some_parameters_have(world: World) -> None:
    model, optimizer = with_optimizer(wrapped(use_orig_params=True), "Adam", 2)
    missing = "blocks.1.0.weight"
    for name, param in model.named_parameters():
        if plain_name(name) == missing:
            optimizer.state.pop(param, None)
    saved = to_dict(model, optimizer)
    assert set(saved["state"]) == {name for name, _ in seeded(MLP).named_parameters()} - {missing}
    assert missing in saved["param_groups"][0]["params"]
    assert_same(to_load(model, optimizer, saved), optimizer.state_dict())


@ranks(2)
@both_ways
def test_an_optimizer_of_some_parameters(world: World, use_orig_params: bool) -> None:
    model = wrapped(use_orig_params=use_orig_params)
    optimizer = torch.optim.Adam(list(model.parameters())[:2])
    train(model, optimizer, range(2))
    saved = to_dict(model, optimizer)
    assert 0 < len(saved["state"]) < len(list(seeded(MLP).parameters()))
    assert set(saved["state"]) == set(saved["param_groups"][0]["params"])
    assert_same(to_load(model, optimizer, saved), optimizer.state_dict())


@ranks(2)
@first_of("use_orig_params", True, False)
def test_scalar_parameters(world: World, use_orig_params: bool) -> None:
    class Scaled(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.gain

    for kind in ("Adam", "NAdam", "ASGD"):  # some have numbers beside ``step``
        model = wrapped(build=Scaled, use_orig_params=use_orig_params)
        optimizer = getattr(torch.optim, kind)(model.parameters())
        train(model, optimizer, range(2))
        saved = to_dict(model, optimizer)
        assert saved["state"]["gain"]["ax" if kind == "ASGD" else "exp_avg"].shape == ()
        assert_same(to_load(model, optimizer, saved), optimizer.state_dict())


@ranks(2)
@both_ways
def test_nothing_is_shared_with_the_optimizer(world: World, use_orig_params: bool) -> None:
    model, optimizer = with_optimizer(wrapped(use_orig_params=use_orig_params, ignored_states=None), "Adam", 1)
    saved = to_dict(model, optimizer)
    steps = {id(state["step"]) for state in saved["state"].values()}
    assert len(steps) == len(saved["state"])
    train(model, optimizer, range(1, 2))
    assert all(state["step"] == 1 for state in saved["state"].values())
    to_load(model, optimizer, saved, load_directly=True)
    train(model, optimizer, range(1))
    assert all(state["step"] == 1 for state in saved["state"].values())
    assert all(state["step"] == 2 for state in optimizer.state.values())


@ranks(2)
@first_of("use_orig_params", False, True)
def test_rank0_only(world: World, use_orig_params: bool) -> None:
    model, optimizer = with_optimizer(wrapped(use_orig_params=use_orig_params), "Adam", 2, world.rank)
    everywhere = to_dict(model, optimizer)
    choose(OURS, model, "FULL", rank0_only=True)
    saved = to_dict(model, optimizer)
    assert saved.keys() == ({"state", "param_groups"} if world.rank == 0 else set())
    if world.rank == 0:
        assert_same(saved, everywhere)
        saved["state"]["users"], saved["state"]["count"] = torch.arange(3), 7
    for given in (saved, saved or None):  # ranks but the first may give nothing
        loaded = to_load(model, optimizer_of(model, "Adam"), given)
        assert torch.equal(loaded["state"].pop("users"), torch.arange(3))
        assert loaded["state"].pop("count") == 7
        assert_same(loaded, optimizer.state_dict())
    with pytest.raises(ValueError, match="has no 'state'"):
        to_load(model, optimizer, None)


@pytest.mark.slow
@ranks(4)
@first_of("use_orig_params", True, False)
@first_of("kind", "SHARDED", "FULL")
def test_hybrid_sharding(world: World, use_orig_params: bool, kind: str) -> None:
    mesh = world.mesh(2, 2, names=("replicate", "shard"))
    model = wrapped(strategy="HYBRID_SHARD", device_mesh=mesh, use_orig_params=use_orig_params)
    plain = seeded(MLP)
    optimizer, expected = optimizer_of(model, "Adam"), optimizer_of(plain, "Adam")
    train(model, optimizer, range(2))
    train(plain, expected, range(2))
    choose(OURS, model, kind)
    saved = to_dict(model, optimizer)
    for name, param in plain.named_parameters():
        average = saved["state"][name]["exp_avg"]
        if kind == "SHARDED":
            assert average.placements == (Replicate(), Shard(0))
            assert average.device_mesh.mesh.tolist() == mesh.mesh.tolist()
        torch.testing.assert_close(whole(average), expected.state[param]["exp_avg"], rtol=1e-4, atol=1e-7)
    assert_same(to_load(model, optimizer, saved), optimizer.state_dict())


@pytest.mark.slow
@ranks(3)
@first_of("use_orig_params", True, False)
@pytest.mark.parametrize("rank0_only", [True, *slow(False)])
def test_a_model_of_only_some_ranks(world: World, use_orig_params: bool, rank0_only: bool) -> None:
    """Nobody has to say which: the others do not take part."""
    for shape in ((1, 2), (2, 1), (2,)) if world.rank > 0 else ():
        mesh = DeviceMesh("cpu", torch.tensor([1, 2]).view(shape), mesh_dim_names=("replicate", "shard")[-len(shape) :])
        strategy = "HYBRID_SHARD" if len(shape) == 2 else "FULL_SHARD"
        model = wrapped(strategy=strategy, device_mesh=mesh, use_orig_params=use_orig_params)
        plain = seeded(MLP)
        optimizer, expected = optimizer_of(model, "Adam"), optimizer_of(plain, "Adam")
        train(model, optimizer, range(2))
        train(plain, expected, range(2))
        choose(OURS, model, "FULL", rank0_only=rank0_only)
        saved = to_dict(model, optimizer)
        assert bool(saved) is (world.rank == 1 or not rank0_only)
        for name, param in plain.named_parameters() if saved else ():
            assert_same(saved["state"][name]["exp_avg"], expected.state[param]["exp_avg"])
        assert_same(to_load(model, optimizer, saved), optimizer.state_dict())


@ranks(2)
@both_ways
def test_parameters_that_rest_on_the_cpu(world: World, use_orig_params: bool) -> None:
    model = wrapped(use_orig_params=use_orig_params, cpu_offload=OURS.settings.CPUOffload(offload_params=True))
    optimizer = optimizer_of(model, "Adam")
    train(model, optimizer, range(2))
    assert_same(to_load(model, optimizer, to_dict(model, optimizer)), optimizer.state_dict())


@ranks(2)
@both_ways
def test_dtensors_of_any_placement_are_loaded(world: World, use_orig_params: bool) -> None:
    model, optimizer = with_optimizer(wrapped(use_orig_params=use_orig_params), "Adam", 1)
    mesh = world.mesh()
    for placement in (Shard(0), Shard(1), Replicate()):
        saved = to_dict(model, optimizer)
        for state in saved["state"].values():
            place = placement if state["exp_avg"].ndim == 2 else Shard(0)
            state["exp_avg"] = distribute_tensor(state["exp_avg"], mesh, [place])
        assert_same(to_load(model, optimizer, saved), optimizer.state_dict())


@pytest.mark.slow
@ranks(4)
def test_beside_tensor_parallel(world: World) -> None:
    mesh = world.mesh(2, 2, names=("data", "tensor"))
    net = seeded(lambda: nn.Linear(6, 4, bias=False))
    full = net.weight.detach().clone()
    net.weight = nn.Parameter(distribute_tensor(full, mesh["tensor"], [Shard(0)]))
    model = OURS.wrap(net, device_mesh=mesh["data"], use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for param in model.parameters():  # the part is the parameter's own values
        if param.numel():
            optimizer.state[param]["momentum_buffer"] = param.detach().clone()
    for kind in ("FULL", "SHARDED"):
        choose(OURS, model, kind)
        saved = to_dict(model, optimizer)
        momentum = saved["state"]["weight"]["momentum_buffer"]
        assert isinstance(momentum, DTensor) is (kind == "SHARDED")
        assert torch.equal(whole(momentum), full)
        assert_same(to_load(model, optimizer, saved), optimizer.state_dict())


@ranks(1, 2)
@both_ways
def test_optimizers_that_name_parameters(world: World, use_orig_params: bool) -> None:
    model = wrapped(use_orig_params=use_orig_params)
    named = _NamedOptimizer(model.named_parameters(), torch.optim.Adam, None, model, lr=0.02)
    named.init_state()
    state = named.state_dict()
    assert all(isinstance(key, str) for key in state["state"])
    saved = to_dict(model, named, state)
    assert set(saved["state"]) == {name for name, _ in seeded(MLP).named_parameters()}
    loaded = to_load(model, named, saved, is_named_optimizer=True)
    assert_same(loaded["state"], state["state"])
    assert_same(loaded["param_groups"], state["param_groups"])


@ranks(2)
def test_a_named_optimizer_without_state(world: World) -> None:
    model, optimizer = with_optimizer(wrapped(use_orig_params=True), "Adam", 1)
    saved = to_dict(model, optimizer)
    empty = [name for name, param in model.named_parameters() if not param.numel()]
    with pytest.warns(UserWarning, match="has no state of") if empty else contextlib.nullcontext():
        loaded = to_load(model, optimizer_of(model, "Adam"), saved, is_named_optimizer=True)
    held = {name for name, param in model.named_parameters() if param.numel()}
    assert set(loaded["state"]) == held


@ranks(2)
@libraries
def test_states_of_no_parameter_are_copied_with_a_warning(world: World, name: str) -> None:
    library = LIBRARIES[name]
    model, optimizer = with_optimizer(wrapped(library), "Adam")
    choose(library, model, "FULL", offload_to_cpu=False)
    train(model, optimizer, range(1))
    state_dict = optimizer.state_dict()
    state_dict["state"]["of_user"] = [1, 2]
    with pytest.warns(UserWarning, match="of_user") as caught:
        saved = library.methods.optim_state_dict(model, optimizer, state_dict)
    assert name == "torch" or caught[0].filename == __file__
    assert saved["state"]["of_user"] == [1, 2]
    assert library.methods.optim_state_dict_to_load(model, optimizer, saved)["state"]["of_user"] == [1, 2]


@ranks(2)
def test_parameters_that_the_user_replaced(world: World) -> None:
    model = wrapped(use_orig_params=True)
    inner = model.module
    inner.scale = nn.Parameter(inner.scale.detach().clone())
    optimizer = optimizer_of(model, "Adam")
    assert to_dict(model, optimizer)["param_groups"][0]["params"][0] == "scale"


@ranks(2)
@both_ways
def test_where_parameters_are_whole_the_state_is_what_it_was(world: World, use_orig_params: bool) -> None:
    model, optimizer = with_optimizer(wrapped(strategy="SHARD_GRAD_OP", use_orig_params=use_orig_params), "Adam", 1)
    expected = to_dict(model, optimizer)
    with torch.no_grad():
        model(torch.ones(2, 6))
    assert_same(to_dict(model, optimizer), expected)
    with OURS.wrap.summon_full_params(model):
        assert_same(to_dict(model, optimizer), expected)
        assert_same(to_load(model, optimizer, expected), optimizer.state_dict())
