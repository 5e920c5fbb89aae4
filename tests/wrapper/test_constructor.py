"""What the constructor of the wrapper takes, makes of it and refuses."""

from __future__ import annotations

import inspect
import warnings
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
from fullshard.wrap import CustomPolicy, ModuleWrapPolicy, enable_wrap, wrap
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


def test_parameters_have_torchs_names_order_and_defaults() -> None:
    ours, torchs = (inspect.signature(cls.__init__).parameters for cls in (FSDP, TORCH.FullyShardedDataParallel))
    assert list(ours) == list(torchs)
    for name, parameter in ours.items():
        default = torchs[name].default
        assert parameter.default == default or parameter.default.name == default.name, name
        assert parameter.kind == torchs[name].kind


def test_every_name_of_torch_is_exported() -> None:
    assert {name for name in TORCH.__all__ if not hasattr(fullshard, name)} <= INTERNALS
    assert set(fullshard.__all__) >= set(TORCH.__all__) - INTERNALS
    assert hasattr(fullshard.optim.grad_scaler, "ShardedGradScaler")
    assert hasattr(fullshard, "ShardPlacementResult")


@pytest.mark.parametrize(
    "name",
    [
        "fsdp_modules", "check_is_root", "apply", "named_parameters", "named_buffers", "no_sync", "clip_grad_norm_",
        "register_comm_hook", "summon_full_params", "set_state_dict_type", "get_state_dict_type", "state_dict_type",
        "forward",
    ],
)  # fmt: skip
def test_methods_have_torchs_parameters(name: str) -> None:
    ours, torchs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(getattr(cls, name)).parameters.values()]
        for cls in (FSDP, TORCH.FullyShardedDataParallel)
    )
    assert ours == torchs


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


# -- policies ----------------------------------------------------------------------------------------------------------


def by_size(fsdp: ModuleType) -> Any:
    return partial(fsdp.wrap.size_based_auto_wrap_policy, min_num_params=300)


def by_name(fsdp: ModuleType) -> Any:
    return partial(fsdp.wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.LayerNorm))


def of_transformers(fsdp: ModuleType) -> Any:
    return partial(fsdp.wrap.transformer_auto_wrap_policy, transformer_layer_cls={nn.LayerNorm, nn.Embedding})


def with_overrides(fsdp: ModuleType) -> Any:
    def choose(module: nn.Module) -> Any:
        if isinstance(module, nn.Embedding):
            return {"sharding_strategy": fsdp.ShardingStrategy.SHARD_GRAD_OP, "forward_prefetch": True}
        return isinstance(module, nn.LayerNorm)

    return fsdp.wrap.CustomPolicy(choose)


POLICIES: list[Callable[[ModuleType], Any]] = [
    by_size,
    by_name,
    of_transformers,
    with_overrides,
    lambda fsdp: fsdp.wrap.ModuleWrapPolicy({nn.LayerNorm}),
    lambda fsdp: fsdp.wrap.always_wrap_policy,
]


@ranks(2)
@pytest.mark.parametrize("policy", range(len(POLICIES)))
@ORIGINAL
def test_policies_wrap_what_they_wrap_in_torch(world: World, policy: int, original: bool) -> None:
    def observe(fsdp: ModuleType) -> Any:
        made: Any = POLICIES[policy](fsdp)
        model = wrap_with(fsdp, seeded(Transformer), auto_wrap_policy=made, original=original)
        units = {
            name: (type(each.module).__name__, each.sharding_strategy.name, each.forward_prefetch)
            for name, each in model.named_modules()
            if isinstance(each, fsdp.FullyShardedDataParallel)
        }
        shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
        total = 0.0
        if not any(
            isinstance(each.module, nn.ModuleList) for each in fsdp.FullyShardedDataParallel.fsdp_modules(model)
        ):
            total = round(model(*token_batch(2, 5)(world.rank)).sum().item(), 3)  # torch sums in another order
        return [units, shapes, total]

    assert_all_see(observe)


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


