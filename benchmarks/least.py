"""What sharded training calls of torch at least: where the host time of any such library ends.

Parameters are DTensors between uses. Each group is gathered before its forward and before its backward, one is gathered
ahead, and its gradients are reduced after its backward and handed to the DTensors; nothing is allocated but those.
That is all: no check, option, dtype or second use, and blocks run one after the other in the order given. What it
computes is right only where communication is free, and nobody looks at values.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fullshard.group.module_parameters import Updates, updates
from fullshard.torch_private import (
    all_gather_over,
    foreach_copy,
    make_dtensor,
    plain_apply,
    reduce_scatter_over,
    spec_of,
)


def shard_least(model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
    """Shard the parameters of ``blocks``, of one size in each, over all ranks, which must divide them evenly."""
    groups = [_Group(block) for block in blocks]
    for group, following in pairwise(groups):
        group.following, following.previous = following, group
    return model


class _Group:
    def __init__(self, block: nn.Module) -> None:
        assert dist.group.WORLD is not None
        process_group, world_size = dist.group.WORLD, dist.get_world_size()
        self.all_gather, _ = all_gather_over(process_group, async_op=True)
        self.reduce_scatter, _ = reduce_scatter_over(process_group, dist.ReduceOp.SUM, async_op=True)
        mesh = init_device_mesh("cpu", (world_size,))
        places = [
            (inner, name, param)
            for inner in block.modules()
            for name, param in inner._parameters.items()
            if param is not None
        ]
        count, numel = len(places), places[0][2].numel()
        self.following: _Group | None = None
        self.previous: _Group | None = None
        self.work: dist.Work | None = None
        self.full, self.messages = torch.empty(count, numel), torch.empty(world_size, count, numel // world_size)
        by_rank = self.full.view(count, world_size, numel // world_size).transpose(0, 1)
        self.shard = torch.empty(count, numel // world_size)
        self.unpacked, self.packed = ([by_rank], [self.messages]), ([self.messages], [by_rank])
        self.leaves = [nn.Parameter(row.data) for row in self.full]
        self.gradients = list(self.full.clone())
        self.sharded = [nn.Parameter(DTensor.from_local(row, mesh, [Shard(0)], run_check=False)) for row in self.shard]
        self.spec = spec_of(self.sharded[0])  # type: ignore[arg-type]
        self.shown = updates([(*place[:2], leaf) for place, leaf in zip(places, self.leaves, strict=True)])
        self.hidden = updates([(*place[:2], param) for place, param in zip(places, self.sharded, strict=True)])
        self.arrived: list[Tensor] = []
        self.reducing: tuple[dist.Work | None, Tensor] | None = None
        for leaf in self.leaves:
            leaf.register_post_accumulate_grad_hook(self.receive)
        block.register_forward_pre_hook(self.before_forward)
        block.register_forward_hook(self.after_forward)
        show(self.hidden)

    def gather(self) -> None:
        self.work = self.all_gather(self.messages, self.shard)

    def unshard(self, ahead: _Group | None) -> None:
        if self.work is None:
            self.gather()
        assert self.work is not None
        self.work.wait()
        self.work = None
        with torch.no_grad():
            foreach_copy(*self.unpacked)
        show(self.shown)
        if ahead is not None:
            ahead.gather()

    def before_forward(self, module: nn.Module, args: tuple[Tensor, ...]) -> Any:
        self.unshard(self.following)
        return plain_apply(_End)(self, *args)

    def after_forward(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        output.register_hook(self.before_backward)
        show(self.hidden)

    def before_backward(self, grad: Tensor) -> None:
        self.unshard(self.previous)

    def receive(self, leaf: Tensor) -> None:
        assert leaf.grad is not None
        self.arrived.append(leaf.grad)
        leaf.grad = None

    def after_backward(self) -> None:
        with torch.no_grad():
            foreach_copy(self.gradients, self.arrived)
            self.arrived = []
            foreach_copy(*self.packed)
            if self.following is not None:
                self.following.hand_over()
            output = torch.empty(self.shard.shape)
            work = self.reduce_scatter(output, self.messages)
            self.reducing = work, output
            show(self.hidden)
            if self.previous is None:
                self.hand_over()

    def hand_over(self) -> None:
        assert self.reducing is not None
        work, output = self.reducing
        assert work is not None
        work.wait()
        output.mul_(1 / dist.get_world_size())
        for param, row in zip(self.sharded, output.unbind(), strict=True):
            param.grad = make_dtensor(row, self.spec)
        self.reducing = None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: _Group, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.group.after_backward()
        return (None, *grads)


def show(prepared: Updates) -> None:
    """Put parameters in their places."""
    for module, tensors in prepared:
        module._parameters.update(tensors)
