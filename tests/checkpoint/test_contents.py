"""Tensors inside of tensor subclasses and of nested state are saved by themselves, and come back to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor

from fullshard import checkpoint
from fullshard.checkpoint import Checkpoint, CheckpointError
from tests.checkpoint.cases import train
from tests.checkpoint.test_save import APIS, run, sharded
from tests.harness import RankPool, World, ranks
from tests.harness.models import MLP, seeded, shard_each
from tests.harness.slow import slow, some

WIDTH = 128


class Nested(torch.optim.SGD):
    """Has lists and dicts of tensors in its state, as Shampoo and its kin do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            if not state:
                state["moments"] = [torch.zeros_like(param), {"slow": torch.zeros_like(param)}]
                state["count"] = {"steps": torch.zeros(()), "kind": "two", "none": None}
            fast, slow = state["moments"][0], state["moments"][1]["slow"]
            state["count"]["steps"] += 1
            slow.lerp_(fast.lerp_(param.grad, 0.5), 0.25)
            param.sub_(slow + fast, alpha=0.1)


def nested_losses(world: World, folder: Path, api: str, save: bool) -> list[float]:
    model = sharded(api, lambda: seeded(MLP, 0 if save else 3))
    optimizer = Nested(model.parameters(), lr=0.1)
    train(model, optimizer, range(2 if save else 1))
    if save:
        checkpoint.save(folder, model, optimizer)
    else:
        checkpoint.load(folder, model, optimizer)
    return train(model, optimizer, range(2, 5))


@pytest.mark.parametrize("api", some(APIS, ["fully_shard"]))
def test_lists_and_dicts_of_tensors_are_sharded_as_they_are(rank_pool: RankPool, tmp_path: Path, api: str) -> None:
    losses = run(rank_pool, nested_losses, 2, tmp_path, api, True)[0]
    assert run(rank_pool, nested_losses, 2, tmp_path, api, False)[0] == losses
    assert run(rank_pool, nested_losses, 3, tmp_path, api, False)[0] == pytest.approx(losses, rel=1e-6)
    with Checkpoint(checkpoint.list_checkpoints(tmp_path)[0]) as saved:
        entry = saved.tensors["optimizer.state.blocks.0.0.weight.moments.1.slow"]
        assert len(entry.pieces) > 1
        assert saved.value("optimizer.state.blocks.0.0.weight.count.kind") == "two"


def through_dcp(world: World, folder: Path, saves: bool) -> tuple[list[float], list[float]]:
    """The losses with the state that was trained, and with what came back from a save of DCP, or of ours by DCP."""
    model = sharded("fully_shard", lambda: seeded(MLP, 0))
    optimizer = Nested(model.parameters(), lr=0.1)
    train(model, optimizer, range(2))
    for state in optimizer.state.values():
        state["count"]["more"] = [1, 2.5]
        state["numbers"] = {"a": 3, "b": {"c": 4.5}}
    other = sharded("fully_shard", lambda: seeded(MLP, 3))
    fresh = Nested(other.parameters(), lr=0.1)
    if saves:
        both = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(both, checkpoint_id=folder)
        checkpoint.load(folder, other, fresh)
    else:
        path = checkpoint.save(folder, model, optimizer, step=1)
        train(other, fresh, range(1))
        for state in fresh.state.values():
            state["count"] |= {"more": [0, 0.0], "kind": "none"}
            state["numbers"] = {"a": 0, "b": {"c": 0.0}}
        both = dict(zip(("model", "optimizer"), get_state_dict(other, fresh), strict=True))
        dcp.load(both, checkpoint_id=path)
        assert both["optimizer"]["state"]["scale"]["count"]["kind"] == "two"
        set_state_dict(other, fresh, model_state_dict=both["model"], optim_state_dict=both["optimizer"])
    for one, found in zip(model.parameters(), other.parameters(), strict=True):
        assert fresh.state[found]["numbers"] == {"a": 3, "b": {"c": 4.5}}
        count = fresh.state[found]["count"] | (
            {} if saves else {"kind": "two"}
        )  # torch's optimizers spoil nested texts
        assert count == optimizer.state[one]["count"]
    return train(model, optimizer, range(2, 5)), train(other, fresh, range(2, 5))


