"""The wrapper beside what else users do: other dtypes, copies, ties, optimizers, tensor parallelism, the compiler."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fullshard
from tests.fully_shard.cases import first_of
from tests.harness import World, fake_world, ranks
from tests.harness.compare import LIBRARIES, TOLERANCE, compare, deviation, mean_square
from tests.harness.models import (
    MLP,
    MixedDtypes,
    OddParameters,
    Transformer,
    random_batch,
    seeded,
    split_over,
    token_batch,
)
from tests.harness.wrapper import (
    ORIGINAL,
    SHARDED,
    STRATEGIES,
    assert_all_see,
    training,
    wrap,
    wrap_blocks,
    wrap_whole,
)

FSDP = fullshard.FullyShardedDataParallel
BATCH = random_batch(4, 6)
UNITS = pytest.mark.parametrize("units", [wrap_blocks, wrap_whole])


@ranks(1, 2, 3)
def test_flat_parameters_say_what_torchs_say(world: World) -> None:
    def observe(fsdp: ModuleType, units: Any, strategy: str) -> Any:
        model = units(strategy=strategy, original=False)(fsdp, seeded(MLP))
        seen = []
        for wrapper in fsdp.FullyShardedDataParallel.fsdp_modules(model):
            flat = next(p for name, p in wrapper.module.named_parameters(recurse=False) if name == "_flat_param")
            assert isinstance(flat, fsdp.FlatParameter)
            said = flat.shard_metadata if fsdp is fullshard else wrapper._handle.shard_metadata()
            seen += [
                list(flat._fqns),
                list(flat._shapes),
                flat._numels,
                flat._num_params,
                flat._unpadded_unsharded_size,
                flat.size(),
                [tuple(each) for each in (said.param_names, said.param_shapes, said.param_numels, said.param_offsets)],
            ]
        return seen

    cases = list(itertools.product((wrap_blocks, wrap_whole), STRATEGIES))
    assert_all_see(lambda fsdp: [observe(fsdp, *case) for case in cases])


@ORIGINAL
def test_a_flat_parameter_is_not_flattened_again(original: bool) -> None:
    module = nn.Module()
    module.register_parameter("p", fullshard.FlatParameter(torch.ones(3)))
    with fake_world(2), pytest.raises(ValueError, match="'p' is a FlatParameter"):
        wrap(fullshard, module, original=original)


class Shifted(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("shift", torch.ones(6))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + self.shift


@ranks(2)
@ORIGINAL
def test_buffers_of_an_instance_inside_a_module_sharded_otherwise_are_cast(world: World, original: bool) -> None:
    inner = wrap(fullshard, Shifted(), original=original, flags={"buffer_dtype": torch.bfloat16})
    model = nn.Sequential(inner, nn.Linear(6, 5))
    fullshard.fully_shard(model)
    assert model(torch.ones(2, 6)).shape == (2, 5)
    assert inner.module.shift.dtype == torch.bfloat16


@ranks(2)
@ORIGINAL
def test_inner_instances_may_run_and_be_saved_before_the_root(world: World, original: bool) -> None:
    """Where torch fails once the root runs."""
    model = wrap_blocks(original=original)(fullshard, seeded(MLP))
    model.module.blocks[1].state_dict()
    assert torch.equal(model.module.blocks[0](*BATCH(0)), seeded(MLP).blocks[0](*BATCH(0)))
    mean_square(model, BATCH(world.rank)).backward()
    assert torch.allclose(model(*BATCH(0)), seeded(MLP)(*BATCH(0)), atol=1e-6)
    assert model.check_is_root()


def test_dtypes_of_one_unit_become_several_flat_parameters() -> None:
    with fake_world(2):
        model = wrap(fullshard, seeded(MixedDtypes), original=False)
    flats = {name.removeprefix("_fsdp_wrapped_module."): p.dtype for name, p in model.named_parameters()}
    assert flats == {"_flat_param": torch.float32, "_flat_param_1": torch.bfloat16, "_flat_param_2": torch.float64}
    assert all(isinstance(p, fullshard.FlatParameter) for p in model.parameters())


@ranks(2)
@UNITS
@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize("used", [False, True], ids=["before the first step", "after a step"])
@pytest.mark.parametrize("how", ["to", "half"])
@ORIGINAL
def test_another_dtype(world: World, units: Any, strategy: str, used: bool, how: str, original: bool) -> None:
    model, plain = units(strategy=strategy, original=original)(fullshard, seeded(MLP)), seeded(MLP)
    dtype = {"to": torch.float64, "half": torch.float16}[how]
    if used:
        mean_square(model, BATCH(0)).backward()
        model.zero_grad()
    for each in (model, plain):
        assert (each.to(dtype) if how == "to" else getattr(each, how)()) is each
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    batches = [BATCH(rank)[0].to(dtype) for rank in range(world.size)]
    assert torch.equal(model(batches[0]), plain(batches[0]))
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    mean_square(model, (batches[world.rank],)).backward()
    (sum(mean_square(plain, (batch,)) for batch in batches) / world.size).backward()  # type: ignore[union-attr]
    for optimizer in optimizers:
        optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.allclose(
            value.double(), plain.state_dict()[name].double(), atol=1e-2 if dtype.itemsize == 2 else 1e-9
        )


@ranks(2)
@first_of("strategy", *SHARDED)
@ORIGINAL
def test_a_weight_tied_across_units(world: World, strategy: str, original: bool) -> None:
    def shard(fsdp: ModuleType, model: Any) -> Any:
        model.head = wrap(fsdp, model.head, strategy=strategy, original=original)
        return wrap_blocks(strategy=strategy, original=original)(fsdp, model)

    compare_states(world, lambda: seeded(lambda: Transformer(tied=True)), shard, token_batch(3, 5))


def compare_states(
    world: World,
    build: Callable[[], nn.Module],
    shard: Callable[..., Any],
    batch: Callable[[int], Any],
    data_parallel: tuple[int, int] | None = None,
) -> None:
    """Train beside the whole model on all ranks' batches, and compare losses and state dicts."""
    rank, size = data_parallel or (world.rank, world.size)
    whole = build()
    model = shard(fullshard, build())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (whole, model)]
    for step in range(3):
        losses = [mean_square(whole, batch(step * size + other)) for other in range(size)]
        (torch.stack(losses).sum() / size).backward()
        loss = mean_square(model, batch(step * size + rank))
        loss.backward()
        assert deviation(loss.detach(), losses[rank].detach()) < 10 * TOLERANCE
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        state = model.state_dict()
        assert list(state) == list(whole.state_dict())
        for name, value in whole.state_dict().items():
            assert deviation(state[name], value) < 10 * TOLERANCE, (step, name)


