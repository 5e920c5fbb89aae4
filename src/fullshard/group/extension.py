"""Parameters that define how they are gathered: tensor subclasses with ``fsdp_pre_all_gather``.

Such a parameter (fp8 or int8 weights, for example) says which tensors to gather, and makes the unsharded parameter of
the gathered tensors. Owns this gather, beside the group's ordinary one. The gradients are reduced like all others.

Each gather writes to the same tensors, which have memory while the group is unsharded. So a subclass may keep them, or
views of them, in the parameter that it makes, and has nothing to copy after the next gather.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch

from fullshard.comm.process_group import StartedAllGather
from fullshard.comm.waits import Wait
from fullshard.device import Done, Pending, streams_of
from fullshard.group.context import GroupContext
from fullshard.group.parameter import ShardedParameter
from fullshard.torch_private import local_of


class _Extended:
    """One parameter that defines how it is gathered."""

    def __init__(self, group: GroupContext, param: ShardedParameter) -> None:
        self._group = group
        self._param = param
        size = group.data.shard_size
        self._is_uneven = param.dim is not None and param.shape[param.dim] % size != 0
        if self._is_uneven and param.dim:
            raise NotImplementedError(
                f"parameter '{param.name}' of shape {tuple(param.shape)} defines fsdp_pre_all_gather and would be "
                f"sharded unevenly along dim {param.dim} over {size} ranks: shard it along dim 0"
            )
        self._outputs: tuple[torch.Tensor, ...] = ()
        self._inner: tuple[torch.Tensor, ...] = ()
        self._metadata: Any = None
        self._stride = torch.empty(param.shape, device="meta").stride()
        self._started: list[tuple[StartedAllGather, torch.Tensor]] = []  # and where what is gathered belongs

    def start(self, inputs: Sequence[torch.Tensor]) -> None:
        over, size = self._group.data.shard_group, self._group.data.shard_size
        wanted = [((size * source.shape[0], *source.shape[1:]), source.dtype) for source in inputs]
        if wanted != [(tuple(output.shape), output.dtype) for output in self._outputs]:
            device = self._group.device
            self._outputs = tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in wanted)
        _allocate(self._outputs)
        for output, source in zip(self._outputs, inputs, strict=True):
            target = output.data  # has its own version: to autograd a gather is no write in place
            if over is None:
                target.copy_(source)
                continue
            wait = Wait(f"the all-gather of '{self._param.name}'", over, self._group.tag, gathers=True)
            self._started.append((StartedAllGather(source, wait, None if self._param.dim else target), target))

    def finish(self) -> None:
        started, self._started = self._started, []
        for gather, target in started:
            every = gather.finish()
            if every is not target:
                target.copy_(torch.cat([*every], self._param.dim or 0).view(target.shape))

    def inputs(self) -> list[torch.Tensor]:
        """The tensors that the subclass sends, padded with zeros if this rank has fewer rows than others."""
        group, param = self._group, self._param
        local = local_of(param.sharded)  # type: ignore[arg-type]
        if group.offloaded.is_remote:
            local = local.to(group.device, non_blocking=True)
        mesh = group.data.mesh
        if mesh.ndim > 1:
            mesh = mesh[mesh.mesh_dim_names[-1]]  # type: ignore[index]
        before = local.fsdp_pre_all_gather  # type: ignore[attr-defined]
        count = len(inspect.signature(before).parameters)
        if count not in (1, 5):
            raise AssertionError(
                f"fsdp_pre_all_gather of parameter '{param.name}' takes {count} arguments; it must take "
                f"(mesh, outer_size, outer_stride, module, mp_policy), or the mesh alone"
            )
        given = (mesh, param.shape, self._stride, param.locations[0].module, group.policy_of(param))
        inputs, self._metadata = before(*given[:count])
        expected = param.cut.chunk_shape(0)
        if self._is_uneven and (less := expected[0] - (rows := local.shape[0])) > 0:
            inputs = [torch.cat([t, t.new_zeros((less, *t.shape[1:]))]) if t.shape[0] == rows else t for t in inputs]
        compared = len(expected) if param.dim else int(self._is_uneven)  # dims that must be as expected
        if any(tuple(t.shape[:compared]) != expected[:compared] for t in inputs):
            raise AssertionError(
                f"parameter '{param.name}' of shape {tuple(param.shape)} is sharded along dim {param.dim} over "
                f"{group.data.shard_size} ranks: fsdp_pre_all_gather must return inputs as large as this rank's part, "
                f"or padded to {expected}: found {[tuple(t.shape) for t in inputs]}"
            )
        return [t if t.ndim else t.view(1) for t in inputs]

    def make_unsharded(self) -> None:
        """Let the subclass make the unsharded parameter from what was gathered: new the first time, then in place."""
        param, dtype = self._param, self._group.compute_dtype(self._param)
        for output in self._outputs:
            if (streams := streams_of(output.device)) is not None:
                streams.keep(output)  # it was made in the gather's lane, and this lane reads it
        after = local_of(param.sharded).fsdp_post_all_gather  # type: ignore[arg-type, attr-defined]
        if param.unsharded is None:
            whole, inner = after(self._outputs, self._metadata, dtype)
            self._inner = tuple(inner)
            param.make_unsharded(whole.as_strided(param.shape, self._stride, 0))
            return
        _allocate(self._inner)
        after(self._outputs, self._metadata, dtype, out=param.unsharded)

    def free(self) -> None:
        """Free what was gathered and what the subclass made of it."""
        for tensor in (*self._outputs, *self._inner) if not self._group.options.keep_unsharded_storage else ():
            tensor.untyped_storage().resize_(0)


class ExtensionGather:
    """The gather of a group with parameters that define how they are gathered."""

    def __init__(self, group: GroupContext) -> None:
        self._extended = [_Extended(group, param) for param in group.params if param.extends]
        self._others: Pending = Done()

    @torch.inference_mode(False)
    @torch.no_grad()
    def start(self, start_others: Callable[[], Pending]) -> Pending:
        """Gather them after others. Runs users' code first: if it raises, no communication is under way."""
        inputs = [each.inputs() for each in self._extended]
        self._others = start_others()
        try:
            for each, sent in zip(self._extended, inputs, strict=True):
                each.start(sent)
        except BaseException:
            with suppress(RuntimeError):
                self.finish()  # what was started writes to the buffers
            raise
        return self

    def finish(self) -> None:
        with ExitStack() as parts:  # each of them, whichever raises: what has not ended writes to the buffers
            for part in reversed((self._others, *self._extended)):
                parts.callback(part.finish)

    @torch.inference_mode(False)
    @torch.no_grad()
    def make_unsharded(self) -> None:
        for each in self._extended:
            each.make_unsharded()

    def free(self) -> None:
        for each in self._extended:
            each.free()


def _allocate(tensors: Iterable[torch.Tensor]) -> None:
    """Allocate memory again for tensors that were freed."""
    for tensor in tensors:
        if tensor.untyped_storage().nbytes() == 0:
            tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)