@pytest.mark.parametrize("saves", [True, *slow(False)], ids=["from", "to"])
def test_nested_state_goes_from_dcp_and_to_it(rank_pool: RankPool, tmp_path: Path, saves: bool) -> None:
    for trained, found in run(rank_pool, through_dcp, 2, tmp_path, saves):
        assert found == trained


@ranks(2)
def test_nested_state_of_another_shape_is_refused_by_name(world: World, tmp_path: Path) -> None:
    model = sharded("fully_shard")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[next(iter(model.parameters()))]["factors"] = [torch.ones(7, 7)]
    with pytest.raises(CheckpointError, match=r"the state 'factors\.0' of parameter '.*' has the shape \(7, 7\)"):
        checkpoint.save(tmp_path, model, optimizer)


def of_torchao(kind: str, seed: int) -> Any:
    def build() -> Any:
        return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)], nn.Linear(WIDTH, 8))

    from tests.fully_shard.test_torchao import convert

    model = seeded(build, seed)
    if kind == "float8":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        model = convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "2")
    elif kind == "int8":
        model = convert(model, kind)
    shard_each(*model, model)
    return model


def optimizer_for(model: Any, kind: str) -> torch.optim.Optimizer:
    if kind != "8-bit":
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    from torchao.optim import AdamW8bit

    found: torch.optim.Optimizer = AdamW8bit(model.parameters(), lr=1e-2, block_size=64)
    return found


def batches(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        batch = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(step))
        loss: Tensor = (model(batch) - 1).square().mean()
        loss.backward()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "compile", lambda function, **_: function)  # takes long, for the same values
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def torchao_losses(world: World, folder: Path, kind: str, save: bool) -> list[float] | str:
    model = of_torchao(kind, 0 if save else 5)
    optimizer = optimizer_for(model, kind)
    if save:
        batches(model, optimizer, range(2))
        checkpoint.save(folder, model, optimizer)
    else:
        try:
            checkpoint.load(folder, model, optimizer)
        except CheckpointError as error:
            return str(error)
    return batches(model, optimizer, range(2, 5))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float8", "int8", "8-bit"])
def test_subclasses_of_torchao_come_back_to_the_bit(rank_pool: RankPool, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    losses = run(rank_pool, torchao_losses, 2, tmp_path, kind, True)
    assert run(rank_pool, torchao_losses, 2, tmp_path, kind, False) == losses
    others = run(rank_pool, torchao_losses, 1, tmp_path, kind, False)[0]
    if kind == "8-bit":
        assert "'optimizer.state.0.weight.exp_avg', a torchao.optim" in others
        assert "for different parts of parameters than this rank has" in others
    else:
        assert others == pytest.approx(losses[0], rel=1e-3)
        with Checkpoint(checkpoint.list_checkpoints(tmp_path)[0]) as saved:
            assert saved.tensor("model.0.weight").shape == (WIDTH, WIDTH)
            plain = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)], nn.Linear(WIDTH, 8))
        checkpoint.load(tmp_path, plain)


@ranks(2)
def test_a_subclass_is_made_again_only_if_its_library_allows_it(world: World, tmp_path: Path) -> None:
    def states(seed: int) -> tuple[Any, torch.optim.Optimizer]:
        model = sharded("fully_shard", lambda: seeded(MLP, seed))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for param in model.parameters():
            inner = TwoTensor(param.to_local().detach() + 1, param.to_local().detach() * 2)
            how: Any = {"shape": param.shape, "stride": param.stride(), "run_check": False}
            state = DTensor.from_local(inner, param.device_mesh, param.placements, **how)
            optimizer.state[param]["two"] = state
        return model, optimizer

    model, optimizer = states(0)
    checkpoint.save(tmp_path, model, optimizer)
    other, fresh = states(1)
    with pytest.raises(CheckpointError, match=r"two' is a .*TwoTensor: import the module that defines it"):
        checkpoint.load(tmp_path, other, fresh)
    with torch.serialization.safe_globals([TwoTensor]):
        checkpoint.load(tmp_path, other, fresh)
    for param, expected in zip(other.parameters(), model.parameters(), strict=True):
        found = fresh.state[param]["two"].to_local()
        assert type(found) is TwoTensor
        assert found.a.equal(expected.to_local() + 1)
        assert found.b.equal(expected.to_local() * 2)
