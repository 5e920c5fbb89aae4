"""What lets a framework that shards on accelerators only do so on CPUs; nothing else is changed in any of them."""

from __future__ import annotations

import os
from typing import Any

import torch


def accelerate_on_cpu() -> None:
    """accelerate uses DDP for several CPU processes, whatever plugin it is given: say that these are accelerators."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    torchs_wrapper_on_cpu()
    partial_state: Any = PartialState
    made = partial_state.__init__

    def made_on_cpu(state: Any, *args: Any, **kwargs: Any) -> None:
        made(state, *args, **kwargs)
        if state.distributed_type in (DistributedType.MULTI_CPU, DistributedType.NO):
            state.distributed_type = DistributedType.MULTI_GPU

    partial_state.__init__ = made_on_cpu


def lightning_strategy(base: type) -> Any:
    """Lightning refuses this class with CPUs, and takes one derived from it."""
    return type(base.__name__, (base,), {})


def torchs_wrapper_on_cpu() -> None:
    """torch's wrapper looks for an accelerator, compares ``cpu``, where parameters lie, with ``cpu:0``, and refuses."""
    from torch.distributed.fsdp import _init_utils, fully_sharded_data_parallel

    handle: Any = _init_utils._init_device_handle

    def on_cpu(state: Any, module: Any, ignored: Any, device_id: Any) -> Any:
        return handle(state, module, ignored, torch.device("cpu") if device_id is None else device_id)

    _init_utils._get_device_from_device_id = lambda *args: None  # type: ignore[assignment]
    fully_sharded_data_parallel._init_device_handle = on_cpu


def torchtitan_on_cpu() -> None:
    """torchtitan asks torch, when it is imported, for an accelerator: say that it is the CPU.

    It divides gradients itself, for which torch's FSDP takes a reduction that gloo has not; a sum is the same.
    """
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[attr-defined]
    if os.environ.get("FULLSHARD_PATCH", "0") == "0":
        from torchtitan.distributed import fsdp

        choose: Any = fsdp.disable_fsdp_gradient_division

        def choose_sums(model: Any) -> None:
            choose(model)
            for module in model.modules():
                if isinstance(module, fsdp.FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)

        fsdp.disable_fsdp_gradient_division = choose_sums


def library_of(model: Any) -> str:
    """Which of both sharded a model."""
    packages = {
        cls.__module__.split(".")[0] for cls in type(model).__mro__ if "FSDP" in cls.__name__ or "Fully" in cls.__name__
    }
    return "fullshard" if "fullshard" in packages else "torch" if "torch" in packages else "nobody"
