"""What the constructor of the wrapper takes, makes of it and refuses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn

import fullshard
import fullshard.optim.grad_scaler
import fullshard.wrap
from fullshard import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fullshard.wrap import ModuleWrapPolicy, enable_wrap, wrap
from tests.harness import World, fake_world, ranks
from tests.harness.compare import Precision, mean_square, unwrapped, whole_parameters
from tests.harness.models import MLP, Transformer, random_batch, seeded, token_batch
from tests.harness.wrapper import EACH_WRAPPER, ORIGINAL, WRAPPERS, assert_all_see
from tests.harness.wrapper import wrap as wrap_with

FSDP = fullshard.FullyShardedDataParallel
TORCH = torch.distributed.fsdp
CPU = torch.device("cpu")
BATCH = random_batch(4, 6)
#: Names that torch exports and that are its internals.
INTERNALS = {"FSDPMeshInfo", "DDPMeshInfo", "HSDPMeshInfo"}


def test_every_name_of_torch_is_exported() -> None:
    assert {name for name in TORCH.__all__ if not hasattr(fullshard, name)} <= INTERNALS
    assert set(fullshard.__all__) >= set(TORCH.__all__) - INTERNALS
    assert hasattr(fullshard.optim.grad_scaler, "ShardedGradScaler")
    assert hasattr(fullshard, "ShardPlacementResult")


METHODS = (
    "__init__", "forward", "fsdp_modules", "check_is_root", "apply", "named_parameters", "named_buffers", "no_sync",
    "clip_grad_norm_", "register_comm_hook", "summon_full_params", "set_state_dict_type", "get_state_dict_type",
    "state_dict_type", "optim_state_dict", "optim_state_dict_to_load", "full_optim_state_dict",
    "sharded_optim_state_dict", "shard_full_optim_state_dict", "flatten_sharded_optim_state_dict",
    "scatter_full_optim_state_dict", "rekey_optim_state_dict",
)  # fmt: skip


def test_methods_have_torchs_parameters() -> None:
    for name in METHODS:
        ours, torchs = (
            [(each.name, each.kind, getattr(each.default, "name", each.default)) for each in signature.values()]
            for signature in (
                inspect.signature(getattr(cls, name)).parameters for cls in (FSDP, TORCH.FullyShardedDataParallel)
            )
        )
        assert ours == torchs, name


@ranks(2)
def test_settings_of_torch_and_positional_arguments(world: World) -> None:
    model = FSDP(
        seeded(MLP),
        dist.group.WORLD,
        TORCH.ShardingStrategy.SHARD_GRAD_OP,
        TORCH.CPUOffload(False),
        TORCH.wrap.ModuleWrapPolicy({nn.Sequential}),
        TORCH.BackwardPrefetch.BACKWARD_POST,
        TORCH.MixedPrecision(param_dtype=torch.bfloat16),
        [],
        None,
        CPU,
        True,
        True,
        False,
        True,
    )
    assert len(FSDP.fsdp_modules(model)) == 5
    for each in FSDP.fsdp_modules(model):
        assert each.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
        assert each.cpu_offload == CPUOffload()
        assert each.backward_prefetch is BackwardPrefetch.BACKWARD_POST
        assert each.mixed_precision == MixedPrecision(param_dtype=torch.bfloat16)
        assert (each.forward_prefetch, each.limit_all_gathers) == (True, False)
    assert model(*BATCH(0)).dtype == torch.bfloat16


def with_overrides(fsdp: ModuleType) -> Any:
    def choose(module: nn.Module) -> Any:
        if isinstance(module, nn.Embedding):
            return {"sharding_strategy": fsdp.ShardingStrategy.SHARD_GRAD_OP, "forward_prefetch": True}
        return isinstance(module, nn.LayerNorm)

    return fsdp.wrap.CustomPolicy(choose)


POLICIES: dict[str, Callable[[ModuleType], Any]] = {
    "size": lambda fsdp: partial(fsdp.wrap.size_based_auto_wrap_policy, min_num_params=300),
    "lambda": lambda fsdp: partial(
        fsdp.wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.LayerNorm)
    ),
    "transformer": lambda fsdp: partial(
        fsdp.wrap.transformer_auto_wrap_policy, transformer_layer_cls={nn.LayerNorm, nn.Embedding}
    ),
    "overrides": with_overrides,
    "class": lambda fsdp: fsdp.wrap.ModuleWrapPolicy({nn.LayerNorm}),
    "always": lambda fsdp: fsdp.wrap.always_wrap_policy,
}


@pytest.mark.slow
@ranks(2)
@ORIGINAL
def test_policies_wrap_what_they_wrap_in_torch(world: World, original: bool) -> None:
    def observe(fsdp: ModuleType, make: Callable[[ModuleType], Any]) -> Any:
        model = wrap_with(fsdp, seeded(Transformer), auto_wrap_policy=make(fsdp), original=original)
        units = {
            name: (type(each.module).__name__, each.sharding_strategy.name, each.forward_prefetch)
            for name, each in model.named_modules()
            if isinstance(each, fsdp.FullyShardedDataParallel)
        }
        shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
        total = 0.0
        if not any(kind == "ModuleList" for kind, *_ in units.values()):
            total = round(model(*token_batch(2, 5)(world.rank)).sum().item(), 3)  # torch sums in another order
        return [units, shapes, total]

    assert_all_see(lambda fsdp: {name: observe(fsdp, make) for name, make in POLICIES.items()})


@ranks(2)
def test_flat_and_original_parameters_in_one_tree(world: World) -> None:
    """Which torch refuses in the first forward."""
    model = seeded(MLP)
    model.blocks[1] = FSDP(model.blocks[1], use_orig_params=True)
    wrapped = FSDP(model, use_orig_params=False)
    assert [unwrapped(name) for name, _ in wrapped.named_parameters()] == [
        "_flat_param",
        "blocks.1.0.weight",
        "blocks.1.0.bias",
    ]
    assert torch.allclose(wrapped(*BATCH(0)), seeded(MLP)(*BATCH(0)), atol=1e-6)


@EACH_WRAPPER
def test_a_policy_over_wrapped_modules_is_refused(library: str) -> None:
    fsdp = WRAPPERS[library]
    model = seeded(MLP)
    with fake_world(2):
        model.blocks[0] = wrap_with(fsdp, model.blocks[0])
        with pytest.raises(ValueError, match="wrap"):
            wrap_with(fsdp, model, auto_wrap_policy=fsdp.wrap.ModuleWrapPolicy({nn.Linear}))


def test_wrap_inside_of_enable_wrap() -> None:
    options: dict[str, Any] = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "use_orig_params": True}
    with fake_world(2), enable_wrap(wrapper_cls=FSDP, **options):
        model = wrap(nn.Sequential(wrap(nn.Linear(6, 5)), wrap(nn.Linear(5, 3), use_orig_params=False)))
    assert isinstance(model, FSDP)
    assert [each.sharding_strategy for each in FSDP.fsdp_modules(model)] == [ShardingStrategy.SHARD_GRAD_OP] * 3
    assert [each._use_orig_params for each in FSDP.fsdp_modules(model)] == [True, True, False]


@ranks(2)
@EACH_WRAPPER
@ORIGINAL
def test_what_is_wrapped_can_be_wrapped_again(world: World, library: str, original: bool) -> None:
    """The outer instance has nothing to shard."""
    fsdp = WRAPPERS[library]
    model = wrap_with(fsdp, wrap_with(fsdp, nn.Linear(6, 5), original=original), original=original)
    assert len(list(model.parameters())) == (2 if original else 1)
    assert len(fsdp.FullyShardedDataParallel.fsdp_modules(model)) == 2
    mean_square(model, BATCH(world.rank)).backward()


@EACH_WRAPPER
def test_a_module_list_is_warned_of(library: str) -> None:
    with fake_world(2), pytest.warns(UserWarning, match="ModuleList"):
        wrap_with(WRAPPERS[library], nn.ModuleList([nn.Linear(2, 2)]))


@ranks(2)
def test_batch_norms_under_mixed_precision_are_wrapped_alone_with_a_warning(world: World) -> None:
    def observe(fsdp: ModuleType) -> Any:
        model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(16, 3))
        policy = fsdp.wrap.ModuleWrapPolicy({nn.Conv1d})
        with pytest.warns(UserWarning, match="BatchNorm"):
            wrapped = wrap_with(fsdp, model, auto_wrap_policy=policy, precision=Precision(torch.bfloat16))
        output = wrapped(torch.randn(5, 2, 6))
        wrapped_alone = [type(each.module).__name__ for each in fsdp.FullyShardedDataParallel.fsdp_modules(wrapped)]
        return [output.dtype, wrapped_alone, [buffer.dtype for buffer in wrapped.buffers()]]

    assert_all_see(observe)


@ranks(2)
@ORIGINAL
@pytest.mark.parametrize("policy", [False, True])
def test_what_is_ignored_stays_as_it_is(world: World, original: bool, policy: bool) -> None:
    def observe(fsdp: ModuleType, argument: str, of_parameters: bool) -> Any:
        model = seeded(MLP)
        given = list(model.blocks[1].parameters()) if of_parameters else [model.blocks[1]]
        options: dict[str, Any] = {argument: given}
        if policy:
            options["auto_wrap_policy"] = fsdp.wrap.ModuleWrapPolicy({nn.Linear})
        ignored = model.blocks[1][0].weight
        wrapped = wrap_with(fsdp, model, original=original, **options)
        assert any(parameter is ignored for parameter in wrapped.parameters())
        return {name: list(parameter.shape) for name, parameter in wrapped.named_parameters()}

    for given in (("ignored_modules", False), ("ignored_states", False), ("ignored_states", True)):
        assert_all_see(lambda fsdp, given=given: observe(fsdp, *given))  # type: ignore[misc]


@ranks(2)
@ORIGINAL
@pytest.mark.parametrize("policy", [False, True])
@pytest.mark.parametrize("function", [False, True])
def test_modules_on_meta_get_the_values_of_the_same_model_made_on_the_cpu(
    world: World, original: bool, policy: bool, function: bool
) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))

    def initialise(module: nn.Module) -> None:
        if list(module.parameters(recurse=False)):
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()  # type: ignore[operator]

    with torch.device("meta"):
        model = build()
    torch.manual_seed(7)
    options: dict[str, Any] = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})} if policy else {}
    wrapped = FSDP(model, use_orig_params=original, param_init_fn=initialise if function else None, **options)
    assert not any(tensor.is_meta for tensor in (*wrapped.parameters(), *wrapped.buffers()))
    torch.manual_seed(7)
    expected = build()
    found = whole_parameters(fullshard, wrapped)
    for name, parameter in expected.named_parameters():
        assert found[name].shape == parameter.shape
        assert torch.isfinite(found[name]).all()
        if not policy:  # by which the order is another one, as in torch
            assert torch.equal(found[name], parameter), name
    wrapped(*BATCH(0))


@ranks(2)
@ORIGINAL
@pytest.mark.parametrize("policy", [False, True])
def test_ranks_begin_with_the_first_ones_values(world: World, original: bool, policy: bool) -> None:
    """Buffers too; torch does so on GPUs only."""

    def build(seed: int) -> Any:
        model = nn.Sequential(seeded(lambda: nn.Linear(6, 5), seed), nn.BatchNorm1d(5), seeded(lambda: nn.Linear(5, 3)))
        model[1].running_mean.fill_(seed)
        return model

    options: dict[str, Any] = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})} if policy else {}
    model = FSDP(build(world.rank + 1), sync_module_states=True, use_orig_params=original, **options)
    for name, value in build(1).state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.slow
@ranks(4)
def test_groups_and_meshes(world: World) -> None:
    """Every way to say over which ranks to shard cuts as said, in all instances."""
    mesh = world.mesh(2, 2, names=("replicate", "shard"))
    shard, replicate = mesh["shard"].get_group(), mesh["replicate"].get_group()
    hybrid = ShardingStrategy.HYBRID_SHARD
    ways: list[dict[str, Any]] = [
        {"process_group": shard},
        {"device_mesh": mesh["shard"]},
        {"process_group": (shard, replicate), "sharding_strategy": hybrid},
        {"device_mesh": mesh, "sharding_strategy": hybrid},
        {"sharding_strategy": hybrid},
    ]
    for way in ways:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LOCAL_WORLD_SIZE", "2")
            model = FSDP(seeded(MLP), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **way)
        data = [group.data for each in FSDP.fsdp_modules(model) for group in each._unit.groups]
        assert len(data) == 5
        assert all(each is data[0] for each in data)  # one mesh, and so one pair of groups, for all
        assert data[0].shard_size == 2, way
        assert (data[0].replicate_group is not None) == ("sharding_strategy" in way), way
        assert torch.allclose(model(*BATCH(0)), seeded(MLP)(*BATCH(0)), atol=1e-6)
