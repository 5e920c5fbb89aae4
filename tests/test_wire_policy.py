"""Wire policies: their fields are checked, and ``fully_shard`` refuses them where nothing could be encoded."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any

import pytest
import torch

import fullshard
from fullshard import WirePolicy
from fullshard.fully_shard import _tell_of_shared_memory
from fullshard.group.parameter import local_tensor
from tests.fully_shard.cases import groups_of
from tests.harness import World, ranks
from tests.harness.models import MLP, seeded

INT8 = WirePolicy(gather="int8", reduce="int8", min_numel=0)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("gather", "int2", "WirePolicy.gather.*'int2'.*one of 'exact', 'bf16', 'fp8', 'int8', 'int4'"),
        ("reduce", None, "WirePolicy.reduce.*None"),
        ("block", 12, "WirePolicy.block.*12.*a multiple of 8"),
        ("block", 0, "WirePolicy.block.*0"),
        ("block", True, "WirePolicy.block.*True"),
        ("error_feedback", 1, "WirePolicy.error_feedback.*1.*True or False"),
        ("min_numel", -1, "WirePolicy.min_numel.*-1.*0 or more"),
        ("min_numel", 1.0, "WirePolicy.min_numel.*1.0"),
    ],
)
def test_a_field_with_another_value_is_named(field: str, value: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        WirePolicy(**{field: value})


def test_a_policy_is_a_value() -> None:
    assert WirePolicy().is_exact
    assert not WirePolicy(gather="bf16").is_exact
    assert not WirePolicy(reduce="fp8").is_exact
    assert WirePolicy("int8") == WirePolicy(gather="int8")
    with pytest.raises(dataclasses.FrozenInstanceError):
        WirePolicy().gather = "int8"  # type: ignore[misc]


@ranks(2)
@pytest.mark.parametrize("argument", ["wire_policy", "outer_wire_policy"])
def test_something_else_is_refused(world: World, argument: str) -> None:
    with pytest.raises(TypeError, match=rf"{argument}.*'int8'.*a WirePolicy"):
        fullshard.fully_shard(seeded(MLP), **{argument: "int8"})


@ranks(2)
def test_whole_gradients_are_not_encoded(world: World) -> None:
    with pytest.raises(ValueError, match=r"wire_policy=.*all-reduced.*use zero_stage=1"):
        fullshard.fully_shard(seeded(MLP), zero_stage=0, wire_policy=INT8)
    mesh = world.mesh(2, 1, names=("replicate", "shard"))
    with pytest.raises(ValueError, match=r"wire_policy=.*all-reduced.*use zero_stage=1"):
        fullshard.fully_shard(seeded(MLP), mesh=mesh, zero_stage=0, wire_policy=INT8)
    dims = fullshard.DataParallelMeshDims(replicate="dp")
    with pytest.raises(ValueError, match=r"wire_policy=.*a mesh that only replicates"):
        fullshard.fully_shard(seeded(MLP), mesh=world.mesh(2, names=("dp",)), dp_mesh_dims=dims, wire_policy=INT8)
    fullshard.fully_shard(seeded(MLP), zero_stage=0, wire_policy=WirePolicy(min_numel=0))  # exact


@ranks(2)
def test_replicas_with_whole_shards_encode_nothing(world: World) -> None:
    with pytest.raises(ValueError, match=r"outer_wire_policy=.*use outer_zero_stage=1 on a mesh with replicas"):
        fullshard.fully_shard(seeded(MLP), outer_wire_policy=INT8)
    mesh = world.mesh(2, 1, names=("replicate", "shard"))
    with pytest.raises(ValueError, match=r"outer_wire_policy=.*use outer_zero_stage=1"):
        fullshard.fully_shard(seeded(MLP), mesh=mesh, outer_wire_policy=INT8)


class AnyComm:
    """What a user might set in place of a collective."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, *given: Any, **options: Any) -> None:
        raise AssertionError("never called")


@ranks(2)
@pytest.mark.parametrize("method", ["set_custom_all_gather", "set_custom_reduce_scatter"])
def test_communication_of_users_has_no_wire(world: World, method: str) -> None:
    model: Any = fullshard.fully_shard(seeded(MLP), wire_policy=INT8)
    with pytest.raises(ValueError, match=f"{method} moves messages as they are, and a wire_policy encodes them"):
        getattr(model, method)(AnyComm())


def outputs(wire: WirePolicy, **options: Any) -> list[torch.Tensor]:
    """The output and the gradients of a model."""
    model: Any = fullshard.fully_shard(seeded(MLP), wire_policy=wire, **options)
    for group in groups_of(model):
        group.shard.map_shared = lambda: False  # type: ignore[method-assign]  # there is not enough
    found = model(torch.linspace(0, 1, 18).view(3, 6))
    found.square().sum().backward()
    return [found.detach(), *(local_tensor(param.grad) for param in model.parameters())]


@ranks(1, 2)
@pytest.mark.parametrize("transport", ["p2p", "collective"])
def test_a_rank_that_shards_alone_sends_and_encodes_nothing(world: World, transport: str) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = transport
    mesh = world.mesh(world.size, 1, names=("replicate", "shard"))
    policy = WirePolicy(gather="int4", reduce="int4", min_numel=0)
    assert all(map(torch.equal, outputs(policy, mesh=mesh), outputs(WirePolicy(), mesh=mesh)))


@ranks(2)
def test_gathers_are_encoded_where_there_is_too_little_shared_memory(world: World) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = "shm"
    exact, found = outputs(WirePolicy())[0], outputs(WirePolicy(gather="int4", reduce="int4", min_numel=0))[0]
    assert 1e-6 < float((found - exact).abs().max()) < 1


@ranks(2)
def test_shared_memory_says_once_that_nothing_is_encoded(world: World) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = "shm"
    said: list[str] = []
    log, handler = logging.getLogger("fullshard"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    _tell_of_shared_memory.cache_clear()
    try:
        for _ in range(2):
            model: Any = fullshard.fully_shard(seeded(MLP), wire_policy=INT8)
        fullshard.fully_shard(seeded(MLP), wire_policy=WirePolicy())
    finally:
        log.removeHandler(handler)
    assert [line for line in said if "wire_policy" in line] == [
        "wire_policy encodes nothing: these ranks share memory, so they send nothing to one another"
    ]
    plain: Any = fullshard.fully_shard(seeded(MLP))
    x = torch.randn(3, 6)
    assert torch.equal(model(x), plain(x))
    for each in (model, plain):
        each(x).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@ranks(2, transport="p2p")
@pytest.mark.parametrize("argument", ["wire_policy", "outer_wire_policy"])
def test_ranks_that_disagree_are_told_so(world: World, argument: str) -> None:
    is_outer = argument == "outer_wire_policy"
    mesh = world.mesh(2, 1, names=("replicate", "shard")) if is_outer else world.mesh(2)
    values: dict[str, Any] = {"gather": "bf16", "reduce": "fp8", "block": 64, "error_feedback": False, "min_numel": 9}
    for field, value in values.items():
        policy = dataclasses.replace(INT8, **({field: value} if world.rank else {}))
        options: dict[str, Any] = {argument: policy, **({"outer_zero_stage": 1} if is_outer else {})}
        with pytest.raises((ValueError, RuntimeError), match=f"{field}=") as caught:
            fullshard.fully_shard(seeded(MLP), mesh=mesh, **options)
        assert f" {argument}" in f" {caught.value}"
