"""Parity of `summon_full_params`, `apply`, and of how a wrapped model is looked at: names, roots, attributes."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from tests.harness import World, ranks
from tests.harness.compare import mean_square
from tests.harness.models import MLP, random_batch, seeded
from tests.harness.slow import slow
from tests.harness.wrapper import (
    EACH_WRAPPER,
    ORIGINAL,
    OUR_WRAPPER,
    SHARDED,
    STRATEGIES,
    WRAPPERS,
    assert_all_see,
    wrap,
    wrap_blocks,
)

EACH_STRATEGY = pytest.mark.parametrize("strategy", ["FULL_SHARD", *slow("SHARD_GRAD_OP"), "NO_SHARD"])
BOOLEANS = [False, True]


def summon(fsdp: ModuleType, model: nn.Module, **options: Any) -> Any:
    return fsdp.FullyShardedDataParallel.summon_full_params(model, **options)


def look(model: nn.Module) -> dict[str, Any]:
    return {name: (list(p.shape), p.dtype, p.requires_grad, p.tolist()) for name, p in model.named_parameters()}


@ranks(1, 2, 3, transport="shm")
@EACH_STRATEGY
@ORIGINAL
def test_full_parameters_are_those_of_the_plain_module(world: World, strategy: str, original: bool) -> None:
    for fsdp in WRAPPERS.values():
        model = wrap_blocks(strategy=strategy, original=original)(fsdp, seeded(MLP))
        before = look(model)
        for _ in range(2):
            with summon(fsdp, model):
                assert look(model) == look(seeded(MLP))
                assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
            assert look(model) == before


@ranks(2, transport="shm")
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        *((strategy, {"recurse": False}) for strategy in STRATEGIES),
        *((strategy, {"rank0_only": True, "writeback": False}) for strategy in SHARDED),
    ],
)
@ORIGINAL
def test_options_that_show_less(world: World, strategy: str, original: bool, options: dict[str, bool]) -> None:
    """Without `recurse` only the parameters of the unit itself, with `rank0_only` nothing on other ranks."""

    def observe(fsdp: ModuleType) -> Any:
        model = wrap_blocks(strategy=strategy, original=original)(fsdp, seeded(MLP))
        with summon(fsdp, model, **options):
            seen = [look(model), look(model.blocks[0])]
        with summon(fsdp, model.blocks[1], **options):
            seen += [look(model)]
        return [*seen, look(model)]

    assert_all_see(observe)


WRITES = pytest.mark.parametrize(
    ("strategy", "writeback"),
    # Where nothing is sharded torch keeps writes even without writeback, which is no more than what its memory does.
    [*((strategy, True) for strategy in STRATEGIES), *((strategy, False) for strategy in SHARDED)],
)


@ranks(2)
@WRITES
@ORIGINAL
def test_writes_that_stay(world: World, strategy: str, original: bool, writeback: bool) -> None:
    def observe(fsdp: ModuleType) -> Any:
        model = wrap_blocks(strategy=strategy, original=original)(fsdp, seeded(MLP))
        with summon(fsdp, model, writeback=writeback), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        with summon(fsdp, model):
            seen = look(model)
        output = model(*random_batch(4, 6)(0))
        return seen, output.tolist()

    assert_all_see(observe)
    scale = 2 if writeback else 1
    for fsdp in WRAPPERS.values():
        found, _ = observe(fsdp)
        assert found["scale"][-1] == pytest.approx((scale * seeded(MLP).scale).tolist())


@ranks(2, transport="shm")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@ORIGINAL
@pytest.mark.parametrize("rank0_only", BOOLEANS)
def test_offloaded_to_cpu(world: World, strategy: str, original: bool, rank0_only: bool) -> None:
    # Where all is on CPU, torch frees what it offloaded.
    for fsdp in OUR_WRAPPER.values():
        model = wrap_blocks(strategy=strategy, original=original)(fsdp, seeded(MLP))
        at_rest = look(model)
        with summon(fsdp, model, offload_to_cpu=True, rank0_only=rank0_only, writeback=not rank0_only):
            if world.rank == 0 or not rank0_only:
                assert look(model) == look(seeded(MLP))
                for parameter in model.parameters():
                    parameter.data.mul_(2)
        after = look(model)
        for name, (*_, values) in at_rest.items():
            scale = 1 if rank0_only else 2
            assert after[name][-1] == [scale * value for value in values]


@pytest.mark.slow
@ranks(2)
@WRITES
def test_full_gradients(world: World, strategy: str, writeback: bool) -> None:
    def grads(model: nn.Module) -> dict[str, Any]:
        return {name: None if p.grad is None else p.grad.tolist() for name, p in model.named_parameters()}

    def observe(fsdp: ModuleType) -> Any:
        model = wrap_blocks(strategy=strategy)(fsdp, seeded(MLP))
        mean_square(model, random_batch(4, 6)(0)).backward()
        with summon(fsdp, model, with_grads=True, writeback=writeback), torch.no_grad():
            seen = grads(model)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(2)
        return seen, grads(model)

    assert_all_see(observe)
    reference = seeded(MLP)
    mean_square(reference, random_batch(4, 6)(0)).backward()
    for fsdp in WRAPPERS.values():
        found, _ = observe(fsdp)
        for name, gradient in grads(reference).items():
            assert torch.allclose(torch.tensor(found[name]), torch.tensor(gradient), rtol=1e-6, atol=1e-8)


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_full_gradients_of_flat_parameters(world: World, strategy: str) -> None:
    """The function shows them; the method refuses, as torch's does."""
    model, reference = wrap_blocks(strategy=strategy, original=False)(fullshard, seeded(MLP)), seeded(MLP)
    for each in (model, reference):
        mean_square(each, random_batch(4, 6)(0)).backward()
    for factor in (1, 2):
        with fullshard.summon_full_params(model, with_grads=True), torch.no_grad():
            for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad, factor * torch.as_tensor(expected.grad))
                parameter.grad.mul_(2)


