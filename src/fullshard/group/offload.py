"""Offloading to the CPU: a check of what it needs, and optimizer state that is on the device only for a step.

Offloaded parameters are the business of the group's memory. Owns the rest of ``CPUOffloadPolicy``: state of an
optimizer that steps on the device is copied up before each step and back after it, by hooks on every optimizer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fullshard.comm.backend import backend_name
from fullshard.group.owners import Owner, owner_of
from fullshard.policies import CPUOffloadPolicy, OffloadPolicy
from fullshard.torch_private import local_of, set_local

_watching = False


def prepare_offload(policy: OffloadPolicy, process_group: dist.ProcessGroup, device: torch.device) -> None:
    """Check that the CPU can take part in communication, and begin to move optimizer state if the policy asks for it.

    Raises:
        ValueError: parameters are to rest on the CPU, but ``process_group`` has no backend for it.
    """
    global _watching
    if not isinstance(policy, CPUOffloadPolicy) or device.type == "cpu":
        return
    if policy.parameters:
        if not backend_name(process_group, torch.device("cpu")):
            raise ValueError(
                f"CPUOffloadPolicy keeps parameters and gradients on the CPU, where the process group has no backend, "
                f"so that clip_grad_norm_ and state dicts could not communicate: initialize it with both, as in "
                f"init_process_group('cpu:gloo,{device.type}:nccl')"
            )
    elif not _watching:
        register_optimizer_step_pre_hook(_bring_up)
        register_optimizer_step_post_hook(_take_down)
        _watching = True


def _bring_up(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group, state in _offloaded(optimizer):
        _move(state, group.device)


def _take_down(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for _, state in _offloaded(optimizer):
        _move(state, torch.device("cpu"))


def _offloaded(optimizer: torch.optim.Optimizer) -> list[tuple[Owner, dict[str, Any]]]:
    """The state of parameters whose group offloads state alone."""
    found = []
    for param, state in optimizer.state.items():
        owner = owner_of(param) if isinstance(param, torch.Tensor) else None
        if owner is not None:
            policy = owner[0].options.offload
            if isinstance(policy, CPUOffloadPolicy) and not policy.parameters:
                found.append((owner[0], state))
    return found


def _move(state: dict[str, Any], device: torch.device) -> None:
    for name, value in state.items():
        if isinstance(value, DTensor):
            set_local(value, local_of(value).to(device, non_blocking=True))
        elif isinstance(value, torch.Tensor) and value.ndim > 0:
            state[name] = value.to(device, non_blocking=True)
    if device.type == "cpu":
        torch.accelerator.synchronize()  # the step's state is whole before anybody reads it
