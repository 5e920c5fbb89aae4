"""The settings of ``fully_shard``: the same fields as PyTorch's, checked when made, and PyTorch's own accepted."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_api, _fsdp_common
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fullshard
from fullshard import policies
from fullshard.offload_policy import CPUOffloadPolicy, OffloadPolicy
from fullshard.policies import DataParallelMeshDims, MixedPrecisionPolicy, ShardPlacementResult

OURS_BEYOND_TORCH = {
    "MixedPrecisionPolicy": ["param_dtype_override_fn", "buffer_dtype"],  # the first is torch's from 2.15 on
    "CPUOffloadPolicy": ["parameters", "optimizer_state"],
}


as_mixed_precision_policy = partial(policies.as_setting, cls=MixedPrecisionPolicy, argument="mp_policy")
as_offload_policy = partial(policies.as_setting, cls=OffloadPolicy, argument="offload_policy")
as_mesh_dims = partial(policies.as_setting, cls=DataParallelMeshDims, argument="dp_mesh_dims")

#: torch has it since 2.12.
TORCHS_DIMS = getattr(torch_fsdp, "DataParallelMeshDims", DataParallelMeshDims)


def placement_of_torch(placement: Shard, info: Any) -> Any:
    """torch's result, or, before 2.12, something with its name and fields."""
    named = getattr(_fsdp_common, "ShardPlacementResult", None) or type("ShardPlacementResult", (SimpleNamespace,), {})
    return named(placement=placement, mesh_info=info)


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    """Eight ranks of which this is the first, without communication."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.fixture
def mesh_2d(world: None) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in ("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy", "DataParallelMeshDims")
        if hasattr(torch_fsdp, name)
    ],
)
def test_fields_and_defaults_are_torchs_and_ours_follow(name: str) -> None:
    def defaults(cls: type) -> list[tuple[str, Any]]:
        return [(field.name, field.default) for field in dataclasses.fields(cls)]

    theirs, ours = defaults(getattr(torch_fsdp, name)), defaults(getattr(fullshard, name))
    assert ours[: len(theirs)] == theirs
    beyond = [field for field, _ in ours[len(theirs) :]]
    assert beyond == [field for field in OURS_BEYOND_TORCH.get(name, []) if (field, None) not in theirs]
    kinds = {field.name: field.kw_only for field in dataclasses.fields(getattr(fullshard, name))}
    assert {field for field, kw_only in kinds.items() if kw_only} <= {"param_dtype_override_fn"}


@pytest.mark.parametrize("name", ["Comm", "AllGather", "ReduceScatter"])
def test_communication_interfaces_take_the_arguments_of_torchs(name: str) -> None:
    ours, theirs = getattr(fullshard, name), getattr(_fsdp_api, name)
    assert ours.__abstractmethods__ == theirs.__abstractmethods__
    for method in theirs.__abstractmethods__:
        described = [
            [(parameter.name, parameter.kind, parameter.default) for parameter in signature.parameters.values()]
            for signature in (inspect.signature(getattr(cls, method)) for cls in (ours, theirs))
        ]
        assert described[0] == described[1]


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (fullshard.WirePolicy(), "fullshard.WirePolicy"),
        (fullshard.MixedPrecision(), "fullshard.MixedPrecision"),  # which is imported when it is asked for
        (fullshard.checkpoint.LatestN(1), "fullshard.checkpoint.LatestN"),
        (nn.Identity(), "torch.nn.modules.linear.Identity"),
    ],
)
def test_a_message_shows_the_path_from_which_users_import_a_class(value: object, path: str) -> None:
    assert policies.describe(value).endswith(f" (of type {path})")


def test_communication_that_says_nothing_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        policies.AllGather()  # type: ignore[abstract]


def test_communication_written_for_ours_runs() -> None:
    class Copy(policies.AllGather):
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> None:
            output_tensor.copy_(input_tensor)

    gather = Copy()
    out = gather.allocate([3], dtype=torch.float64, device=torch.device("cpu"))
    gather(out, torch.ones(3, dtype=torch.float64), None)
    assert out.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "policy",
    [MixedPrecisionPolicy(), OffloadPolicy(), CPUOffloadPolicy(), DataParallelMeshDims(shard=["a", "b"])],  # type: ignore[arg-type]
    ids=lambda policy: type(policy).__name__,
)
def test_policies_are_frozen_and_hashable(policy: Any) -> None:
    assert hash(policy) == hash(dataclasses.replace(policy))
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.pin_memory = False


def test_users_may_derive_a_policy_with_fields_of_any_type() -> None:
    derived = dataclasses.make_dataclass("Mine", [("scale", float, 2.0)], bases=(MixedPrecisionPolicy,), frozen=True)
    assert derived(torch.bfloat16).scale == 2
    with pytest.raises(TypeError, match="cast_forward_inputs"):
        derived(cast_forward_inputs=1)


class TestMixedPrecisionPolicy:
    DTYPE_FIELDS = ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype")

    @pytest.mark.parametrize("field", DTYPE_FIELDS)
    def test_takes_floating_point_dtypes_and_refuses_others_by_field_name(self, field: str) -> None:
        for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, None):
            assert getattr(MixedPrecisionPolicy(**{field: dtype}), field) is dtype
        for other in (torch.int8, torch.bool, torch.complex64):
            with pytest.raises(ValueError, match=rf"{field} is {other}, which is not floating-point"):
                MixedPrecisionPolicy(**{field: other})
        for value in ("bfloat16", float, 16, False):
            with pytest.raises(TypeError, match=rf"MixedPrecisionPolicy\.{field} is .*expected a floating-point"):
                MixedPrecisionPolicy(**{field: value})

    def test_refuses_a_dtype_where_a_switch_belongs(self) -> None:
        with pytest.raises(TypeError, match="cast_forward_inputs"):
            MixedPrecisionPolicy(None, None, None, torch.bfloat16)  # type: ignore[arg-type]


class TestDataParallelMeshDims:
    @pytest.mark.parametrize("names", [None, "dp", ("dp", "cp"), ["dp", "cp"]])
    def test_names_are_torchs(self, names: Any) -> None:
        listed = () if names is None else (names,) if isinstance(names, str) else tuple(names)
        for dims, expected in (((names, "r"), (listed, ("r",))), (("s", names), (("s",), listed))):
            for cls in {DataParallelMeshDims, TORCHS_DIMS}:
                assert (cls(*dims).shard_names, cls(*dims).replicate_names) == expected

    def test_refuses_to_name_nothing_or_a_dimension_twice_and_what_is_no_name(self) -> None:
        for dims in ((None, None), ((), None), (None, ())):
            with pytest.raises(ValueError, match="names no dimension"):
                DataParallelMeshDims(*dims)
        for twice in (("dp", "dp"), (("dp", "dp"), None), (("dp", "cp"), ("cp",))):
            with pytest.raises(ValueError, match="names a dimension twice"):
                DataParallelMeshDims(*twice)
        for names in (0, ("dp", 1)):
            with pytest.raises(TypeError, match=r"DataParallelMeshDims\.shard is"):
                DataParallelMeshDims(shard=names)


class TestShardPlacementResult:
    def test_without_a_mesh_means_that_of_the_call(self) -> None:
        assert ShardPlacementResult(Shard(1)).device_mesh is None

    def test_takes_a_1d_mesh_and_a_named_2d_mesh(self, mesh_2d: DeviceMesh) -> None:
        assert ShardPlacementResult(Shard(0), mesh_2d).device_mesh is mesh_2d
        line = mesh_2d["shard"]
        assert ShardPlacementResult(None, line).device_mesh is line

    def test_refuses_meshes_that_cannot_shard_and_what_is_no_shard_or_mesh(self, world: None) -> None:
        with pytest.raises(ValueError, match="two dimensions without names"):
            ShardPlacementResult(None, init_device_mesh("cpu", (2, 4)))
        with pytest.raises(ValueError, match="3 dimensions; expected 1"):
            ShardPlacementResult(None, init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp")))
        info = SimpleNamespace(mesh=init_device_mesh("cpu", (2, 2, 2)), shard_mesh_dim=1, replicate_mesh_dim=0)
        with pytest.raises(ValueError, match="no names to slice it by"):
            ShardPlacementResult(None, info)
        for placement in (0, Replicate(), "shard"):
            with pytest.raises(TypeError, match=r"ShardPlacementResult\.placement is"):
                ShardPlacementResult(placement)  # type: ignore[arg-type]
        for mesh in (8, SimpleNamespace(mesh=3, shard_mesh_dim=0)):
            with pytest.raises(TypeError, match=r"ShardPlacementResult\.mesh is"):
                ShardPlacementResult(None, mesh)  # type: ignore[arg-type]

    def test_takes_torchs_mesh_infos(self, mesh_2d: DeviceMesh) -> None:
        line = mesh_2d["shard"]
        plain = _fsdp_common.FSDPMeshInfo(line, shard_mesh_dim=0)
        hybrid = _fsdp_common.HSDPMeshInfo(mesh_2d, shard_mesh_dim=1, replicate_mesh_dim=0)
        part = _fsdp_common.FSDPMeshInfo(mesh_2d, shard_mesh_dim=1)
        assert ShardPlacementResult(None, plain).device_mesh is line
        assert ShardPlacementResult(None, hybrid).device_mesh is mesh_2d
        assert ShardPlacementResult(None, part).device_mesh == line

    def test_takes_one_dimension_of_a_mesh_without_names(self, world: None) -> None:
        mesh = init_device_mesh("cpu", (2, 4))
        found = ShardPlacementResult(None, SimpleNamespace(mesh=mesh, shard_mesh_dim=1)).device_mesh
        assert found is not None
        assert found.mesh.tolist() == [0, 1, 2, 3]

    def test_takes_two_dimensions_of_a_larger_mesh(self, world: None) -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("r", "s", "tp"))
        info = SimpleNamespace(mesh=mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
        found = ShardPlacementResult(None, info).device_mesh
        assert found is not None
        assert (found.mesh_dim_names, found.mesh.tolist()) == (("r", "s"), [[0, 2], [4, 6]])

    @pytest.mark.parametrize(
        ("dims", "message"),
        [
            ({"shard_mesh_dim": None}, "shard_mesh_dim=None of .*expected dimensions from 0 to 1"),
            ({"shard_mesh_dim": 2}, "expected dimensions from 0 to 1"),
            ({"shard_mesh_dim": 0, "replicate_mesh_dim": 1}, "that for replication before that for sharding"),
            ({"shard_mesh_dim": 1, "replicate_mesh_dim": 1}, "that for replication before that for sharding"),
        ],
    )
    def test_refuses_mesh_infos_that_describe_no_mesh(
        self, mesh_2d: DeviceMesh, dims: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            ShardPlacementResult(None, SimpleNamespace(mesh=mesh_2d, **dims))


class TestTorchsOwnObjects:
    def test_ours_is_returned_itself(self) -> None:
        for convert, ours in (
            (as_mixed_precision_policy, MixedPrecisionPolicy(torch.bfloat16)),
            (as_offload_policy, OffloadPolicy()),
            (as_offload_policy, CPUOffloadPolicy()),
            (as_mesh_dims, DataParallelMeshDims("dp")),
            (policies.as_shard_placement, ShardPlacementResult(Shard(1))),
        ):
            assert convert(ours) is ours

    def test_become_ours_with_the_same_values(self) -> None:
        theirs = torch_fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float16, False)
        expected = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float16, False)
        assert as_mixed_precision_policy(theirs) == expected
        assert as_offload_policy(torch_fsdp.OffloadPolicy()) == OffloadPolicy()
        assert as_offload_policy(torch_fsdp.CPUOffloadPolicy(False)) == CPUOffloadPolicy(pin_memory=False)
        assert as_mesh_dims(TORCHS_DIMS(("a", "b"), "r")) == DataParallelMeshDims(("a", "b"), "r")

    def test_functions_of_torchs_become_ours(self) -> None:
        def choose(param: nn.Parameter) -> torch.dtype:
            return param.dtype

        settings = vars(MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=choose))
        theirs = type("MixedPrecisionPolicy", (SimpleNamespace,), {})(**settings)  # as torch has it from 2.15 on
        assert as_mixed_precision_policy(theirs).param_dtype_override_fn is choose

    def test_placements_become_ours(self, mesh_2d: DeviceMesh) -> None:
        info = _fsdp_common.HSDPMeshInfo(mesh_2d, shard_mesh_dim=1, replicate_mesh_dim=0)
        placement = policies.as_shard_placement(placement_of_torch(Shard(1), info))
        assert (placement.placement, placement.device_mesh) == (Shard(1), mesh_2d)

    @pytest.mark.parametrize("returned", [None, Shard(0), Shard(-1)])
    def test_short_forms_of_a_placement_use_the_calls_mesh(self, returned: Shard | None) -> None:
        placement = policies.as_shard_placement(returned)
        assert (placement.placement, placement.device_mesh) == (returned, None)

    def test_classes_derived_from_torchs_count(self) -> None:
        class Unpinned(torch_fsdp.CPUOffloadPolicy):
            def __init__(self) -> None:
                super().__init__(pin_memory=False)

        assert as_offload_policy(Unpinned()) == CPUOffloadPolicy(pin_memory=False)

    def test_bad_values_in_torchs_objects_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"reduce_dtype is torch\.int32"):
            as_mixed_precision_policy(torch_fsdp.MixedPrecisionPolicy(reduce_dtype=torch.int32))

    def test_anything_else_is_refused_by_what_was_found(self) -> None:
        for convert, argument, expected in (
            (as_mixed_precision_policy, "mp_policy", "MixedPrecisionPolicy"),
            (as_offload_policy, "offload_policy", "OffloadPolicy"),
            (as_mesh_dims, "dp_mesh_dims", "DataParallelMeshDims"),
            (policies.as_shard_placement, "shard_placement_fn", "ShardPlacementResult"),
        ):
            with pytest.raises(TypeError, match=rf"{argument} .*torch.bfloat16.*expected .*{expected}"):
                convert(torch.bfloat16)
            with pytest.raises(TypeError, match=rf"the class {expected} itself"):
                convert(getattr(fullshard, expected))

    def test_the_wrappers_settings_are_not_taken_for_these(self) -> None:
        with pytest.raises(TypeError, match="MixedPrecision"):
            as_mixed_precision_policy(torch_fsdp.MixedPrecision(torch.bfloat16))
        with pytest.raises(TypeError, match="CPUOffload"):
            as_offload_policy(torch_fsdp.CPUOffload(True))

    def test_a_namesake_without_the_fields_is_refused(self) -> None:
        class OffloadPolicy:
            """As a base, to see that the derived class is not taken for it."""

        derived = type("CPUOffloadPolicy", (OffloadPolicy,), {})
        with pytest.raises(TypeError, match="offload_policy is"):
            as_offload_policy(derived())

    def test_a_bad_placement_is_also_the_value_error_that_torch_raises(self) -> None:
        if hasattr(_fsdp_common, "resolve_shard_placement"):
            with pytest.raises(ValueError, match="Invalid"):
                _fsdp_common.resolve_shard_placement(3, None)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="shard_placement_fn returned 3"):
            policies.as_shard_placement(3)
