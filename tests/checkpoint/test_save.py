"""Saves and loads of both front ends: other ranks, other layouts, torch's own format in both directions."""

from __future__ import annotations

import copy
import gc
import json
import os
import re
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import checkpoint
from fullshard.checkpoint import Checkpoint, CheckpointError
from fullshard.text import bytes_text
from tests.checkpoint.cases import assert_same, optimizer_of, quiet, save_at, train, with_optimizer, wrapped
from tests.checkpoint.state_dicts import Net
from tests.harness import RankPool, World, failure_report, ranks
from tests.harness.models import MLP, MixedDtypes, OddParameters, Transformer, seeded, shard_each, split_over
from tests.harness.slow import slow, some

APIS = ("fully_shard", "flat", "fragments")
apis = pytest.mark.parametrize("api", APIS)


def sharded(api: str, build: Callable[[], Any] = MLP, **options: Any) -> Any:
    """A model of which each block, and the rest, is sharded by either front end."""
    if api != "fully_shard":
        return wrapped(build=build, use_orig_params=api == "fragments", **options)
    model = seeded(build)
    shard_each(*model.blocks, model, **options)
    return model


class Position:
    """What has ``state_dict()`` and ``load_state_dict()``, as data loaders do."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "seen": torch.arange(self.at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["seen"].tolist() == list(range(state["at"]))
        self.at = state["at"]


def save_and_go_on(world: World, folder: Path, api: str, optimizer: str) -> list[float]:
    model, stepped = with_optimizer(sharded(api), optimizer, 2)
    checkpoint.save(folder, model, stepped, step=2)
    return train(model, stepped, range(2, 5))


def load_and_go_on(world: World, folder: Path, api: str, optimizer: str) -> list[float]:
    model, fresh = with_optimizer(sharded(api), optimizer)
    train(model, fresh, range(7, 8))  # other values, in shards and states to read into
    found = checkpoint.load(folder, model, fresh)
    assert found == {"step": 2}
    return train(model, fresh, range(2, 5))


def run(pool: RankPool, function: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    outcomes = pool.run(function, size, *args)
    assert all(outcome.kind == "returned" for outcome in outcomes), failure_report(outcomes)
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize("after", [2, 1, *slow(4, 3)])
@pytest.mark.parametrize("reads", some(APIS, ("fully_shard", "flat")))
@pytest.mark.parametrize("writes", some(APIS, ("fully_shard", "fragments")))
@pytest.mark.parametrize("optimizer", ["Adam", *slow("SGD", "momentum")])
def test_what_four_ranks_wrote_others_read_and_train_on_the_same(
    rank_pool: RankPool, tmp_path: Path, writes: str, reads: str, optimizer: str, after: int
) -> None:
    losses = run(rank_pool, save_and_go_on, 4, tmp_path, writes, optimizer)[0]
    found = run(rank_pool, load_and_go_on, after, tmp_path, reads, optimizer)[0]
    assert found == (losses if after == 4 else pytest.approx(losses, rel=1e-6))


@ranks(2, 3)
@pytest.mark.parametrize("build", [Net, OddParameters, *slow(MixedDtypes, partial(MLP, (6, 1, 9, 3)))])
@apis
def test_models_with_everything_come_back_bit_for_bit(
    world: World, tmp_path: Path, api: str, build: Callable[[], Any]
) -> None:
    if api == "flat" and build is OddParameters:
        pytest.skip("frozen and trained parameters in one flat parameter")
    model, optimizer = with_optimizer(sharded(api, build), "AdamW")
    train(model, optimizer, range(2))  # the same batch everywhere: statistics are those of all ranks
    checkpoint.save(tmp_path, model, optimizer)
    expected = get_state_dict(model, optimizer)
    other, fresh = with_optimizer(sharded(api, lambda: seeded(build, 5)), "AdamW")
    checkpoint.load(tmp_path, other, fresh)
    assert_same(get_state_dict(other, fresh), expected)
    steps = range(2, 4)
    assert train(other, fresh, steps) == train(model, optimizer, steps)


@ranks(2)
@pytest.mark.parametrize("api", some(APIS, ("fully_shard", "fragments")))
def test_torch_reads_what_we_write(world: World, tmp_path: Path, api: str) -> None:
    model, optimizer = with_optimizer(sharded(api, Net), "AdamW", 2)
    path = checkpoint.save(tmp_path, model, optimizer, state={"position": Position(3)})
    expected = get_state_dict(model, optimizer)
    other, fresh = with_optimizer(sharded("fully_shard", lambda: seeded(Net, 5)), "AdamW", 1)
    state = dict(zip(("model", "optimizer"), get_state_dict(other, fresh), strict=True))
    dcp.load(state, checkpoint_id=path)
    set_state_dict(other, fresh, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    model_state, optimizer_state = get_state_dict(other, fresh)
    assert_same(model_state, expected[0])
    assert_same(optimizer_state["state"], expected[1]["state"])


@ranks(2)
@pytest.mark.parametrize("api", some(APIS, ("fully_shard", "fragments")))
def test_we_read_what_torch_writes(world: World, tmp_path: Path, api: str) -> None:
    model, optimizer = with_optimizer(sharded(api, Net), "AdamW", 2)
    expected = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), expected, strict=True)), checkpoint_id=tmp_path / "theirs")
    other, fresh = with_optimizer(sharded(api, lambda: seeded(Net, 5)), "AdamW")
    assert checkpoint.load(tmp_path / "theirs", other, fresh) == {"step": 0}
    assert_same(get_state_dict(other, fresh), expected)


@pytest.mark.slow
@ranks(4)
@pytest.mark.parametrize("offload", [False, True])
def test_replicas_write_each_byte_once(world: World, tmp_path: Path, offload: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    options = {"offload_policy": fullshard.CPUOffloadPolicy(pin_memory=False)} if offload else {}
    model = sharded("fully_shard", partial(MLP, (60, 70, 50, 30)), mesh=mesh, **options)
    path = save_at(tmp_path, model)
    saved = Checkpoint(path)
    numel = sum(param.numel() for param in model.parameters())
    stored = sum(entry.nbytes for entry in saved.tensors.values())
    assert stored == 4 * numel
    assert all(file.size > stored / 6 for name, file in saved.manifest.files.items() if name != ".metadata")
    other = sharded("fully_shard", lambda: seeded(partial(MLP, (60, 70, 50, 30)), 5), mesh=mesh, **options)
    checkpoint.load(tmp_path, other)
    assert_same(other.state_dict(), model.state_dict())


@pytest.mark.slow
@ranks(4)
@apis
@pytest.mark.parametrize("data", [2, 4])
def test_beside_tensor_parallel_what_it_did_not_cut_is_written_once(
    world: World, tmp_path: Path, api: str, data: int
) -> None:
    def split(seed: int) -> Any:
        mesh = init_device_mesh("cpu", (data, 4 // data), mesh_dim_names=("data", "tensor"))
        model = seeded(Transformer, seed)
        split_over(mesh["tensor"], model)
        numels.append(sum(param.numel() for param in model.parameters()))
        if api == "fully_shard":
            fullshard.fully_shard(model, mesh=mesh["data"])
            return model
        how = {"device_mesh": mesh["data"], "use_orig_params": api == "fragments", "device_id": torch.device("cpu")}
        return fullshard.FullyShardedDataParallel(model, **how)

    numels, written = list[int](), list[int]()
    model, other = split(0), split(1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(6).view(1, 6)).sum().backward()
    optimizer.step()
    with pytest.MonkeyPatch.context() as patch:
        writing: Any = import_module("fullshard.checkpoint.save")._Writing
        before = writing._write_files
        count = lambda self: (written.extend(each.nbytes for each in self.tensors), before(self))[1]  # noqa: E731
        patch.setattr(writing, "_write_files", count)
        path = save_at(tmp_path, model, optimizer)
    total = torch.tensor(sum(written))
    dist.all_reduce(total)
    with Checkpoint(path) as saved:
        steps = sum(entry.nbytes for name, entry in saved.tensors.items() if name.endswith(".step"))
        assert total.item() == 3 * 4 * numels[0] + steps
        assert list(saved.verify()) == []
    checkpoint.load(tmp_path, other)
    ids = torch.randint(13, (2, 5), generator=torch.Generator().manual_seed(0))
    assert torch.equal(other(ids), model(ids))
    plain = seeded(Transformer, 2)
    checkpoint.load(tmp_path, plain)
    torch.testing.assert_close(plain(ids), model(ids))


@ranks(2)
def test_nothing_is_gathered(world: World, tmp_path: Path) -> None:
    moved: list[str] = []
    for api in APIS:
        model, optimizer = with_optimizer(sharded(api), "AdamW", 1)
        with pytest.MonkeyPatch.context() as patch:
            for module in (fullshard.full_params, fullshard.wrapper.optim_state, fullshard.wrapper.state_dict):
                patch.setattr(module, "gather", lambda *args, api=api, **kwargs: moved.append(api), raising=False)
            checkpoint.save(tmp_path / api, model, optimizer)
            checkpoint.load(tmp_path / api, model, optimizer)
    assert moved == []


@ranks(2)
def test_names_are_those_of_the_model_as_it_is_now(world: World, tmp_path: Path) -> None:
    model = sharded("fully_shard")
    alone = checkpoint.save(tmp_path / "alone", model)
    inside = checkpoint.save(tmp_path / "inside", nn.Sequential(nn.Identity(), model))
    assert alone is not None
    assert inside is not None
    names = [name.removeprefix("model.") for name in Checkpoint(alone).tensors]
    assert sorted(Checkpoint(inside).tensors) == sorted(f"model.1.{name}" for name in names)


@ranks(2)
def test_what_is_known_of_parameters_is_found_anew_once_they_are_replaced_or_moved(
    world: World, tmp_path: Path
) -> None:
    model = sharded("fully_shard")
    checkpoint.save(tmp_path, model, step=1)
    with torch.no_grad():
        values = {name: param * 2 for name, param in model.state_dict().items()}
    before = weakref.ref(next(model.parameters()))
    model.load_state_dict(values, assign=True)
    checkpoint.save(tmp_path, model, step=2)
    gc.collect()
    assert before() is None
    model.moved = model.blocks
    del model.blocks
    path = save_at(tmp_path, model, step=3)
    with Checkpoint(tmp_path / "step-00000002") as saved, Checkpoint(path) as renamed:
        assert len(renamed.tensors) == len(values)
        for name, value in values.items():
            assert saved.tensor(f"model.{name}").equal(value.full_tensor())
            assert renamed.tensor(f"model.{name.replace('blocks', 'moved')}").equal(value.full_tensor())


@ranks(2)
def test_what_describes_a_save_is_made_again_only_for_another_model(world: World, tmp_path: Path) -> None:
    model = sharded("fully_shard")
    made: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        writing: Any = import_module("fullshard.checkpoint.save")._Writing
        before = writing._describe
        patch.setattr(writing, "_describe", lambda *args: (made.append(1), before(*args))[1])
        for step, (each, at) in enumerate([(model, 1), (model, 2), (model, "long" * 50), (seeded(MLP, 1), 1)]):
            checkpoint.save(tmp_path, each, step=step, state={"at": at})
    assert len(made) == (3 if world.rank == 0 else 0)
    for path in checkpoint.list_checkpoints(tmp_path):
        with Checkpoint(path) as saved:
            assert list(saved.verify()) == []
    assert checkpoint.load(tmp_path / "step-00000001", model) == {"step": 1, "at": 2}
    assert checkpoint.load(tmp_path / "step-00000002", model) == {"step": 2, "at": "long" * 50}


@ranks(2)
def test_state_of_every_rank_comes_back(world: World, tmp_path: Path) -> None:
    model, optimizer = with_optimizer(sharded("fully_shard"), "SGD")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    rng = torch.get_rng_state()
    position = Position(world.rank + 3)
    kept = {"best": 0.25, "names": ["a", "b"], "rng": rng}
    checkpoint.save(tmp_path, model, optimizer, step=3, state={"scheduler": scheduler, "position": position, **kept})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003"]
    position.at = 0
    fresh = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    found = checkpoint.load(tmp_path, model, optimizer, state={"scheduler": fresh, "position": position})
    assert found is not None
    assert found.pop("rng").equal(rng)
    assert (found["step"], found["best"], found["names"], position.at) == (3, 0.25, ["a", "b"], world.rank + 3)
    assert fresh.state_dict() == scheduler.state_dict()


def save_positions(world: World, folder: Path) -> None:
    checkpoint.save(folder, sharded("fully_shard"), state={"at": world.rank, "of": world.size})


def load_positions(world: World, folder: Path) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = checkpoint.load(folder, sharded("fully_shard"))
    return found, [str(each.message) for each in caught]


@pytest.mark.slow
def test_state_of_another_number_of_ranks_goes_round_with_a_warning(rank_pool: RankPool, tmp_path: Path) -> None:
    run(rank_pool, save_positions, 2, tmp_path)
    found = run(rank_pool, load_positions, 3, tmp_path)
    assert [state["at"] for state, _ in found] == [0, 1, 0]
    assert [state["of"] for state, _ in found] == [2, 2, 2]
    assert "saved by 2 ranks and is loaded by 3" in found[0][1][0]
    assert "['at']" in found[0][1][0]


@ranks(2)
def test_sharded_tensors_in_other_state_are_saved_in_shards(world: World, tmp_path: Path) -> None:
    model, average = sharded("fully_shard"), sharded("fully_shard", lambda: seeded(MLP, 1))
    expected = {name: value.full_tensor() for name, value in average.state_dict().items()}
    path = save_at(tmp_path, model, state={"average": average})
    other = sharded("fully_shard", lambda: seeded(MLP, 2))
    checkpoint.load(tmp_path, model, state={"average": other})
    assert_same(other.state_dict(), expected)
    assert Checkpoint(path).tensors["sharded.average.scale"].shape == (3,)


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.blocks.requires_grad_(False)
        self.adapter = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.adapter(self.blocks[1](self.blocks[0](x)))
        return out


@ranks(2)
@pytest.mark.parametrize("api", some(APIS, ("fully_shard", "fragments")))
def test_adapters_are_saved_alone(world: World, tmp_path: Path, api: str) -> None:
    model = sharded(api, Adapted)
    optimizer = torch.optim.AdamW(param for param in model.parameters() if param.requires_grad)
    train(model, optimizer, range(1))
    path = save_at(tmp_path, model, optimizer, trainable_only=True)
    saved = {name for name in Checkpoint(path).tensors if name.startswith("model.")}
    assert saved == {"model.adapter.weight", "model.adapter.bias"}
    expected = train(model, optimizer, range(1, 3))
    other = sharded(api, Adapted)
    fresh = torch.optim.AdamW(param for param in other.parameters() if param.requires_grad)
    checkpoint.load(tmp_path, other, fresh)
    assert train(other, fresh, range(1, 3)) == expected


@ranks(2)
def test_what_does_not_fit_is_refused_on_all_ranks(world: World, tmp_path: Path) -> None:
    model = sharded("fully_shard")
    assert checkpoint.load(tmp_path, model) is None
    with pytest.raises(CheckpointError, match="the state 'odd' cannot be saved as numbers"):
        checkpoint.save(tmp_path, model, state={"odd": object() if world.rank else 1})
    dist.barrier()
    assert list(tmp_path.iterdir()) == []
    dist.barrier()
    with pytest.raises(CheckpointError, match="different names"):
        checkpoint.save(tmp_path, model, state={f"rank{world.rank}": 1})
    with pytest.raises(ValueError, match="keep_last is 0"):
        checkpoint.save(tmp_path, model, keep_last=0)
    with pytest.raises(ValueError, match="step is -1"):
        checkpoint.save(tmp_path, model, step=-1)
    checkpoint.save(tmp_path, model)
    with pytest.raises(CheckpointError, match="saved without an optimizer"):
        checkpoint.load(tmp_path, model, optimizer_of(model, "SGD"))
    with pytest.raises(CheckpointError, match="has no state 'position'"):
        checkpoint.load(tmp_path, model, state={"position": Position(1)})
    with pytest.raises(CheckpointError, match=r"'model.scale' has the shape \(4,\) here, and \(3,\)|has the shape"):
        checkpoint.load(tmp_path, sharded("fully_shard", partial(MLP, (6, 7, 5, 5, 4))))
    with pytest.raises(CheckpointError, match=r"lacks .* is it from a different model"):
        checkpoint.load(tmp_path, sharded("fully_shard", Net))
    checkpoint.load(tmp_path, sharded("fully_shard", partial(MLP, (6, 7, 5, 5, 3))), strict=False)
    with torch.device("meta"):
        meta = MLP()
    fullshard.fully_shard(meta)
    with pytest.raises(CheckpointError, match="is on the meta device"):
        checkpoint.load(tmp_path, meta)
    other = torch.optim.SGD([{"params": [param]} for param in model.parameters()], lr=1.0)
    checkpoint.save(tmp_path, model, optimizer_of(model, "SGD"))
    with pytest.raises(CheckpointError, match="no parameter group of"):
        checkpoint.load(tmp_path, model, other)


@ranks(2)
def test_steps_are_counted_on_and_saved_again(world: World, tmp_path: Path) -> None:
    model = sharded("fully_shard")
    names = [checkpoint.save(tmp_path, model, step=step) for step in (None, None, 7, None, 7)]
    expected = ["step-00000000", "step-00000001", "step-00000007", "step-00000008", "step-00000007.1"]
    assert [path.name for path in names if path] == expected
    newest = ["step-00000008", "step-00000007.1", "step-00000007", "step-00000001", "step-00000000"]
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == newest
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert (found.manifest.step, found.manifest.world_size) == (8, 2)


@ranks(2)
def test_a_name_of_one_checkpoint_is_refused_as_the_directory_of_all(world: World, tmp_path: Path) -> None:
    model = sharded("fully_shard")
    with pytest.raises(
        ValueError, match=r"step-00000003 names a single checkpoint: give save\(\) .*saves', and step=3"
    ):
        checkpoint.save(tmp_path / "saves" / "step-00000003", model, step=3)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*step-00000003"):
        checkpoint.load(tmp_path / "saves" / "step-00000003", model)
    with pytest.raises(ValueError, match=r"near/step-00000004 names a single checkpoint"):
        checkpoint.save(tmp_path / "saves", model, step=4, replicas=tmp_path / "near/step-00000004")
    assert not (tmp_path / "saves").exists()
    assert not (tmp_path / "near").exists()


@ranks(2)
def test_a_save_beside_files_of_others_is_found(world: World, tmp_path: Path) -> None:
    model = sharded("fully_shard")
    if world.rank == 0:
        dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "manifest.json").write_text('{"name": "a program for the web"}')
    dist.barrier()
    assert checkpoint.load(tmp_path / "other", model) is None
    for where in ("dcp", "other"):
        path = checkpoint.save(tmp_path / where, model, step=3)
        assert checkpoint.list_checkpoints(tmp_path / where) == [path]
        assert checkpoint.load(tmp_path / where, model) == {"step": 3}


@ranks(2)
def test_a_step_may_be_of_any_type_of_integers(world: World, tmp_path: Path) -> None:
    model = sharded("fully_shard")
    with pytest.raises(TypeError, match=r"step is 9\.5; expected an integer"):
        checkpoint.save(tmp_path, model, step=9.5)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    dist.barrier()
    for step in (torch.tensor(9), torch.tensor(10, dtype=torch.uint8)):
        checkpoint.save(tmp_path, model, step=step)  # type: ignore[arg-type]
        assert checkpoint.load(tmp_path, model) == {"step": int(step)}


class Counted(nn.Module):
    """Statistics of batches, in buffers of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.BatchNorm1d(8), nn.BatchNorm1d(6)])


