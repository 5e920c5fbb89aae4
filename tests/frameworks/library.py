"""Which of both libraries a program runs on, and what torch's needs, or refuses, where there are CPUs only."""

from __future__ import annotations

from typing import Any

import torch

from fullshard.compat import frameworks

#: Sizes of a small Llama.
LLAMA: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def put_torchs_on_cpu() -> None:
    """Let torch's FSDP shard on CPUs, where ``fullshard.patch()`` is not called.

    Its wrapper looks for an accelerator, compares ``cpu``, where parameters lie, with ``cpu:0``, and refuses.
    """
    from torch.distributed.fsdp import _init_utils, fully_sharded_data_parallel

    frameworks.install()
    handle: Any = _init_utils._init_device_handle

    def on_cpu(state: Any, module: Any, ignored: Any, device_id: Any) -> Any:
        return handle(state, module, ignored, torch.device("cpu") if device_id is None else device_id)

    _init_utils._get_device_from_device_id = lambda *args: None  # type: ignore[assignment]
    fully_sharded_data_parallel._init_device_handle = on_cpu


def choose_sums(fsdp: Any) -> None:
    """torchtitan divides gradients itself, for which torch's FSDP takes a reduction that gloo has not: a sum is the
    same."""
    choose: Any = fsdp.disable_fsdp_gradient_division

    def choose_on_cpu(model: Any) -> None:
        choose(model)
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    fsdp.disable_fsdp_gradient_division = choose_on_cpu


def library_of(model: Any) -> str:
    """Which of both sharded a model."""
    packages = {
        cls.__module__.split(".")[0] for cls in type(model).__mro__ if "FSDP" in cls.__name__ or "Fully" in cls.__name__
    }
    return "fullshard" if "fullshard" in packages else "torch" if "torch" in packages else "nobody"
