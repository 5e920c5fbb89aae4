"""Mistakes in a call of `fully_shard` are refused by that call, with a message that says where, what and what to do.

Where PyTorch refuses the mistake on purpose, its exception type is the type; where it fails by accident, or later, or
not at all, the type is what a reader would expect. Mistakes that show only in a step are in `test_bad_input_in_use`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fullshard
from fullshard.wrap import ModuleWrapPolicy
from tests.harness import World, ranks
from tests.harness.compare import is_newer_than_torch
from tests.harness.models import MLP, OddParameters, seeded

REFUSALS = (AssertionError, RuntimeError, TypeError, ValueError)
PROMPT = 5.0
"""Seconds within which a mistake has to show."""


#: Before 2.12 torch takes whatever is returned for a `Shard`.
LOOKS_AT_PLACEMENTS = hasattr(torch.distributed.fsdp, "DataParallelMeshDims")


def refused(
    mistake: Callable[[ModuleType], object],
    error: type[BaseException] | tuple[type[BaseException], ...],
    *words: str,
    torch_too: bool = True,
) -> None:
    """Make a mistake with fullshard, whose error must have all the words, and with torch if that refuses it as well."""
    started = time.monotonic()
    with pytest.raises(error) as caught:
        mistake(fullshard)
    assert time.monotonic() - started < PROMPT
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
    if torch_too:
        try:
            with pytest.raises(error):
                mistake(torch.distributed.fsdp)
        except AttributeError as missing:
            if not is_newer_than_torch(missing):
                raise


def mlp() -> Any:
    """The model of most cases: `blocks`, and the root's own `scale`."""
    return seeded(MLP)


# -- modules ---------------------------------------------------------------------------------------------------------


def test_a_program_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    found = r"variables WORLD_SIZE, MASTER_ADDR, MASTER_PORT, .* torchrun --nproc-per-node=2 "
    with pytest.raises(ValueError, match=found):
        fullshard.fully_shard(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"there is no default process group: .* launcher such as torchrun"):
        fullshard.FullyShardedDataParallel(nn.Linear(2, 2))


@ranks(2)
@pytest.mark.parametrize("container", [nn.ModuleList, nn.ModuleDict])
def test_a_container_without_forward(world: World, container: type[nn.Module]) -> None:
    members = {"a": nn.Linear(2, 2)}
    module = nn.ModuleDict(members) if container is nn.ModuleDict else nn.ModuleList(members.values())
    refused(lambda fsdp: fsdp.fully_shard(module), ValueError, container.__name__, "forward", "each of its members")


@ranks(2)
def test_a_container_without_forward_in_a_list(world: World) -> None:
    modules = [nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)])]
    refused(lambda fsdp: fsdp.fully_shard(modules), ValueError, "ModuleList", "forward", torch_too=False)