@ranks(2, 3)
@apis
def test_buffers_that_differ_between_ranks_are_those_of_one_rank(world: World, tmp_path: Path, api: str) -> None:
    model = sharded(api, Counted)
    for buffer in model.buffers():
        buffer.fill_(world.rank + 1)
    checkpoint.save(tmp_path, model, step=1)
    other = sharded(api, Counted)
    checkpoint.load(tmp_path, other)
    assert {value for buffer in other.buffers() for value in buffer.flatten().tolist()} == {1}


@ranks(2)
@pytest.mark.parametrize("api", some(APIS, ("fully_shard", "fragments")))
def test_what_a_checkpoint_has_not_of_an_optimizer_is_left_as_it_is(world: World, tmp_path: Path, api: str) -> None:
    model, optimizer = with_optimizer(sharded(api), "AdamW", 2)
    checkpoint.save(tmp_path, model, step=1)
    expected = copy.deepcopy(optimizer.state_dict())
    assert checkpoint.load(tmp_path, model, optimizer, strict=False) == {"step": 1}
    assert_same(optimizer.state_dict(), expected)
    first, *rest = list(model.parameters())
    part = torch.optim.AdamW([first], lr=0.5)
    checkpoint.save(tmp_path, model, part, step=2)
    both = torch.optim.AdamW([{"params": [first]}, {"params": rest}], lr=0.02)
    train(model, both, range(2, 3))
    kept = copy.deepcopy([both.state[param] for param in rest])
    assert checkpoint.load(tmp_path, model, both, strict=False) == {"step": 2}
    assert [options["lr"] for options in both.param_groups] == [0.5, 0.02]
    assert_same([both.state[param] for param in rest], kept)


