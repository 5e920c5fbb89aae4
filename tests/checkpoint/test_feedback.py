"""What encodings have lost of gradients goes through a checkpoint, and the first gradients after a load include it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from fullshard import WirePolicy, checkpoint
from fullshard.checkpoint.contents import Contents, Parameters
from fullshard.checkpoint.feedback import collect_feedback
from fullshard.checkpoint.manifest import Location
from fullshard.checkpoint.reader import Checkpoint
from fullshard.group.parameter import local_tensor
from fullshard.schedule.unit import units_in
from tests.checkpoint.test_save import run
from tests.harness import RankPool, World, ranks
from tests.harness.compare import whole
from tests.harness.models import MLP, seeded, shard_each
from tests.harness.slow import slow

WIDTHS = (40, 33, 24)  # of 33 rows the last rank has fewer
WIRE = WirePolicy(reduce="int4", block=32, min_numel=100)  # a bias travels as it is
LARGE = ("blocks.0.0.weight", "blocks.1.0.weight")
Sharding = dict[str, Any]


def sharded(transport: str = "p2p", wire: WirePolicy = WIRE, **options: Any) -> Any:
    os.environ["FULLSHARD_TRANSPORT"] = transport
    model: Any = seeded(lambda: MLP(WIDTHS))
    shard_each(*model.blocks, model, wire_policy=wire, **options)
    return model


def gradients(model: Any, seed: int | None, size: int = 1) -> dict[str, torch.Tensor]:
    """Whole gradients of this rank's batch with a seed; without one, of zeros on all ranks."""
    model.zero_grad()
    x = torch.randn(8, WIDTHS[0], generator=torch.Generator().manual_seed(seed or 0))
    (model(x).square().sum() * (0 if seed is None else 1)).backward()
    return {name: whole(param.grad) for name, param in model.named_parameters()}


def lost(model: Any) -> dict[str, torch.Tensor]:
    """What the next gradients lack, whole."""
    chunks = {group: group.gradients.lost() for unit in units_in(model) for group in unit.groups}
    found = dict[str, torch.Tensor]()
    for name, param in model.named_parameters():
        for group, values in chunks.items():
            for index, value in values.items():
                if group.params[index].sharded is param:
                    made = DTensor.from_local(
                        value, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
                    )
                    found[name] = whole(made)
    return found


def stored(directory: Path) -> list[str]:
    path: Location = directory / "step-00000001"
    with Checkpoint(path) as found:
        return [name for name in found.tensors if name.startswith("wire_feedback.")]


def meshes(world: World, name: str) -> Sharding:
    hybrid = name != "one"
    mesh = world.mesh(2, 2, names=("replicate", "shard")) if hybrid else world.mesh(world.size)
    return {"mesh": mesh} | ({"outer_zero_stage": 1} if name == "replicas that shard" else {})


def check_round_trip(world: World, folder: Path, transport: str, sharding: str) -> None:
    model = sharded(transport, **meshes(world, sharding))
    for step in range(2):
        exact = gradients(sharded(transport, WirePolicy(), **meshes(world, sharding)), 10 * step + world.rank + 1)
        before = lost(model)
        found = gradients(model, 10 * step + world.rank + 1)
    expected = lost(model)
    assert expected.keys() == set(LARGE), "only what is encoded"
    for name in LARGE:
        # What arrived and what is lost now are the gradient and what was lost before.
        error = found[name] + expected[name].float() - exact[name] - before[name].float()
        assert float(error.abs().max()) <= 2**-7 * float(before[name].abs().max()) + 1e-6
        assert float(expected[name].abs().max()) > 1e-3 * float(found[name].abs().max())
    checkpoint.save(folder, model, step=1)
    assert len(stored(folder)) == len(LARGE)

    again = sharded(transport, **meshes(world, sharding))
    checkpoint.load(folder, again)
    for name, value in lost(again).items():
        assert torch.equal(value, expected[name]), "also if no step comes between"
    first = gradients(again, None)
    for name in LARGE:
        assert torch.equal(first[name], expected[name].float()), name
    second = gradients(again, None)
    assert all(not bool(second[name].any()) for name in LARGE), "it is added once"


