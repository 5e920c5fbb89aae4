"""Advice for errors of torch that name no parameter and no remedy, such as "mixed torch.Tensor and DTensor".

These errors come out of operations on DTensors, which nobody can check in a step without cost. So the advice is added
as a note to an error that ends the program. Owns the search, in an error and its traceback, for what the program did.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fullshard.strangers import strangers_of
from fullshard.watch.watch import explainers

#: Where the code of libraries is, for frames that are not the program's.
_LIBRARIES = (Path(torch.__file__).parent, Path(__file__).parent)
#: Parts of the messages with which torch refuses a DTensor.
_NO_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
_REFUSALS = (
    "got mixed torch.Tensor and DTensor",
    "does not have a sharding strategy registered",
    "Sharding propagation failed",
    "in-place operations that require placement changes",
    "is not supported for tensor subclasses",
    "unsupported format string passed to DTensor",
    "access the data pointer on an invalid python storage",
)


def explain(error: BaseException) -> str | None:
    """Say why torch refused a DTensor of a sharded model, and what to do; ``None`` for all other errors."""
    text, frames = str(error), [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(part in text for part in _NO_MEMORY):
        return (
            "this rank ran out of memory. python -m fullshard explain predicts what a step needs, and python -m "
            "fullshard fit finds settings with which it fits: more groups (fully_shard_blocks), recomputed "
            "activations, a smaller batch, CPUOffloadPolicy or DiskOffloadPolicy. Build large models on the meta device"
        )
    plain = next(filter(None, map(_plain_state, _optimizers(frames))), "")
    return plain or next(_causes(text, frames)) if plain or any(part in text for part in _REFUSALS) else None


explainers.append(explain)


def _causes(text: str, frames: Sequence[FrameType]) -> Iterator[str]:
    """What the program may have done, the most specific cause first."""
    callers = [frame.f_locals.get("self") for frame in frames]
    called = {frame.f_code.co_name: frame.f_locals for frame in frames}
    for optimizer in _optimizers(frames)[:1]:
        yield (
            f"{type(optimizer).__name__} steps on DTensors, which its operations do not support. Use an optimizer "
            f"that computes element by element, such as AdamW, or torch.optim.Muon for matrices"
        )
    for caller in callers:
        if isinstance(caller, DistributedDataParallel):
            yield (
                "DistributedDataParallel was given a sharded model, whose gradients fullshard reduces already: call "
                "the sharded model itself"
            )
    if "clip_grad_norm_" in called:
        given = [param.grad for param in called["clip_grad_norm_"].get("parameters") or () if param.grad is not None]
        if len({grad.device_mesh for grad in given if isinstance(grad, DTensor)}) > 1:
            yield (
                "clip_grad_norm_ was given gradients on several meshes, over which torch cannot sum. Sum the norm of "
                "each mesh, on every rank: norms = [get_total_norm(grads).full_tensor() for each mesh's grads], then "
                "total = torch.stack(norms).norm(), then clip_grads_with_norm_ of torch.nn.utils with the parameters "
                "of each mesh and this total"
            )
        for problem, advice in strangers_of(called["clip_grad_norm_"].get("parameters") or ()):
            yield f"clip_grad_norm_ was given sharded and unsharded gradients: {problem}. {advice}"
    if "load_state_dict" in called:
        yield (
            "the state dict of a sharded model has DTensors, and the model that loads it is not sharded. Save whole "
            "tensors: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of "
            "torch.distributed.checkpoint.state_dict, on every rank"
        )
    if "backward" in called:
        yield (
            "the loss is a DTensor: a part of it was computed from sharded parameters, as in loss + weight.norm(). "
            "Make this part a plain tensor, on every rank and before the forward: penalty = weight.norm().full_tensor()"
        )
    if "c10d." in text:
        yield (
            "a collective was given a sharded parameter or gradient. fullshard reduces gradients itself; for other "
            "communication use tensor.to_local(), this rank's part, or tensor.full_tensor()"
        )
    yield (
        "between uses, the parameters, gradients and state dicts of a sharded model are DTensors, of which each rank "
        "has a part. On every rank, get whole values with tensor.full_tensor(), or read and change whole parameters "
        "inside fullshard.summon_full_params(model)"
    )


def _optimizers(frames: Sequence[FrameType]) -> list[torch.optim.Optimizer]:
    """The optimizer whose step failed, unless that was in its closure; then its copy that steps on local tensors."""
    optimizers = list[torch.optim.Optimizer]()
    for at, frame in enumerate(frames):
        if isinstance(caller := frame.f_locals.get("self"), torch.optim.Optimizer):
            optimizers.append(caller)
        if optimizers and frame.f_code.co_name == "step":
            below = [Path(each.f_code.co_filename) for each in frames[at + 1 :]]
            return optimizers if all(any(map(file.is_relative_to, _LIBRARIES)) for file in below) else []
    return []


def _plain_state(optimizer: torch.optim.Optimizer) -> str:
    """Advice for state of an unsharded optimizer that was loaded into one of sharded parameters; otherwise empty."""
    for param, state in optimizer.state.items():
        for name, value in state.items():
            is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
            if isinstance(param, DTensor) and is_plain and value.dim() and value.shape == param.shape:
                return (
                    f"the state '{name}' of {type(optimizer).__name__} is a plain tensor, but its parameter is "
                    f"sharded. Load state of an unsharded optimizer with set_optimizer_state_dict of "
                    f"torch.distributed.checkpoint.state_dict, on every rank"
                )
    return ""