@ranks(2)
def test_a_container_with_a_forward_is_a_module_like_others(world: World) -> None:
    class Chain(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for module in self:
                x = module(x)
            return x

    chain: Any = fullshard.fully_shard(Chain([nn.Linear(2, 3), nn.Linear(3, 4)]))
    assert chain(torch.ones(1, 2)).shape == (1, 4)


@ranks(2)
def test_a_module_sharded_twice(world: World) -> None:
    def mistake(fsdp: ModuleType) -> None:
        fsdp.fully_shard(fsdp.fully_shard(nn.Linear(2, 2)))

    refused(mistake, AssertionError, "FSDPLinear", "already applied", "once")


@ranks(2)
def test_a_module_inside_of_one_that_was_sharded_before(world: World) -> None:
    model = fullshard.fully_shard(mlp())
    refused(lambda fsdp: fsdp.fully_shard(model.blocks[0]), REFUSALS, "weight", "fully_shard", torch_too=False)


@ranks(2)
@pytest.mark.parametrize("which", ["model", "block"])
def test_a_module_that_torch_has_sharded(world: World, which: str) -> None:
    model = mlp()
    torch.distributed.fsdp.fully_shard(model if which == "model" else model.blocks[0])
    where = "this FSDPMLP" if which == "model" else "'blocks.0' of this MLP"
    words = (where, "torch.distributed.fsdp", "fully_shard")
    refused(lambda fsdp: fsdp.fully_shard(model), REFUSALS, *words, torch_too=False)


@ranks(2)
def test_a_module_in_the_wrapper_of_torch(world: World) -> None:
    model = mlp()
    model.blocks[0] = torch.distributed.fsdp.FullyShardedDataParallel(model.blocks[0], device_id=torch.device("cpu"))
    words = ("'blocks.0' of this MLP", "torch.distributed.fsdp", "fully_shard")
    refused(lambda fsdp: fsdp.fully_shard(model), REFUSALS, *words, torch_too=False)


@ranks(2)
@pytest.mark.parametrize("module", ["model", None, [], [nn.Tanh(), "model"], 3], ids=repr)
def test_something_that_is_no_module(world: World, module: object) -> None:
    refused(lambda fsdp: fsdp.fully_shard(module), (TypeError, ValueError), "a module or a list", torch_too=False)


# -- parameters ------------------------------------------------------------------------------------------------------


@ranks(2)
def test_a_lazy_module_that_never_ran(world: World) -> None:
    error = (RuntimeError, ValueError)
    refused(lambda fsdp: fsdp.fully_shard(nn.LazyLinear(4)), error, "'weight'", "LazyLinear", "run its lazy module")
    with pytest.raises(ValueError, match="'weight' of a LazyLinear is not initialized yet"):
        fullshard.fully_shard(nn.Sequential(nn.LazyLinear(4)), auto_wrap_policy=ModuleWrapPolicy({nn.LazyLinear}))


@ranks(2)
def test_an_integer_parameter_may_be_sharded_and_never_trained(world: World) -> None:
    model: Any = nn.Linear(4, 4)
    model.register_parameter("codes", nn.Parameter(torch.arange(4), requires_grad=False))
    fullshard.fully_shard(model, mp_policy=fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    seen: list[torch.Tensor] = []
    model.register_forward_hook(lambda *_: seen.append(model.codes.clone()))
    model(torch.ones(2, 4)).sum().backward()
    assert torch.equal(seen[0], torch.arange(4))
    with pytest.raises(RuntimeError, match="floating point"):
        model.requires_grad_(True)


@ranks(2)
def test_a_parameter_that_is_a_dtensor_on_devices_of_another_type(world: World) -> None:
    elsewhere = DeviceMesh("meta", [0, 1], _init_backend=False)
    module = nn.Linear(4, 4)
    local = torch.empty(2, 4, device="meta")
    with pytest.MonkeyPatch.context() as patch:  # torch counts devices, of which there are none on meta
        patch.setattr(torch.distributed.device_mesh, "_get_device_handle", lambda *_: torch.cpu)
        module.weight = nn.Parameter(DTensor.from_local(local, elsewhere, [Shard(0)], run_check=False))
    refused(lambda fsdp: fsdp.fully_shard(module), ValueError, "'weight'", "Linear", "meta", "cpu", torch_too=False)


@ranks(2)
def test_a_parameter_that_is_a_dtensor_on_the_very_mesh_that_shards(world: World) -> None:
    module, mesh = nn.Linear(4, 4), world.mesh()
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0)]))
    refused(lambda fsdp: fsdp.fully_shard(module, mesh=mesh), REFUSALS, "'weight'", "mesh", torch_too=False)


@ranks(2)
def test_ignored_parameters_by_name(world: World) -> None:
    """Names are never in the set of parameters that is asked for: nothing would be ignored."""

    def mistake(fsdp: ModuleType) -> None:
        fsdp.fully_shard(mlp(), ignored_params={"scale"})

    refused(mistake, TypeError, "ignored_params", "scale", torch_too=False)


# -- placements ------------------------------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("placement", ["0", 0, Replicate()], ids=repr)
def test_a_placement_that_is_none(world: World, placement: object) -> None:
    def mistake(fsdp: ModuleType) -> None:
        fsdp.fully_shard(mlp(), shard_placement_fn=lambda parameter: placement)

    refused(mistake, ValueError, "shard_placement_fn", repr(placement), "Shard(dim)", torch_too=LOOKS_AT_PLACEMENTS)


@ranks(2)
def test_a_placement_that_is_none_is_told_with_the_parameter(world: World) -> None:
    def mistake(fsdp: ModuleType) -> None:
        fsdp.fully_shard(mlp(), shard_placement_fn=lambda parameter: "0" if parameter.ndim == 1 else None)

    refused(mistake, ValueError, "'scale'", torch_too=LOOKS_AT_PLACEMENTS)


@ranks(2)
@pytest.mark.parametrize("dim", [2, 5])
def test_a_placement_on_a_dim_that_does_not_exist(world: World, dim: int) -> None:
    def mistake(fsdp: ModuleType) -> None:
        fsdp.fully_shard(mlp(), shard_placement_fn=lambda parameter: Shard(dim))

    refused(mistake, AssertionError, "'scale'", "(3,)", f"dim {dim}")


