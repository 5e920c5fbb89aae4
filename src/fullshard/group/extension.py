"""Parameters that travel in a form of their own: tensor subclasses with ``fsdp_pre_all_gather``.

Such a parameter (fp8 or int8 weights, for example) says which tensors to gather and makes the unsharded parameter of
what was gathered. Owns their gather beside the group's ordinary one; their gradients travel like all others.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fullshard.comm.transport import Pending
from fullshard.torch_private import local_of

if TYPE_CHECKING:
    from fullshard.group.group import Group
    from fullshard.group.parameter import ShardedParameter


class _All:
    """Communication that is complete when all of its parts are."""

    def __init__(self, parts: Sequence[Pending]) -> None:
        self._parts = parts

    def finish(self) -> None:
        for part in self._parts:
            part.finish()


class _Gather:
    """What one parameter sends, and where it is received."""

    def __init__(self, inputs: list[torch.Tensor], metadata: Any, group: dist.ProcessGroup | None) -> None:
        self.metadata = metadata
        size = group.size() if group is not None else 1
        self.outputs = [torch.empty((size * t.shape[0], *t.shape[1:]), dtype=t.dtype, device=t.device) for t in inputs]
        self._work: list[Any] = []
        for output, source in zip(self.outputs, inputs, strict=True):
            if group is None:
                output.copy_(source)
                continue
            flat_out = output.view(-1).view(torch.uint8)
            flat_in = source.contiguous().view(-1).view(torch.uint8)
            host = source.device.type == "cpu"
            work = dist.all_gather_into_tensor(flat_out, flat_in, group=group, async_op=host)
            if host:
                self._work.append((work, flat_in))

    def finish(self) -> None:
        for work, _ in self._work:
            work.wait()
        self._work.clear()


class ExtensionGather:
    """The parameters of a group that define how they are gathered."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._params = [param for param in group.params if param.extends]
        self._gathers: list[_Gather] = []
        self._inner: dict[int, list[torch.Tensor]] = {}
        self._unsharded: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def start(self, other: Pending) -> Pending:
        """Gather them after ``other``."""
        self._gathers = [_Gather(*self._inputs(param), self._group.data.shard_group) for param in self._params]
        return _All((other, *self._gathers))

    def _inputs(self, param: ShardedParameter) -> tuple[list[torch.Tensor], Any]:
        group = self._group
        local = local_of(param.sharded)  # type: ignore[arg-type]
        if group.offloads:
            local = local.to(group.device, non_blocking=True)
        before = local.fsdp_pre_all_gather  # type: ignore[attr-defined]
        count = len(inspect.signature(before).parameters)
        mesh = group.data.shard_mesh
        if count == 1:
            inputs, metadata = before(mesh)
        elif count == 5:
            location = param.locations[0]
            stride = torch.empty(param.shape, device="meta").stride()
            inputs, metadata = before(mesh, param.shape, stride, location.module, group.policy_of(param))
        else:
            raise AssertionError(
                f"fsdp_pre_all_gather of parameter '{param.name}' takes {count} arguments; it must take "
                f"(mesh, outer_size, outer_stride, module, mp_policy), or the mesh alone"
            )
        expected = param.padded_shape
        uneven = param.dim is not None and param.shape[param.dim] % group.data.shard_size != 0
        if uneven and any(tuple(t.shape) != expected for t in inputs):
            raise AssertionError(
                f"parameter '{param.name}' of shape {tuple(param.shape)} is sharded unevenly over "
                f"{group.data.shard_size} ranks: fsdp_pre_all_gather must return inputs padded to {expected}: "
                f"found {[tuple(t.shape) for t in inputs]}"
            )
        return list(inputs), metadata

    @torch.inference_mode(False)
    @torch.no_grad()
    def arrive(self) -> None:
        """Let each subclass make its unsharded parameter of what was gathered; the first time new, then in place."""
        for param, gather in zip(self._params, self._gathers, strict=True):
            dtype = self._group.compute_dtype(param)
            after = local_of(param.sharded).fsdp_post_all_gather  # type: ignore[arg-type, attr-defined]
            outputs = tuple(gather.outputs)
            for output in outputs:
                if output.device.type != "cpu":  # made in the gather's lane, and read here for as long as it takes
                    output.record_stream(torch.accelerator.current_stream(output.device))
            if id(param) not in self._unsharded:
                self._unsharded[id(param)], inner = after(outputs, gather.metadata, dtype)
                self._inner[id(param)] = list(inner)
            else:
                for tensor in self._inner[id(param)]:
                    storage = tensor.untyped_storage()
                    if storage.nbytes() == 0:
                        storage.resize_(tensor.numel() * tensor.itemsize)
                whole = param.unsharded if param.unsharded is not None else self._unsharded[id(param)]
                after(outputs, gather.metadata, dtype, out=whole)
        self._gathers = []

    def make_leaves(self) -> None:
        """Make the leaves of the extended parameters; called once, after the first gather."""
        self.arrive()
        for param in self._params:
            whole = self._unsharded[id(param)]
            param.make_unsharded(whole.as_strided(param.shape, torch.empty(param.shape, device="meta").stride()))

    def leave(self) -> None:
        """Free what the subclasses own while the group is sharded."""
        for inner in self._inner.values():
            for tensor in inner:
                tensor.untyped_storage().resize_(0)