@pytest.mark.slow
@ranks(4)
@first_of("strategy", *SHARDED)
@first_of("original", False, True)
def test_tensor_parallel(world: World, strategy: str, original: bool) -> None:
    mesh = world.mesh(2, 2, names=("data", "tensor"))

    def shard(fsdp: ModuleType, model: Any) -> Any:
        split_over(mesh["tensor"], model)
        return wrap_blocks(strategy=strategy, original=original, device_mesh=mesh["data"])(fsdp, model)

    compare_states(
        world, lambda: seeded(Transformer).double(), shard, token_batch(3, 5), (mesh["data"].get_local_rank(), 2)
    )


@ranks(4)
@first_of("original", False, True)
@first_of("kind", "SHARDED", "FULL")
def test_state_dicts_beside_tensor_parallel(world: World, original: bool, kind: str) -> None:
    mesh = world.mesh(2, 2, names=("data", "tensor"))

    def build(seed: int) -> Any:
        model: Any = seeded(Transformer, seed)
        split_over(mesh["tensor"], model)
        return wrap_blocks(original=original, device_mesh=mesh["data"])(fullshard, model)

    saved, model, plain = build(1), build(2), seeded(Transformer, 1).state_dict()
    setting = fullshard.StateDictType[f"{kind}_STATE_DICT"]
    with FSDP.state_dict_type(saved, setting), FSDP.state_dict_type(model, setting):
        state = saved.state_dict()
        for name, value in state.items():
            assert value.shape == plain[name].shape, name
            found = value.full_tensor() if isinstance(value, DTensor) else value
            assert torch.equal(found, plain[name]), name
        model.load_state_dict(state)
    assert all(torch.equal(value, plain[name]) for name, value in model.state_dict().items())
    model.load_state_dict(seeded(Transformer, 3).state_dict())
    expected = seeded(Transformer, 3).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
