"""What lets a framework that shards on accelerators only do so on CPUs; nothing else is changed in any of them."""

from __future__ import annotations

from typing import Any


def accelerate_on_cpu() -> None:
    """accelerate uses DDP for several CPU processes, whatever plugin it is given: say that these are accelerators."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    torchs_wrapper_on_cpu()
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def lightning_strategy(base: type) -> Any:
    """Lightning refuses this class with CPUs, and takes one derived from it."""
    return type(base.__name__, (base,), {})


def torchs_wrapper_on_cpu() -> None:
    """torch's wrapper compares ``cpu``, where parameters lie, with ``cpu:0``, and refuses."""
    from torch.distributed.fsdp import _init_utils

    _init_utils._get_device_from_device_id = lambda *args: None  # type: ignore[assignment]


def library_of(model: Any) -> str:
    """Which of both sharded a model."""
    packages = {
        cls.__module__.split(".")[0] for cls in type(model).__mro__ if "FSDP" in cls.__name__ or "Fully" in cls.__name__
    }
    return "fullshard" if "fullshard" in packages else "torch" if "torch" in packages else "nobody"