@ranks(2, transport="shm")
@EACH_WRAPPER
@ORIGINAL
def test_it_is_refused_inside_of_itself_and_of_a_step(world: World, library: str, original: bool) -> None:
    fsdp = WRAPPERS[library]

    class Summons(nn.Linear):
        around: list[Any]
        backward: bool

        def forward(self, x: Tensor) -> Tensor:
            if not self.backward:
                self.summon()
            y = super().forward(x)
            if self.backward and y.requires_grad:
                y.register_hook(lambda _: self.summon())
            return 2 * y

        def summon(self) -> None:
            with pytest.raises(AssertionError), summon(fsdp, self.around[0]):
                pass
            self.around.append("refused")

    for backward in BOOLEANS:
        layer = Summons(6, 3)
        model = wrap(fsdp, layer, original=original)
        layer.around, layer.backward = [model], backward
        mean_square(model, random_batch(4, 6)(0)).backward()
        assert layer.around[1:] == ["refused"]
    with summon(fsdp, model), pytest.raises(AssertionError), summon(fsdp, model):
        pass


@ranks(2, transport="shm")
@EACH_STRATEGY
@ORIGINAL
def test_apply_sees_whole_parameters(world: World, strategy: str, original: bool) -> None:
    def initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            assert module.weight.dim() == 2
            nn.init.kaiming_uniform_(module.weight, generator=torch.Generator().manual_seed(module.in_features))
            nn.init.ones_(module.bias)

    expected = seeded(MLP).apply(initialize)
    for fsdp in WRAPPERS.values():
        model = wrap_blocks(strategy=strategy, original=original)(fsdp, seeded(MLP))
        assert model.apply(initialize) is model
        with summon(fsdp, model):
            assert look(model) == look(expected)
            with pytest.raises((AssertionError, ValueError)):
                model.apply(initialize)


@ranks(2, transport="shm")
@ORIGINAL
def test_names_inside_and_outside(world: World, original: bool) -> None:
    def observe(fsdp: ModuleType) -> Any:
        plain: Any = seeded(MLP)
        plain.blocks[0].register_buffer("extra", torch.zeros(2))
        model = wrap_blocks(original=original)(fsdp, plain)

        def names() -> Any:
            of_parameters = [[n for n, _ in m.named_parameters(prefix="p")] for m in (model, model.blocks[0])]
            own = [name for name, _ in model.named_parameters(recurse=False)]
            return [of_parameters, own, [n for n, _ in model.named_buffers()], [n for n, _ in model.named_modules()]]

        seen = [names()]
        with summon(fsdp, model):
            seen.append(names())
        with summon(fsdp, model, recurse=False):
            seen.append(names())
        model(*random_batch(4, 6)(0))
        return [*seen, names()]

    assert_all_see(observe)


@ranks(2, transport="shm")
def test_roots_and_units(world: World) -> None:
    def observe(fsdp: ModuleType) -> Any:
        wrapper = fsdp.FullyShardedDataParallel
        models = nn.ModuleList([wrap_blocks()(fsdp, seeded(MLP)), nn.Linear(3, 3), wrap(fsdp, nn.Linear(3, 3))])
        names = {module: name for name, module in models.named_modules()}
        seen = [[names[unit] for unit in wrapper.fsdp_modules(models, root_only=only)] for only in BOOLEANS]
        units = wrapper.fsdp_modules(models)
        return [*seen, [unit.check_is_root() for unit in units], wrapper.fsdp_modules(nn.Linear(3, 3))]

    assert_all_see(observe)


@ranks(2, transport="shm")
@EACH_WRAPPER
@ORIGINAL
def test_attributes_and_indices_pass_through(world: World, library: str, original: bool) -> None:
    fsdp = WRAPPERS[library]
    first, second = nn.Linear(6, 5), nn.Linear(5, 3)
    plain: Any = nn.Sequential(first, second)
    plain.note = "hello"
    model = wrap(fsdp, plain, original=original)
    assert model.module is plain
    assert (model[0], model[1], model.note) == (first, second, "hello")
    assert list(plain.children()) == [first, second]
    assert wrap(fsdp, nn.Linear(4, 3), original=original).out_features == 3
    with pytest.raises(AttributeError):
        _ = model.missing
    with pytest.raises((AttributeError, TypeError)):
        _ = wrap(fsdp, nn.Linear(4, 3), original=original)[0]
    assert isinstance(model, fsdp.FullyShardedDataParallel)
    assert isinstance(model, nn.Module)