@ranks(2)
def test_state_of_another_shape_is_saved_where_parameters_are_whole(world: World, tmp_path: Path) -> None:
    """As that of Adafactor, which has rows and columns."""
    model, other = seeded(MLP), seeded(MLP, 3)
    optimizer, fresh = (torch.optim.Adafactor(each.parameters(), lr=0.05) for each in (model, other))
    train(model, optimizer, range(2))
    checkpoint.save(tmp_path, model, optimizer, step=2)
    train(other, fresh, range(7, 8))
    checkpoint.load(tmp_path, other, fresh)
    assert_same(fresh.state_dict(), optimizer.state_dict())
    assert train(other, fresh, range(2, 5)) == train(model, optimizer, range(2, 5))


def test_state_that_cannot_be_saved_is_named_in_one_line(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(tmp_path, seeded(MLP), state={"rng": {"numpy": numpy.random.get_state()}})
    assert str(caught.value) == (
        "TypeError: the state 'rng' cannot be saved as numbers, texts, tensors, and lists and dicts of these: "
        "['numpy'][1] is a numpy.ndarray: give torch.as_tensor() of it"
    )
    name, keys, *more = numpy.random.get_state()
    checkpoint.save(tmp_path, seeded(MLP), state={"rng": (name, torch.as_tensor(keys), *more)})
    numpy.random.rand()
    found = checkpoint.load(tmp_path, seeded(MLP))
    assert found is not None
    numpy.random.set_state(found["rng"])
    assert numpy.array_equal(numpy.random.get_state()[1], keys)
    assert numpy.random.get_state()[2] == more[0]


def test_the_names_above_a_new_directory_are_forced_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced, force = list[str](), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (forced.append(os.readlink(f"/proc/self/fd/{file}")), force(file)))
    checkpoint.save(tmp_path / "a" / "b", seeded(MLP))
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")} <= {*forced}