@ranks(2)
@EACH_WRAPPER
def test_a_policy_over_wrapped_modules_is_refused(world: World, library: str) -> None:
    fsdp = WRAPPERS[library]
    model = seeded(MLP)
    model.blocks[0] = wrap_with(fsdp, model.blocks[0])
    with pytest.raises(ValueError, match="wrap"):
        wrap_with(fsdp, model, auto_wrap_policy=fsdp.wrap.ModuleWrapPolicy({nn.Linear}))


@ranks(2)
def test_wrap_inside_of_enable_wrap(world: World) -> None:
    with enable_wrap(wrapper_cls=FSDP, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True):
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


@ranks(2)
def test_a_module_list_is_warned_of(world: World) -> None:
    for library, fsdp in WRAPPERS.items():
        with pytest.warns(UserWarning, match="ModuleList"):
            wrap_with(fsdp, nn.ModuleList([nn.Linear(2, 2)]))
        assert library


# -- batch norm --------------------------------------------------------------------------------------------------------


@ranks(2)
@ORIGINAL
def test_batch_norms_under_mixed_precision_are_wrapped_alone_with_a_warning(world: World, original: bool) -> None:
    def observe(fsdp: ModuleType) -> Any:
        model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(16, 3))
        policy = fsdp.wrap.ModuleWrapPolicy({nn.Conv1d})
        with pytest.warns(UserWarning, match="BatchNorm"):
            wrapped = wrap_with(
                fsdp, model, auto_wrap_policy=policy, precision=Precision(torch.bfloat16), original=original
            )
        output = wrapped(torch.randn(5, 2, 6))
        wrapped_alone = [type(each.module).__name__ for each in fsdp.FullyShardedDataParallel.fsdp_modules(wrapped)]
        dtypes = [buffer.dtype for buffer in wrapped.buffers()]
        return [output.dtype, wrapped_alone, dtypes]

    assert_all_see(observe)


# -- ignored -----------------------------------------------------------------------------------------------------------


@ranks(2)
@ORIGINAL
@pytest.mark.parametrize("how", ["ignored_modules", "ignored_states of modules", "ignored_states of parameters"])
@pytest.mark.parametrize("policy", [False, True])
def test_what_is_ignored_stays_as_it_is(world: World, original: bool, how: str, policy: bool) -> None:
    def observe(fsdp: ModuleType) -> Any:
        model = seeded(MLP)
        given = list(model.blocks[1].parameters()) if how.endswith("parameters") else [model.blocks[1]]
        options: dict[str, Any] = {how.split()[0]: given}
        if policy:
            options["auto_wrap_policy"] = fsdp.wrap.ModuleWrapPolicy({nn.Linear})
        ignored = model.blocks[1][0].weight
        wrapped = wrap_with(fsdp, model, original=original, **options)
        assert any(parameter is ignored for parameter in wrapped.parameters())
        return {name: list(parameter.shape) for name, parameter in wrapped.named_parameters()}

    assert_all_see(observe)


# -- initialisation ----------------------------------------------------------------------------------------------------


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


@ranks(3)
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


@ranks(2)
@pytest.mark.parametrize("device_id", [None, CPU, "cpu"])
def test_a_cpu_job_needs_no_device(world: World, device_id: Any) -> None:
    model = FSDP(seeded(MLP), device_id=device_id)
    assert {parameter.device for parameter in model.parameters()} == {CPU}
    mean_square(model, BATCH(0)).backward()


# -- groups and meshes -------------------------------------------------------------------------------------------------


