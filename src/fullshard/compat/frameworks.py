"""Frameworks that shard on accelerators only shard on CPUs too, in programs that ask them for FSDP.

torch's FSDP needs accelerators, and frameworks know it: on CPUs accelerate uses DDP, or trains on each rank alone,
whatever plugin it is given; Lightning refuses ``FSDPStrategy``; torchtitan takes CUDA for the device. Owns what
:func:`fullshard.patch` changes in their modules, also in those that are imported later. Where there is an accelerator,
and in programs that do not ask for FSDP, nothing changes.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import torch

from fullshard.device import default_device_type
from fullshard_at_start import AfterImport

#: What was changed: the owner of a name, the name, and what it stood for.
_changed: list[tuple[Any, str, Any]] = []


def _change(owner: Any, name: str, value: Any) -> None:
    _changed.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def _change_accelerate(state: Any) -> None:
    """An ``Accelerator`` with a plugin for FSDP shards on ranks on CPUs, also without ``cpu=True``."""
    kinds, partial, whole = state.DistributedType, state.PartialState, state.AcceleratorState
    make = whole.__init__

    @functools.wraps(make)
    def make_on_cpu(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        is_first = not whole._shared_state  # of others accelerate takes no plugin
        asks = fsdp_plugin is not None and is_first and default_device_type() == "cpu"
        if asks and "LOCAL_RANK" in os.environ:
            kwargs["cpu"] = True
            if partial._shared_state.get("distributed_type") == kinds.NO:  # made without: it knows no other rank
                partial._reset_state()
        make(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if asks and self.distributed_type == kinds.MULTI_CPU:
            self.distributed_type = partial._shared_state["distributed_type"] = kinds.FSDP
            self.fsdp_plugin = fsdp_plugin
            if self.mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self.mixed_precision)

    _change(whole, "__init__", make_on_cpu)


def _change_lightning(connector: Any) -> None:
    """``FSDPStrategy``, or ``"fsdp"``, is accepted on CPUs."""
    owner = getattr(connector, "_AcceleratorConnector", None) or connector._Connector
    check = owner._check_strategy_and_fallback

    @functools.wraps(check)
    def check_on_cpu(self: Any) -> None:
        said, strategy = self._accelerator_flag, self._strategy_flag
        asks = isinstance(strategy, connector.FSDPStrategy) or strategy in ("fsdp", "fsdp_cpu_offload")
        if asks and (said == "cpu" or type(said).__name__ == "CPUAccelerator"):
            self._accelerator_flag = "gpu"
        try:
            check(self)
        finally:
            self._accelerator_flag = said

    _change(owner, "_check_strategy_and_fallback", check_on_cpu)


def _change_torchtitan(utils: Any) -> None:
    """The device is the CPU where there is no accelerator."""
    theirs = {"device_type": utils.device_type, "device_module": utils.device_module}
    ours = {"device_type": "cpu", "device_module": torch.cpu}
    if default_device_type() != "cpu":
        return
    for module in [utils, *sys.modules.values()]:  # some hold these names already
        if getattr(module, "__name__", "").startswith("torchtitan."):
            for name in theirs.keys() & vars(module).keys():
                if vars(module)[name] is theirs[name]:
                    _change(module, name, ours[name])


_hook = AfterImport(
    {
        "accelerate.state": _change_accelerate,
        "lightning.fabric.connector": _change_lightning,
        "lightning.pytorch.trainer.connectors.accelerator_connector": _change_lightning,
        "lightning_fabric.connector": _change_lightning,
        "pytorch_lightning.trainer.connectors.accelerator_connector": _change_lightning,
        "torchtitan.tools.utils": _change_torchtitan,
    }
)


def install() -> None:
    """Change the modules of frameworks, those that are imported and those that will be. A second call does nothing."""
    _hook.install()


def remove() -> None:
    """Undo :func:`install`."""
    if _hook.remove():
        while _changed:
            setattr(*_changed.pop())