@ranks(2)
@pytest.mark.parametrize("transport", ["p2p", "collective"])
def test_the_first_gradients_after_a_load_include_what_was_lost(world: World, tmp_path: Path, transport: str) -> None:
    check_round_trip(world, tmp_path, transport, "one")


@ranks(4)
@pytest.mark.parametrize("transport", ["p2p", *slow("collective")])
@pytest.mark.parametrize("sharding", ["replicas", *slow("replicas that shard")])
def test_replicas_save_together_what_each_has_lost(world: World, tmp_path: Path, transport: str, sharding: str) -> None:
    check_round_trip(world, tmp_path, transport, sharding)


def saved(world: World, folder: Path) -> dict[str, torch.Tensor]:
    model = sharded()
    gradients(model, world.rank + 1)
    checkpoint.save(folder, model, step=1)
    return lost(model)


def loaded(world: World, folder: Path) -> dict[str, torch.Tensor]:
    model = sharded("collective", WirePolicy(reduce="int8", block=64, min_numel=0))
    checkpoint.load(folder, model)
    return gradients(model, None)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_it_is_loaded_on_another_number_of_ranks_with_another_wire(
    rank_pool: RankPool, tmp_path: Path, size: int
) -> None:
    expected = run(rank_pool, saved, 3, tmp_path)[0]
    found = run(rank_pool, loaded, size, tmp_path)[0]
    for name in LARGE:
        assert torch.equal(found[name], expected[name].float())


@ranks(2)
def test_a_load_replaces_what_was_lost_since_follows_rename_and_gives_it_to_parameters_that_come_into_use_later(
    world: World, tmp_path: Path
) -> None:
    model = sharded()
    gradients(model, world.rank + 1)
    checkpoint.save(tmp_path, model, step=1)
    expected = lost(model)
    gradients(model, world.rank + 7)
    renamed, again = torch.nn.Sequential(sharded()), sharded()
    checkpoint.load(tmp_path, model)
    checkpoint.load(tmp_path, renamed, rename={"": "0."})
    checkpoint.load(tmp_path, again)
    for each, prefix in ((model, ""), (renamed, "0.")):
        first = gradients(each, None)
        assert all(torch.equal(first[f"{prefix}{name}"], expected[name].float()) for name in LARGE), prefix
    name, weight = LARGE[1], again.blocks[1][0].weight
    weight.requires_grad_(False)
    again.zero_grad()
    (again(torch.zeros(2, WIDTHS[0])).sum() * 0).backward()
    weight.requires_grad_(True)
    assert torch.equal(gradients(again, None)[name], expected[name].float())


@ranks(2)
@pytest.mark.parametrize(
    "wire",
    [
        WirePolicy(),
        WirePolicy(reduce="int4", min_numel=0, error_feedback=False),
        WirePolicy(gather="int4", min_numel=0),
    ],
    ids=["exact", "without feedback", "gathers"],
)
def test_without_error_feedback_nothing_is_saved_and_nothing_is_loaded(
    world: World, tmp_path: Path, wire: WirePolicy
) -> None:
    plain, model = sharded(wire=wire), sharded()
    gradients(plain, world.rank + 1)
    checkpoint.save(tmp_path / "without", plain, step=1)
    assert not stored(tmp_path / "without")
    checkpoint.load(tmp_path / "without", model)
    assert not lost(model)
    gradients(model, world.rank + 1)
    checkpoint.save(tmp_path / "with", model, step=1)
    checkpoint.load(tmp_path / "with", plain)
    assert not any(bool(value.any()) for value in gradients(plain, None).values())


@ranks(2)
def test_it_is_cut_as_its_parameter_is(world: World) -> None:
    model, contents = sharded(), Contents()
    gradients(model, world.rank + 1)
    collect_feedback(Parameters(model), contents)
    assert [box.names for box in contents.boxes] == [(f"wire_feedback.{name}",) for name in LARGE]
    for name, box, value in zip(LARGE, contents.boxes, contents.tensors, strict=True):
        param = model.get_parameter(name)
        assert (box.shape, value.shape, value.dtype) == (param.shape, local_tensor(param).shape, torch.bfloat16)