@ranks(4)
@pytest.mark.parametrize("kind", ["group", "mesh", "pair", "mesh of nodes", "default"])
@ORIGINAL
def test_groups_and_meshes(world: World, kind: str, original: bool) -> None:
    """Every way to say over which ranks to shard cuts as said, in all instances."""
    hybrid = ShardingStrategy.HYBRID_SHARD if kind in ("pair", "mesh of nodes", "default") else None
    mesh = world.mesh(2, 2, names=("replicate", "shard"))
    ways: dict[str, dict[str, Any]] = {
        "group": {"process_group": mesh["shard"].get_group()},
        "mesh": {"device_mesh": mesh["shard"]},
        "pair": {"process_group": (mesh["shard"].get_group(), mesh["replicate"].get_group())},
        "mesh of nodes": {"device_mesh": mesh},
        "default": {},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        policy = ModuleWrapPolicy({nn.Linear})
        model = FSDP(
            seeded(MLP), sharding_strategy=hybrid, auto_wrap_policy=policy, use_orig_params=original, **ways[kind]
        )
    units = [each._unit for each in FSDP.fsdp_modules(model)]
    data = [group.data for unit in units for group in unit.groups]
    assert len(data) == 5
    assert all(each is data[0] for each in data)  # one mesh, and so one pair of groups, for all
    assert data[0].shard_size == 2
    assert (data[0].replicate_group is not None) == (hybrid is not None)
    assert torch.allclose(model(*BATCH(0)), seeded(MLP)(*BATCH(0)), atol=1e-6)


@ranks(1)
def test_one_rank_has_nothing_to_shard_over(world: World) -> None:
    for fsdp in WRAPPERS.values():
        with pytest.warns(UserWarning, match="NO_SHARD"):
            model = wrap_with(fsdp, seeded(MLP))
        assert model.sharding_strategy is fsdp.ShardingStrategy.NO_SHARD


# -- what is refused ---------------------------------------------------------------------------------------------------

MISTAKES: dict[str, tuple[Callable[[ModuleType], dict[str, Any]], type[Exception]]] = {
    "group and mesh": (
        lambda fsdp: {"process_group": dist.group.WORLD, "device_mesh": World(0, 2).mesh()},
        ValueError,
    ),
    "hybrid without anything": (lambda fsdp: {"strategy": "HYBRID_SHARD"}, ValueError),
    "hybrid with one group": (lambda fsdp: {"strategy": "HYBRID_SHARD", "process_group": dist.group.WORLD}, ValueError),
    "hybrid with a mesh of one dim": (
        lambda fsdp: {"strategy": "HYBRID_SHARD", "device_mesh": World(0, 2).mesh()},
        ValueError,
    ),
    "both ignored": (lambda fsdp: {"ignored_modules": [], "ignored_states": []}, ValueError),
    "ignored is no list": (lambda fsdp: {"ignored_modules": 3}, TypeError),
    "ignored states are no list": (lambda fsdp: {"ignored_states": 3}, TypeError),
    "ignored names": (lambda fsdp: {"ignored_modules": ["blocks.0"]}, ValueError),
    "ignored of two types": (lambda fsdp: {"ignored_states": [nn.Linear(1, 1), nn.Linear(1, 1).weight]}, ValueError),
}


@ranks(2)
@EACH_WRAPPER
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(world: World, library: str, mistake: str) -> None:
    make, error = MISTAKES[mistake]
    with pytest.raises(error):
        wrap_with(WRAPPERS[library], seeded(MLP), **make(WRAPPERS[library]))


@ranks(2)
@pytest.mark.parametrize(
    "wrong",
    [
        {"sharding_strategy": "FULL_SHARD"},
        {"cpu_offload": True},
        {"backward_prefetch": "BACKWARD_PRE"},
        {"mixed_precision": torch.bfloat16},
    ],
)
def test_arguments_of_a_wrong_type_are_named(world: World, wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(wrong))):
        FSDP(seeded(MLP), **wrong)


def test_many_ranks_make_no_difference_to_names() -> None:
    with fake_world(256), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FSDP(seeded(MLP), auto_wrap_policy=CustomPolicy(lambda m: isinstance(m, nn.Linear)))
        names = [unwrapped(name) for name, _ in model.named_parameters()]
    assert names == ["_flat_param", *(f"blocks.{index}.0._flat_param" for index in range(4))]