@ranks(2, timeout=180)
@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize(
    ("order", "original"),
    [("compiled inside", False), ("compiled inside", True), ("compiled outside", True)],  # as with torch's wrapper
)
def test_compiled_blocks(world: World, strategy: str, original: bool, order: str) -> None:
    def shard(fsdp: ModuleType, model: Any) -> Any:
        if order == "compiled inside":
            for index, block in enumerate(model.blocks):
                model.blocks[index] = torch.compile(block, backend="aot_eager")
        root = wrap_blocks(strategy=strategy, original=original)(fsdp, model)
        return torch.compile(root, backend="aot_eager") if order == "compiled outside" else root

    plain, model = seeded(MLP), shard(fullshard, seeded(MLP))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        losses = [mean_square(plain, BATCH(step * world.size + rank)) for rank in range(world.size)]
        (torch.stack(losses).sum() / world.size).backward()
        loss = mean_square(model, BATCH(step * world.size + world.rank))
        assert torch.allclose(loss, losses[world.rank], atol=1e-6)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@ranks(2)
@first_of("strategy", *STRATEGIES)
def test_an_optimizer_of_parameters_that_became_flat_is_refused(world: World, strategy: str) -> None:
    plain = seeded(MLP)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = wrap_blocks(strategy=strategy, original=False)(fullshard, plain)
    mean_square(model, BATCH(0)).backward()
    with pytest.raises(RuntimeError, match="SGD was built before"):
        optimizer.step()


@ranks(2)
@ORIGINAL
def test_writes_are_looked_for_unless_the_environment_says_no(world: World, original: bool) -> None:
    for skip in ("0", "1"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FSDP_SKIP_WRITEBACK_CHECK", skip)
            model = wrap(fullshard, seeded(MLP), original=original)
            before = model(*BATCH(0)).detach()
            for parameter in model.parameters():
                parameter.data = torch.zeros_like(parameter)
            assert torch.equal(model(*BATCH(0)), before) == (skip == "1")


@ranks(2)
@ORIGINAL
def test_data_of_another_shape_is_refused(world: World, original: bool) -> None:
    model = wrap(fullshard, seeded(MLP), original=original)
    model(*BATCH(0))
    for parameter in model.parameters():
        parameter.data = torch.zeros(parameter.numel() + 1)
    with pytest.raises(RuntimeError, match="shape"):
        model(*BATCH(0))


@ranks(2)
@pytest.mark.parametrize(("build", "original"), [(OddParameters, True), (MixedDtypes, False)])
def test_parameters_that_torch_refuses_or_lays_out_anew(world: World, build: Any, original: bool) -> None:
    """Scalars, those that are not contiguous, and those of several dtypes in one unit."""
    compare(world, training(wrap_whole(original=original), build=lambda: seeded(build)), with_torch=False)


@ORIGINAL
def test_a_model_wrapped_by_torch_is_refused(original: bool) -> None:
    model = seeded(MLP)
    with fake_world(2):
        model.blocks[0] = wrap(LIBRARIES["torch"], model.blocks[0], original=original)
        with pytest.raises(ValueError, match="torch"):
            wrap(fullshard, model, original=original)


@ranks(2)
@ORIGINAL
def test_buffers_go_back_to_the_system_and_the_next_step_is_right(world: World, original: bool) -> None:
    def train(free: bool) -> list[float]:
        model = wrap_blocks(original=original)(fullshard, seeded(MLP))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            loss = mean_square(model, BATCH(10 * step + world.rank))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if free:
                assert model.free_buffers() > 0
                assert model.free_buffers() == 0
        return losses

    assert train(free=True) == train(free=False)