@ranks(2)
def test_a_placement_on_a_negative_dim_that_does_not_exist(world: World) -> None:
    def mistake(fsdp: ModuleType) -> None:
        fsdp.fully_shard(mlp(), shard_placement_fn=lambda parameter: Shard(-2))

    refused(mistake, REFUSALS, "'scale'", "(3,)", "dim -2", torch_too=False)


@ranks(2)
def test_a_placement_in_the_place_of_a_function(world: World) -> None:
    refused(lambda fsdp: fsdp.fully_shard(mlp(), shard_placement_fn=Shard(0)), TypeError, "Shard")


@ranks(2)
def test_a_placement_on_another_mesh_where_nothing_is_sharded(world: World) -> None:
    mesh = world.mesh(2, 1, names=("replicate", "tensor"))
    other = world.mesh()

    def mistake(fsdp: ModuleType) -> None:
        module = nn.Linear(4, 4, bias=False)
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Replicate(), Replicate()]))
        dims = fsdp.DataParallelMeshDims(replicate="replicate")
        place = fullshard.ShardPlacementResult(Shard(0), other)
        fsdp.fully_shard(module, mesh=mesh, dp_mesh_dims=dims, shard_placement_fn=lambda parameter: place)

    refused(mistake, ValueError, "'weight'", "only replicates", torch_too=False)


# -- meshes ----------------------------------------------------------------------------------------------------------


@ranks(2)
def test_a_mesh_of_three_dims(world: World) -> None:
    mesh = world.mesh(1, 1, 2, names=("a", "b", "c"))
    refused(lambda fsdp: fsdp.fully_shard(mlp(), mesh=mesh), ValueError, "1D or 2D", "c=2", "dp_mesh_dims")


@ranks(2)
def test_a_mesh_of_two_dims_without_names(world: World) -> None:
    mesh = world.mesh(1, 2)
    refused(lambda fsdp: fsdp.fully_shard(mlp(), mesh=mesh), AssertionError, "(1, 2)", "mesh_dim_names")


@ranks(2)
def test_data_parallel_dims_that_the_mesh_does_not_have(world: World) -> None:
    mesh = world.mesh(1, 2, names=("tensor", "data"))

    def mistake(fsdp: ModuleType) -> None:
        fsdp.fully_shard(mlp(), mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(shard="dp"))

    refused(mistake, ValueError, "'dp'", "('tensor', 'data')", "dp_mesh_dims")


@ranks(2)
def test_data_parallel_dims_of_a_mesh_without_names(world: World) -> None:
    mesh = world.mesh(1, 2)

    def mistake(fsdp: ModuleType) -> None:
        fsdp.fully_shard(mlp(), mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(shard="dp"))

    refused(mistake, ValueError, "dp_mesh_dims", "mesh_dim_names")


@ranks(2)
def test_data_parallel_dims_that_name_nothing(world: World) -> None:
    refused(lambda fsdp: fsdp.DataParallelMeshDims(), ValueError, "shard, replicate or both")


@ranks(2)
def test_plain_parameters_on_a_full_mesh(world: World) -> None:
    mesh = world.mesh(1, 2, names=("tensor", "data"))

    def mistake(fsdp: ModuleType) -> None:
        fsdp.fully_shard(mlp(), mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(shard="data"))

    refused(mistake, ValueError, "'scale'", "plain tensor", "distribute_module")


@ranks(2)
def test_a_parameter_that_is_sharded_over_a_data_parallel_dim_already(world: World) -> None:
    mesh = world.mesh(1, 2, names=("tensor", "data"))

    def mistake(fsdp: ModuleType) -> None:
        module = nn.Linear(4, 4, bias=False)
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Replicate(), Shard(0)]))
        fsdp.fully_shard(module, mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(shard="data"))

    refused(mistake, ValueError, "'weight'", "Replicate()", "'data'")


@ranks(2)
def test_a_mesh_whose_process_group_was_destroyed(world: World) -> None:
    def mistake(fsdp: ModuleType) -> None:
        group = dist.new_group([0, 1])
        mesh = DeviceMesh.from_group(group, "cpu")
        dist.destroy_process_group(group)
        fsdp.fully_shard(mlp(), mesh=mesh)

    refused(mistake, RuntimeError, "process group", "destroyed", "mesh")


@ranks(2)
def test_a_mesh_without_this_rank(world: World) -> None:
    mesh = DeviceMesh("cpu", [0])
    if world.rank == 0:
        fullshard.fully_shard(mlp(), mesh=mesh)
    else:
        words = ("rank 1", "not in the mesh", "[0]", "call fully_shard")
        refused(lambda fsdp: fsdp.fully_shard(mlp(), mesh=mesh), ValueError, *words, torch_too=False)