def test_a_load_says_what_it_took_also_of_a_directory_that_was_renamed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = seeded(MLP)
    with caplog.at_level("INFO", "fullshard"):
        assert checkpoint.load(tmp_path, model) is None
        path = save_at(tmp_path, model, step=3)
        assert checkpoint.load(tmp_path, model) == {"step": 3}
    before, save, after = caplog.messages
    assert (before, after) == (f"nothing is loaded: {tmp_path} has no checkpoint", f"step 3 is loaded from {path}")
    assert save.startswith(f"step 3 is saved in {path}: ")
    path.rename(tmp_path / "step-00000009")
    with pytest.warns(UserWarning, match="step-00000009 holds step 3, which is loaded: the directory was renamed"):
        assert checkpoint.load(tmp_path, seeded(MLP)) == {"step": 3}


class Empty(nn.Module):
    """Parameters and a buffer without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = nn.Parameter(torch.empty(0, 5)), nn.Parameter(torch.empty(5, 0))
        self.register_buffer("empty", torch.empty(0))
        self.blocks = nn.ModuleList([nn.Linear(6, 5), nn.Linear(5, 7)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x)) + self.rows.sum() + self.columns.sum()


@ranks(2, 3)
def test_what_has_no_elements_is_saved_too(world: World, tmp_path: Path) -> None:
    for api in APIS:
        model, optimizer = with_optimizer(sharded(api, Empty), "AdamW", 2)
        path = save_at(tmp_path / api, model, optimizer)
        other, fresh = with_optimizer(sharded(api, Empty), "AdamW")
        checkpoint.load(tmp_path / api, other, fresh)
        assert train(other, fresh, range(2, 4)) == train(model, optimizer, range(2, 4)), api
        with Checkpoint(path) as saved:
            shapes = [tuple(saved.tensor(f"model.{name}").shape) for name in ("rows", "columns", "empty")]
        assert shapes == [(0, 5), (5, 0), (0,)]


def test_without_ranks(tmp_path: Path) -> None:
    model, optimizer = with_optimizer(seeded(MLP), "AdamW", 1)
    path = save_at(tmp_path, model, optimizer, state={"at": 5})
    other, fresh = with_optimizer(seeded(MLP, 3), "AdamW")
    assert checkpoint.load(tmp_path, other, fresh) == {"step": 0, "at": 5}
    assert_same(other.state_dict(), model.state_dict())
    assert_same(fresh.state_dict(), optimizer.state_dict())
    with Checkpoint(path) as saved:
        assert saved.tensor("model.scale").equal(model.scale)
        assert saved.value("optimizer.param_groups.0.lr") == 0.02
        assert saved.state() == {"at": 5}
        assert list(saved.verify()) == []
    assert json.loads((path / "manifest.json").read_text())["manifest"]["versions"]["torch"] == torch.__version__
    with quiet(), pytest.raises(KeyError, match="no tensor 'nowhere'"):
        saved.tensor("nowhere")


@pytest.mark.parametrize("wait", [True, False])
def test_a_save_logs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture, wait: bool) -> None:
    with caplog.at_level("INFO", "fullshard"):
        checkpoint.save(tmp_path, seeded(MLP, 1), step=7, wait=wait)
        checkpoint.wait_until_finished()
    number = r"[\d.]+"
    size = sum(file.stat().st_size for file in (tmp_path / "step-00000007").iterdir() if file.name != "manifest.json")
    expected = (
        f"step 7 is saved in {re.escape(str(tmp_path))}/step-00000007: {bytes_text(size)} in ({number}) (m?s) "
        rf"\({number} .?B/s\); training waited for ({number}) (m?s|us)"
    )
    (line,) = caplog.messages
    found = re.fullmatch(expected, line)
    assert found is not None, line
    seconds, waited = (float(found[at]) * {"s": 1, "ms": 1e-3, "us": 1e-6}[found[at + 1]] for at in (1, 3))
    assert waited == seconds if wait else waited < seconds
