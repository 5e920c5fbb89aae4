"""Mistakes in a call of `fully_shard` are refused by that call, with a message that says where, what and what to do.

Where PyTorch refuses the mistake on purpose, its exception type is the type; where it fails by accident, or later, or
not at all, the type is what a reader would expect. Mistakes that show only in a step are in `test_bad_input_in_use`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import fullshard
from fullshard.wrap import ModuleWrapPolicy
from tests.harness import World, ranks
from tests.harness.compare import is_newer_than_torch
from tests.harness.models import MLP, seeded

REFUSALS = (AssertionError, RuntimeError, TypeError, ValueError)


#: Before 2.12 torch takes whatever is returned for a `Shard`.
LOOKS_AT_PLACEMENTS = hasattr(torch.distributed.fsdp, "DataParallelMeshDims")


def refused(
    mistake: Callable[[ModuleType], object],
    error: type[BaseException] | tuple[type[BaseException], ...],
    *words: str,
    torch_too: bool = True,
) -> None:
    """Make a mistake with fullshard, whose error must have all the words, and with torch if that refuses it as well."""
    with pytest.raises(error) as caught:
        mistake(fullshard)
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
def test_a_container_without_forward(world: World) -> None:
    for module in (nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})):
        words = (type(module).__name__, "forward", "each of its members")
        refused(lambda fsdp, module=module: fsdp.fully_shard(module), ValueError, *words)
        modules = [nn.Linear(2, 2), module]
        refused(lambda fsdp, given=modules: fsdp.fully_shard(given), ValueError, *words[:2], torch_too=False)


@ranks(2)
def test_a_container_with_a_forward_is_a_module_like_others(world: World) -> None:
    class Chain(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
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
    seen: list[Tensor] = []
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
def test_a_mesh_without_this_rank(world: World) -> None:
    mesh = DeviceMesh("cpu", [0])
    if world.rank == 0:
        fullshard.fully_shard(mlp(), mesh=mesh)
    else:
        words = ("rank 1", "not in the mesh", "[0]", "call fully_shard")
        refused(lambda fsdp: fsdp.fully_shard(mlp(), mesh=mesh), ValueError, *words, torch_too=False)


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


# -- arguments -------------------------------------------------------------------------------------------------------


def shard(fsdp: ModuleType, model: nn.Module | None = None, **options: Any) -> Any:
    return fsdp.fully_shard(mlp() if model is None else model, **options)


def place(fsdp: ModuleType, choose: Callable[[Tensor], object]) -> Any:
    return shard(fsdp, shard_placement_fn=choose)


def linear_on(mesh: DeviceMesh, *placements: Placement) -> nn.Linear:
    """A layer whose weight is a DTensor."""
    module = nn.Linear(4, 4, bias=False)
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, placements))
    return module


def on_mesh(fsdp: ModuleType, mesh: DeviceMesh, model: nn.Module | None = None, **dims: str) -> Any:
    return shard(fsdp, model, mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(**dims))


def on_replicas_and_another_mesh(fsdp: ModuleType, world: World) -> None:
    mesh, other = world.mesh(2, 1, names=("replicate", "tensor")), world.mesh()
    options = {"shard_placement_fn": lambda _: fullshard.ShardPlacementResult(Shard(0), other)}
    dims = fsdp.DataParallelMeshDims(replicate="replicate")
    shard(fsdp, linear_on(mesh, Replicate(), Replicate()), mesh=mesh, dp_mesh_dims=dims, **options)


def with_a_group_that_was_destroyed(fsdp: ModuleType, world: World) -> None:
    group = dist.new_group([0, 1])
    mesh = DeviceMesh.from_group(group, "cpu")
    dist.destroy_process_group(group)
    shard(fsdp, mesh=mesh)


def without_groups() -> DeviceMesh:
    return DeviceMesh("cpu", [0, 1], mesh_dim_names=("data",), _init_backend=False)


def of_tensor_and_data(world: World) -> DeviceMesh:
    return world.mesh(1, 2, names=("tensor", "data"))


Refused = tuple[Callable[[ModuleType, World], object], Any, tuple[str, ...]]
#: Mistakes that torch refuses too: what a user writes, the error, and words of its message.
AS_TORCH: dict[str, Refused] = {
    "a placement on dim 2": (
        lambda fsdp, _: place(fsdp, lambda _: Shard(2)), AssertionError, ("'scale'", "(3,)", "dim 2"),
    ),
    "a placement and no function": (lambda fsdp, _: shard(fsdp, shard_placement_fn=Shard(0)), TypeError, ("Shard",)),
    "a mesh of three dims": (
        lambda fsdp, world: shard(fsdp, mesh=world.mesh(1, 1, 2, names=("a", "b", "c"))),
        ValueError, ("1D or 2D", "c=2", "dp_mesh_dims"),
    ),
    "a mesh of two dims without names": (
        lambda fsdp, world: shard(fsdp, mesh=world.mesh(1, 2)), AssertionError, ("(1, 2)", "mesh_dim_names"),
    ),
    "dims that the mesh does not have": (
        lambda fsdp, world: on_mesh(fsdp, of_tensor_and_data(world), shard="dp"),
        ValueError, ("'dp'", "('tensor', 'data')", "dp_mesh_dims"),
    ),
    "dims of a mesh without names": (
        lambda fsdp, world: on_mesh(fsdp, world.mesh(1, 2), shard="dp"), ValueError, ("dp_mesh_dims", "mesh_dim_names"),
    ),
    "dims that name nothing": (lambda fsdp, _: fsdp.DataParallelMeshDims(), ValueError, ("shard, replicate or both",)),
    "plain parameters on a full mesh": (
        lambda fsdp, world: on_mesh(fsdp, of_tensor_and_data(world), shard="data"),
        ValueError, ("'scale'", "plain tensor", "distribute_module"),
    ),
    "a parameter that is sharded over a data-parallel dim": (
        lambda fsdp, world: on_mesh(
            fsdp, of_tensor_and_data(world), linear_on(of_tensor_and_data(world), Replicate(), Shard(0)), shard="data"
        ),
        ValueError, ("'weight'", "Replicate()", "'data'"),
    ),
    "a process group that was destroyed": (
        with_a_group_that_was_destroyed, RuntimeError, ("process group", "destroyed", "mesh"),
    ),
    **{
        f"reshard_after_forward={size}": (
            lambda fsdp, _, size=size: shard(fsdp, reshard_after_forward=size),
            ValueError, (f"reshard_after_forward is {size}", "factor of the 2 ranks"),
        )
        for size in (3, 0, -1)
    },
    **{
        f"reshard_after_forward={choice!r}": (
            lambda fsdp, _, choice=choice: shard(fsdp, reshard_after_forward=choice),
            ValueError, ("reshard_after_forward", repr(choice), "a bool, an int"),
        )
        for choice in ("yes", 2.0)
    },
}  # fmt: skip
#: Placements that are none, which torch refuses from 2.12 on: before, it takes whatever is returned for a `Shard`.
PLACEMENTS: dict[str, Refused] = {
    f"a placement {placement!r}": (
        lambda fsdp, _, placement=placement: place(fsdp, lambda param: placement if param.ndim == 1 else None),
        ValueError, ("'scale'", "shard_placement_fn", repr(placement), "Shard(dim)"),
    )
    for placement in ("0", 0, Replicate())
}  # fmt: skip
#: Mistakes that torch takes, or refuses with another error.
HERE_ALONE: dict[str, Refused] = {
    "a parameter on the very mesh that shards": (
        lambda fsdp, world: shard(fsdp, linear_on(world.mesh(), Shard(0)), mesh=world.mesh()),
        REFUSALS, ("'weight'", "mesh"),
    ),
    # Names are never in the set of parameters that is asked for: nothing would be ignored.
    "ignored parameters by name": (
        lambda fsdp, _: shard(fsdp, ignored_params={"scale"}), TypeError, ("ignored_params", "scale"),
    ),
    "a placement on dim -2": (
        lambda fsdp, _: place(fsdp, lambda _: Shard(-2)), REFUSALS, ("'scale'", "(3,)", "dim -2"),
    ),
    "a placement on another mesh where nothing is sharded": (
        on_replicas_and_another_mesh, ValueError, ("'weight'", "only replicates"),
    ),
    "a mesh without process groups": (
        lambda fsdp, _: shard(fsdp, mesh=without_groups()),
        RuntimeError, ("process group", "mesh", "init_device_mesh"),
    ),
    "dims of a mesh without process groups": (
        lambda fsdp, _: on_mesh(fsdp, without_groups(), shard="data"),
        RuntimeError, ("process group", "mesh", "init_device_mesh"),
    ),
    "a mesh 'cpu'": (lambda fsdp, _: shard(fsdp, mesh="cpu"), TypeError, ("DeviceMesh", "str")),
    "a mesh [0, 1]": (lambda fsdp, _: shard(fsdp, mesh=[0, 1]), TypeError, ("DeviceMesh", "list")),
    "a process group for a mesh": (
        lambda fsdp, _: shard(fsdp, mesh=dist.group.WORLD), TypeError, ("DeviceMesh", "ProcessGroup"),
    ),
    **{
        f"{name}={policy!r}": (
            lambda fsdp, _, name=name, policy=policy: shard(fsdp, **{name: policy}), TypeError, (name, cls),
        )
        for name, cls, policies in (
            ("mp_policy", "MixedPrecisionPolicy", ("bf16", torch.bfloat16, None, fullshard.MixedPrecisionPolicy)),
            ("offload_policy", "CPUOffloadPolicy", ("cpu", True, None, fullshard.CPUOffloadPolicy)),
        )
        for policy in policies
    },
    "mesh dims that are a name": (
        lambda fsdp, world: shard(fsdp, mesh=of_tensor_and_data(world), dp_mesh_dims="data"),
        TypeError, ("dp_mesh_dims", "'data'", "DataParallelMeshDims"),
    ),
    "a wrap policy that is a name": (
        lambda fsdp, _: shard(fsdp, auto_wrap_policy="blocks"),
        TypeError, ("auto_wrap_policy is 'blocks'; expected a ModuleWrapPolicy",),
    ),
}  # fmt: skip


@ranks(2)
@pytest.mark.parametrize("what", [*AS_TORCH, *PLACEMENTS, *HERE_ALONE])
def test_an_argument_that_is_a_mistake(world: World, what: str) -> None:
    mistake, error, words = {**AS_TORCH, **PLACEMENTS, **HERE_ALONE}[what]
    torch_too = what in AS_TORCH or (what in PLACEMENTS and LOOKS_AT_PLACEMENTS)
    refused(lambda fsdp: mistake(fsdp, world), error, *words, torch_too=torch_too)