@ranks(2)
@pytest.mark.parametrize("named", [False, True], ids=["by place", "by name"])
def test_a_mesh_without_process_groups(world: World, named: bool) -> None:
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("data",), _init_backend=False)

    def mistake(fsdp: ModuleType) -> None:
        fsdp.fully_shard(mlp(), mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(shard="data") if named else None)

    refused(mistake, RuntimeError, "process group", "mesh", "init_device_mesh", torch_too=False)


# -- what happens after forward --------------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("size", [3, 0, -1])
def test_a_number_of_ranks_that_is_no_factor(world: World, size: int) -> None:
    def mistake(fsdp: ModuleType) -> None:
        fsdp.fully_shard(mlp(), reshard_after_forward=size)

    refused(mistake, ValueError, f"reshard_after_forward is {size}", "factor of the 2 ranks")


@ranks(2)
@pytest.mark.parametrize("choice", ["yes", 2.0])
def test_a_choice_after_forward_that_is_none(world: World, choice: object) -> None:
    def mistake(fsdp: ModuleType) -> None:
        fsdp.fully_shard(mlp(), reshard_after_forward=choice)

    refused(mistake, ValueError, "reshard_after_forward", repr(choice), "a bool, an int")


@ranks(2)
def test_resharding_to_one_rank_is_told_to_be_no_resharding(world: World) -> None:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fullshard").addHandler(handler)
    try:
        model = fullshard.fully_shard(mlp(), reshard_after_forward=1)
    finally:
        logging.getLogger("fullshard").removeHandler(handler)
    assert len(messages) == 1
    assert "reshard_after_forward=1" in messages[0]
    model(torch.ones(2, 6))
    assert not isinstance(model.scale, DTensor)


# -- policies --------------------------------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("mesh", ["cpu", [0, 1]], ids=repr)
def test_a_mesh_that_is_none(world: World, mesh: object) -> None:
    refused(
        lambda fsdp: fsdp.fully_shard(mlp(), mesh=mesh), TypeError, "DeviceMesh", type(mesh).__name__, torch_too=False
    )


@ranks(2)
def test_a_process_group_in_the_place_of_a_mesh(world: World) -> None:
    def mistake(fsdp: ModuleType) -> None:
        fsdp.fully_shard(mlp(), mesh=dist.group.WORLD)

    refused(mistake, TypeError, "DeviceMesh", "ProcessGroup", torch_too=False)


@ranks(2)
@pytest.mark.parametrize("policy", ["bf16", torch.bfloat16, None, fullshard.MixedPrecisionPolicy], ids=repr)
def test_a_precision_that_is_no_policy(world: World, policy: object) -> None:
    def mistake(fsdp: ModuleType) -> None:
        fsdp.fully_shard(mlp(), mp_policy=policy)

    refused(mistake, TypeError, "mp_policy", "MixedPrecisionPolicy", torch_too=False)


@ranks(2)
@pytest.mark.parametrize("policy", ["cpu", True, None, fullshard.CPUOffloadPolicy], ids=repr)
def test_an_offload_that_is_no_policy(world: World, policy: object) -> None:
    def mistake(fsdp: ModuleType) -> None:
        fsdp.fully_shard(mlp(), offload_policy=policy)

    refused(mistake, TypeError, "offload_policy", "CPUOffloadPolicy", torch_too=False)


@ranks(2)
def test_mesh_dims_that_are_a_name(world: World) -> None:
    mesh = world.mesh(1, 2, names=("tensor", "data"))

    def mistake(fsdp: ModuleType) -> None:
        fsdp.fully_shard(mlp(), mesh=mesh, dp_mesh_dims="data")

    refused(mistake, TypeError, "dp_mesh_dims", "'data'", "DataParallelMeshDims", torch_too=False)


@ranks(2)
def test_a_wrap_policy_that_is_a_name(world: World) -> None:
    with pytest.raises(TypeError, match="auto_wrap_policy is 'blocks'; expected a ModuleWrapPolicy"):
        fullshard.fully_shard(mlp(), auto_wrap_policy="blocks")


@ranks(2)
def test_a_refused_module_is_left_as_it_was(world: World) -> None:
    model = seeded(OddParameters)
    before = dict(model.named_parameters())
    with pytest.raises(REFUSALS):
        fullshard.fully_shard(model, shard_placement_fn=lambda parameter: Shard(1))
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert type(model) is OddParameters
    fullshard.fully_shard(model)
    model(torch.ones(2, 6)).sum().backward()
