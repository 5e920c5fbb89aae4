"""The names of version 0.1 give the same objects as the new names, and warn."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import fullshard
from fullshard import _renamed, checkpoint
from fullshard.checkpoint.reader import Checkpoint
from fullshard.comm.select import select_transport
from tests.harness import World, ranks

PREEMPTION = "fullshard.checkpoint.PreemptionHandler"


def test_an_old_name_gives_the_new_object_and_warns() -> None:
    for owner, names in _renamed.NAMES.items():
        for old, new in names.items() if owner != PREEMPTION else ():
            module = importlib.import_module(owner)
            with pytest.warns(DeprecationWarning, match=rf"^{owner}\.{old} is called {new} since 0\.2\.0$") as warned:
                assert getattr(module, old) is getattr(module, new)
            assert [warning.filename for warning in warned] == [__file__]
            assert new in module.__all__
            assert old not in module.__all__


def test_a_name_that_never_was_is_an_attribute_error() -> None:
    for module in (fullshard, checkpoint, checkpoint.reader):
        with pytest.raises(AttributeError, match=rf"'{module.__name__}' has no attribute 'neverwas'"):
            _ = module.neverwas
    with pytest.raises(AttributeError, match="has no attribute 'neverwas'"):
        _ = checkpoint.PreemptionHandler().neverwas


def test_old_names_of_the_preemption_handler() -> None:
    with pytest.warns(DeprecationWarning, match="'within' of .* is called 'grace_period' since 0.2.0"):
        handler: Any = checkpoint.PreemptionHandler(within=3.0)  # type: ignore[call-arg]
    assert handler._grace_period == 3.0
    with pytest.warns(DeprecationWarning, match="PreemptionHandler.left is called seconds_left since 0.2.0"):
        assert handler.left is None
    with pytest.raises(TypeError, match="got both 'grace_period' and 'within'"):
        checkpoint.PreemptionHandler(grace_period=1.0, within=3.0)  # type: ignore[call-arg]


@ranks(1)
def test_the_old_keyword_of_an_estimate(world: World) -> None:
    found: Any = fullshard.explain(fullshard.fully_shard(nn.Linear(4, 4)))
    with pytest.warns(DeprecationWarning, match="'flops' of .*estimate is called 'peak_flops' since 0.2.0"):
        estimate = found.estimate(bandwidth=1e9, flops=1e9, tokens=8)
    assert estimate == found.estimate(bandwidth=1e9, peak_flops=1e9, tokens=8)


@ranks(2, fresh=True)
def test_the_transport_host_is_shm(world: World) -> None:
    group, cpu = dist.distributed_c10d._get_default_group(), torch.device("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_TRANSPORT", "host")
        said = "^FULLSHARD_TRANSPORT=host is called FULLSHARD_TRANSPORT=shm since 0.2.0$"
        with pytest.warns(DeprecationWarning, match=said) as warned:
            assert [select_transport(group, cpu).name for _ in range(2)] == ["shm", "shm"]
    assert len(warned) == 1


@ranks(1)
def test_state_may_still_be_given_by_keywords(world: World, tmp_path: Path) -> None:
    model: Any = nn.Linear(2, 2)
    with pytest.warns(DeprecationWarning, match="checkpoint.save takes at, epoch in the dict 'state' since 0.2.0"):
        checkpoint.save(tmp_path, model, step=1, state={"note": 1}, epoch=2, at=3)  # type: ignore[call-arg]
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=1.0), 2)
    with pytest.warns(DeprecationWarning, match="checkpoint.load takes scheduler in the dict 'state' since 0.2.0"):
        found = checkpoint.load(tmp_path, model, strict=False, scheduler=scheduler)  # type: ignore[call-arg]
    assert found == {"step": 1, "note": 1, "epoch": 2, "at": 3}


@ranks(1)
def test_a_misspelt_option_is_no_state(world: World, tmp_path: Path) -> None:
    model: Any = nn.Linear(2, 2)
    for call in (checkpoint.save, checkpoint.load):
        with pytest.raises(TypeError, match="has no keyword 'proces_group'; is it 'process_group'"):
            call(tmp_path, model, proces_group=None)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="state is of type Adam; expected a dict of state by name"):
            call(tmp_path, model, state=torch.optim.Adam(model.parameters()))  # type: ignore[arg-type]
        for name in ("step", "lr.scheduler", "", 3):
            with pytest.raises(ValueError, match=f"state has the name {name!r}; expected a string without dots"):
                call(tmp_path, model, state={name: 1})  # type: ignore[dict-item]
    assert not list(tmp_path.iterdir())


@ranks(1)
def test_replicas_were_near(world: World, tmp_path: Path) -> None:
    model: Any = nn.Linear(2, 2)
    for call in (checkpoint.save, checkpoint.load):
        with pytest.warns(DeprecationWarning, match=rf"'near' of .*{call.__name__} is called 'replicas' since 0.2.0"):
            call(tmp_path, model, near=tmp_path / "memory", **({"step": 1} if call is checkpoint.save else {}))
    assert (tmp_path / "memory").is_dir()
    with pytest.warns(DeprecationWarning, match="'near' of .*forget_replicas is called 'replicas' since 0.2.0"):
        checkpoint.forget_replicas(near=tmp_path / "memory")  # type: ignore[call-arg]
    assert not (tmp_path / "memory").exists()


@ranks(1)
@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_is_the_opposite_of_trainable_only(world: World, tmp_path: Path, frozen: bool) -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    with pytest.warns(DeprecationWarning, match="'frozen' of .*save is called 'not trainable_only' since 0.2.0"):
        path = checkpoint.save(tmp_path, model, frozen=frozen)
    with Checkpoint(path) as saved:
        assert ("model.bias" in saved.tensors) == frozen
