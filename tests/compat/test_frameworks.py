"""Frameworks shard on CPUs if they are asked for FSDP. Recipes (tests/frameworks) train so with real ones."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from fullshard.compat import frameworks
from fullshard.testing.rank import forget_accelerate
from tests.harness import RankPool, World, failure_report

#: What is changed in Lightning and torchtitan, as it is there.
LIGHTNING = """
class FSDPStrategy: pass
class Derived(FSDPStrategy): pass
class _Connector:
    def __init__(self, strategy, accelerator):
        self._strategy_flag, self._accelerator_flag = strategy, accelerator
    def _check_strategy_and_fallback(self):
        if type(self._strategy_flag) is FSDPStrategy and self._accelerator_flag not in ("cuda", "gpu"):
            raise ValueError("FSDP is only available on GPU")
"""
TORCHTITAN = "import torch\ndevice_type, device_module = 'cuda', torch.cuda\n"


@pytest.fixture(params=["imported before", "imported later"])
def installed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a module that stands for one of a framework's, before or after the change."""
    names = {"lightning.fabric.connector": LIGHTNING, "torchtitan.tools.utils": TORCHTITAN}
    for name, text in names.items():
        file = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    if request.param == "imported before":
        list(map(importlib.import_module, names))
    frameworks.install()
    frameworks.install()
    yield SimpleNamespace(**{name.split(".")[0]: importlib.import_module(name) for name in names})
    frameworks.remove()
    for name in set(sys.modules) - before:
        if name.startswith(("lightning", "torchtitan")):
            del sys.modules[name]


def test_lightning_takes_its_strategy_on_cpus(installed: Any) -> None:
    module = installed.lightning
    for strategy in (module.FSDPStrategy(), module.Derived()):
        connector = module._Connector(strategy, "cpu")
        connector._check_strategy_and_fallback()
        assert connector._accelerator_flag == "cpu"
    with pytest.raises(ValueError, match="only available on GPU"):
        module._Connector(module.FSDPStrategy(), "tpu")._check_strategy_and_fallback()
    frameworks.remove()
    with pytest.raises(ValueError, match="only available on GPU"):
        module._Connector(module.FSDPStrategy(), "cpu")._check_strategy_and_fallback()


def test_torchtitan_takes_the_cpu(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = installed.torchtitan
    assert (module.device_type, module.device_module) == ("cpu", torch.cpu)
    frameworks.remove()
    assert (module.device_type, module.device_module) == ("cuda", torch.cuda)
    monkeypatch.setattr(frameworks, "default_device_type", lambda: "cuda")
    frameworks.install()
    assert module.device_type == "cuda"


@pytest.fixture(scope="module")
def patched() -> Iterator[RankPool]:
    """Ranks of these tests alone, whose processes stay patched."""
    with RankPool() as pool:
        yield pool


def shard_with_accelerate(world: World, version: int, cpu: bool) -> None:
    fullshard.patch()
    accelerate = importlib.import_module("accelerate")
    if not cpu:
        assert accelerate.PartialState().num_processes == 1  # a program may ask before
    plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=version)
    accelerator = accelerate.Accelerator(cpu=cpu, fsdp_plugin=plugin, mixed_precision="bf16")
    assert accelerator.num_processes == 2
    model = nn.Linear(2, 4)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    assert isinstance(model, (fullshard.FSDPModule, fullshard.FullyShardedDataParallel))
    assert plugin.mixed_precision_policy.param_dtype == torch.bfloat16
    assert accelerate.Accelerator().distributed_type == accelerate.DistributedType.FSDP


def do_not_ask_accelerate(world: World) -> None:
    fullshard.patch()
    accelerate = importlib.import_module("accelerate")
    assert accelerate.Accelerator(cpu=True).distributed_type == accelerate.DistributedType.MULTI_CPU
    forget_accelerate()
    assert accelerate.Accelerator().distributed_type == accelerate.DistributedType.NO


@pytest.mark.parametrize(("version", "cpu"), [(1, True), (2, False)])
def test_accelerate_shards_if_it_has_a_plugin(patched: RankPool, version: int, cpu: bool) -> None:
    pytest.importorskip("accelerate")
    outcomes = patched.run(shard_with_accelerate, 2, version, cpu)
    assert {each.kind for each in outcomes} == {"returned"}, failure_report(outcomes)


def test_accelerate_without_a_plugin_is_as_before(patched: RankPool) -> None:
    pytest.importorskip("accelerate")
    outcomes = patched.run(do_not_ask_accelerate, 2)
    assert {each.kind for each in outcomes} == {"returned"}, failure_report(outcomes)
