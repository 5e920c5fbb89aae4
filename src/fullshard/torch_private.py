"""The only file that uses private names of torch, each with why we rely on it and what breaks if it goes.

Everything else in the library is built on documented names. What may be missing in some release is looked up by
feature, here, and the callers ask for the feature and not for a version.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat
from operator import add, attrgetter, contains
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree  # torch.utils.pytree is not in every release: walking registered containers
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # building a DTensor without dispatch
from torch.distributed.tensor.placement_types import _StridedShard  # a second cut of a dim that tensor parallel cut
from torch.nn.modules.batchnorm import _BatchNorm  # every batch norm: what mixed precision leaves alone
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

StridedShard = _StridedShard
BatchNorm = _BatchNorm

__all__ = ["DTensorSpec", "StridedShard", "pytree"]


def sharding_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> DTensorSpec:
    """The spec of a DTensor. Without it every gradient would pay ``DTensor.from_local`` (about 40 µs)."""
    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride, dtype))


spec_of: Callable[[DTensor], DTensorSpec] = attrgetter("_spec")


def altered_spec(
    spec: DTensorSpec,
    mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    dtype: torch.dtype | None = None,
) -> DTensorSpec:
    """``spec`` of a tensor of the same shape, placed otherwise or of another dtype."""
    meta = spec.tensor_meta
    assert meta is not None
    return sharding_spec(
        mesh or spec.mesh, spec.placements if placements is None else placements, *meta[:2], dtype or meta.dtype
    )


#: A DTensor that holds a local tensor itself and not a view of it: ``make_dtensor(local, spec)``. The public way,
#: ``DTensor.from_local``, is slower; so is its ``__init__``, which does nothing.
make_dtensor: Callable[[torch.Tensor, DTensorSpec], DTensor] = partial(DTensor.__new__, DTensor, requires_grad=False)


#: The local tensor itself; ``to_local()`` gives a view that autograd follows.
local_of: Callable[[DTensor], torch.Tensor] = attrgetter("_local_tensor")


def set_local(tensor: DTensor, local: torch.Tensor) -> None:
    """Let a DTensor hold another local tensor of the same shape: parameters keep their identity."""
    tensor._local_tensor = local


#: While it is entered, attributes of DTensors are read in half the time: nobody looks for ``__torch_function__``.
PlainAttributes: Any = torch._C.DisableTorchFunctionSubclass


def lend_gradients(lent: Iterable[tuple[Any, ...]]) -> bool:
    """Give each twin the local gradient of its DTensor. ``lent`` has the DTensor, its local tensor, the twin, the spec.

    Returns whether all could be given: whether each DTensor still has that local tensor, and a gradient placed as the
    spec says. One loop, without the look for ``__torch_function__`` that is most of what reading ``grad`` of a DTensor
    takes: a step pays this for every parameter.
    """
    with PlainAttributes():
        try:
            for param, local, twin, spec in lent:
                if param._local_tensor is not local:
                    return False
                grad = param.grad
                if grad is None:
                    twin.grad = None
                elif grad._spec is spec or grad._spec.placements == spec.placements:
                    twin.grad = grad._local_tensor
                else:
                    return False
        except AttributeError:  # a gradient that is no DTensor
            return False
    return True


#: Where an optimizer has the hooks around its step: what stands in for it must not call them a second time.
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def reorder(hook: RemovableHandle, last: bool) -> None:
    """Let a hook run after, or before, all others of its kind; torch has a public way for other kinds only."""
    hooks = hook.hooks_dict_ref()
    assert hooks is not None
    hooks.move_to_end(hook.id, last)


#: One mesh of several that come from one root mesh: data parallel beside tensor parallel.
concatenate_meshes: Callable[[list[DeviceMesh]], DeviceMesh] = DeviceMesh._concatenate

#: Several dims of a mesh as one, with a name.
flatten_mesh: Callable[[DeviceMesh, str], DeviceMesh] = DeviceMesh._flatten


def in_backward() -> bool:
    """Whether this thread runs a node of a backward: a forward that runs then is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call back at the end of the backward that runs now; without it the last reductions would never be waited for."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


#: Hooks that a user registered with ``register_post_accumulate_grad_hook``, if any; we set gradients, so we call them.
post_accumulate_hooks: Callable[[torch.Tensor], dict[int, Any] | None] = attrgetter("_post_accumulate_grad_hooks")

#: Whether gradients of torch's own sharding travel, unless told otherwise, in the dtype of their parameter and not in
#: that of the computation. Not a name that could be looked up: what a default means has changed.
GRADIENTS_KEEP_DTYPE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)

#: What was assigned to ``grad_dtype`` of a parameter: a dtype, ``None`` ("any"), or nothing ("own", follows the dtype).
GradDtype = torch.dtype | Literal["own", "any"]


def chosen_grad_dtype(param: torch.Tensor) -> GradDtype:
    """The ``grad_dtype`` that was assigned. Before torch 2.15 the own dtype counts as not assigned."""
    dtype = param.grad_dtype
    if dtype is None:
        return "any"
    return dtype if getattr(param, "_has_grad_dtype_override", dtype != param.dtype) else "own"


def choose_grad_dtype(param: torch.Tensor, chosen: GradDtype) -> None:
    """Assign the choice for another parameter; autograd and assignments of gradients heed it."""
    if chosen != "own":
        param.grad_dtype = None if chosen == "any" else chosen


#: Under this name ``_apply_optimizer_in_backward`` keeps the optimizers of a parameter, of which it makes hooks for
#: autograd to call; of what is sharded autograd adds up nothing, so we step them.
IN_BACKWARD_OPTIMIZERS = "_in_backward_optimizers"


def after_accumulation(params: Sequence[torch.Tensor]) -> bool:
    """Whether hooks or optimizers are to run when ``params`` have their gradients."""
    if any(map(post_accumulate_hooks, params)):
        return True
    return any(map(contains, map(_attributes, params), repeat(IN_BACKWARD_OPTIMIZERS)))


def run_after_accumulation(param: torch.Tensor) -> None:
    """Call the hooks of a parameter that has its gradient, and step the optimizers that take it at once."""
    for hook in tuple((post_accumulate_hooks(param) or {}).values()):
        hook(param)
    for optimizer in (steps := param.__dict__.get(IN_BACKWARD_OPTIMIZERS, ())):
        optimizer.step()
    if steps:
        param.grad = None


_attributes: Callable[[torch.Tensor], dict[str, Any]] = attrgetter("__dict__")


def is_sharded_tensor(value: object) -> bool:
    """Whether a value is a ``ShardedTensor``: what sharded state dicts had before there were DTensors."""
    return isinstance(value, torch.Tensor) and hasattr(value, "local_shards")


def whole_of_sharded_tensor(tensor: Any) -> torch.Tensor:
    """All of a ``ShardedTensor``, whatever its chunks are, bit by bit. Every rank of its process group must call it."""
    group = tensor._process_group
    kinds = {device.type for device in group._device_types}
    whole = torch.zeros(tuple(tensor.size()), dtype=tensor.dtype, device="cpu" if "cpu" in kinds else kinds.pop())
    for shard in tensor.local_shards():
        starts = shard.metadata.shard_offsets
        whole[tuple(map(slice, starts, map(add, starts, shard.metadata.shard_sizes)))] = shard.tensor
    dist.all_reduce(whole.view(-1).view(torch.uint8), group=group)
    return whole


#: Counts the writes in place to a tensor, as autograd does: values that are still in a slot may be stale.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")


def gradient_hooks(tensor: torch.Tensor) -> tuple[Callable[[torch.Tensor], torch.Tensor | None], ...]:
    """The hooks that users registered on a tensor: those of a parameter go with the one that takes its place."""
    return tuple((tensor._backward_hooks or {}).values())


def is_persistent(module: torch.nn.Module, name: str) -> bool:
    """Whether a buffer is in state dicts. Without it nobody is warned of buffers that ``to_empty()`` left undefined."""
    return name not in module._non_persistent_buffers_set


#: Sets these counters. Without it a saved tensor could be read while its memory holds something else. 0.7 µs for 8.
set_versions: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None] = (
    torch._C._autograd._unsafe_set_version_counter
)


#: Exchanges the memory of two storages; every tensor follows its storage. A slot then serves any group, for 0.1 µs.
swap_memory: Any = getattr(torch.UntypedStorage, "_swap_data_ptr_", None)
CAN_SWAP_MEMORY = swap_memory is not None


def alias_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A storage that reads the same memory and does not own it."""
    construct: Any = torch._C._construct_storage_from_data_pointer
    return construct(storage.data_ptr(), storage.device, storage.nbytes())


def replicated(modules: Iterable[torch.nn.Module]) -> set[torch.nn.Module]:
    """The modules that torch's composable ``replicate`` has; sharding leaves all in them alone. Imports nothing."""
    contract: Any = sys.modules.get("torch.distributed._composable.contract")
    inside = (inner for module in modules for inner in module.modules())
    roots = [each for each in inside if contract is not None and "replicate" in (contract._get_registry(each) or ())]
    return {inner for root in roots for inner in root.modules()}


#: Whether a tensor is a wrapper subclass (quantized weights and the like), which ``.data`` cannot replace.
is_traceable_subclass: Callable[[object], bool] = is_traceable_wrapper_subclass


def plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors of which a tensor consists."""
    if not is_traceable_subclass(tensor):
        yield tensor
        return
    for attribute in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        if isinstance(part := getattr(tensor, attribute), torch.Tensor):
            yield from plain_parts(part)


def parts_of(spec: DTensorSpec, dim: int, after: int = -1) -> int:
    """Into how many parts ``dim`` was cut by tensor parallel, over the mesh dims that come after one."""
    return math.prod(
        spec.mesh.size(mesh_dim)
        for mesh_dim, placement in enumerate(spec.placements)
        if mesh_dim > after and isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim
    )


#: Container classes registered with pytree, and how each comes apart and together again (``flatten_fn``,
#: ``unflatten_fn``); without it tensors inside registered objects would not be found. The public module cannot look up.
PYTREE_NODES: dict[type, Any] = pytree.SUPPORTED_NODES


Tensors = list[torch.Tensor] | tuple[torch.Tensor, ...]


def foreach_copy(targets: Tensors, sources: Tensors) -> None:
    """Many copies in one call, without waiting for the device; one by one they would cost the host most of a gather."""
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)


def foreach_add(targets: Tensors, addends: Tensors) -> None:
    """Many sums in place in one call."""
    torch._foreach_add_(targets, addends)


def foreach_norm(tensors: list[torch.Tensor], norm_type: float, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The norm of each, computed in ``dtype``, in one call. None may be empty if the norm is that of the maximum."""
    return torch._foreach_norm(tensors, norm_type, dtype=dtype)


def foreach_scale(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply each in place by a 0-dim tensor, in one call."""
    torch._foreach_mul_(tensors, factor)


#: Named so since torch 2.13, where the older names, the only ones until then, warn at every call.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# What these call. They look at their arguments for as long as a group of small parameters is copied.
_gather = getattr(dist.ProcessGroup, "all_gather_single", None) or dist.ProcessGroup._allgather_base
_reduce_scatter = getattr(dist.ProcessGroup, "reduce_scatter_single", None) or dist.ProcessGroup._reduce_scatter_base


def _with_async(options: Any, async_op: bool) -> Any:
    options.asyncOp = async_op
    return options


_gather_options = {async_op: _with_async(AllgatherOptions(), async_op) for async_op in (False, True)}
#: By the operation too, which is kept: nothing else may have its id (sums with different factors compare equal).
_reduce_options: dict[tuple[int, bool], tuple[Any, ReduceScatterOptions]] = {}
_MOST_OPTIONS = 256


def start_all_gather(
    output: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """``all_gather_single`` of plain tensors, outside of coalescing."""
    work: dist.Work | None = _gather(group, output, source, _gather_options[async_op])
    if work is None or async_op:
        return work
    work.wait()
    return None


def start_reduce_scatter(
    output: torch.Tensor, source: torch.Tensor, op: Any, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """``reduce_scatter_single`` of plain tensors, outside of coalescing."""
    known = _reduce_options.get((id(op), async_op))
    if known is None:
        if len(_reduce_options) >= _MOST_OPTIONS:  # who divides by another number in every step
            _reduce_options.clear()
        known = _reduce_options[id(op), async_op] = op, _with_async(ReduceScatterOptions(), async_op)
        known[1].reduceOp = op
    work: dist.Work | None = _reduce_scatter(group, output, source, known[1])
    if work is None or async_op:
        return work
    work.wait()
    return None


def premultiplied_sum(factor: float) -> Any:
    """NCCL's sum of values times ``factor``; where torch lacks ``ReduceOp.PREMUL_SUM``, a private maker."""
    if callable(dist.ReduceOp.PREMUL_SUM):
        return dist.ReduceOp.PREMUL_SUM(factor)
    return dist._make_nccl_premul_sum(factor)


_plain_apply: Any = vars(torch._C._FunctionBase)["apply"]


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)`` without its search for leftovers of functorch in each argument."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return _plain_apply.__get__(None, function)(*args)


#: The tensor of which this one is a view. Without it a hook on a view would be lost to an operation in place.
base_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")


def storage_id(tensor: torch.Tensor) -> int:
    """Identifies the storage of a tensor. Storages have no public identity but an address, which empty ones share."""
    return tensor.untyped_storage()._cdata


def process_group_allocator(group: Any, device: torch.device) -> Callable[..., torch.Tensor] | None:
    """How a process group allocates tensors for zero-copy transfers, if it does."""
    if group is None:
        return None
    backend = group._get_backend(device)
    if not getattr(backend, "supports_tensor_alloc", lambda _: False)(device):
        return None

    def allocate(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        count = torch.Size(tuple(size)).numel()
        tensor: torch.Tensor = backend.allocate_tensor(count, dtype=dtype, device=device)
        return tensor.view(tuple(size))

    return allocate


def symmetric_memory_pool(device: torch.device) -> Any:
    """Memory that all ranks can address; torch has no public name for it yet."""
    import torch.distributed._symmetric_memory as symm_mem

    return symm_mem.get_mem_pool(device)


def symmetric_rendezvous(tensor: torch.Tensor, group: Any) -> None:
    """Make symmetric memory known to every rank of ``group``."""
    import torch.distributed._symmetric_memory as symm_mem

    symm_mem.rendezvous(tensor, group=group.group_name)


class OpenGradScaler(torch.amp.GradScaler):
    """A ``GradScaler`` whose subclasses say which gradients are unscaled, and what follows from infinities.

    torch has no public place for it: ``unscale_`` refuses fp16, and a fused optimizer's step does not pass through it.
    """

    def unscale_gradients(
        self, params: list[torch.Tensor], inv_scale: torch.Tensor, found_inf: torch.Tensor
    ) -> dict[torch.device, torch.Tensor]:
        """Multiply the gradients by ``inv_scale`` in place; returns 1 for each device where one was not finite, or 0.

        ``found_inf`` is zero, on the device of the scale.
        """
        optimizer: Any = SimpleNamespace(param_groups=[{"params": params}])
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16=True)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        return self.unscale_gradients(params, inv_scale, found_inf)


def timeout_of(process_group: Any) -> float:
    """Seconds after which a process group gives up; there is no public way to ask. 30 minutes if it does not say."""
    options = getattr(process_group._get_backend(torch.device("cpu")), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout.total_seconds() if timeout is not None else 1800.0


#: Whether a profiler records: ranges cost several times what they measure when none does.
profiler_listens: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def compiler_listens() -> bool:
    """Whether ``torch.compile`` looks at every frame that this thread enters. Without it each hook would have to pay
    for being kept out of graphs in programs that compile nothing."""
    return get_eval_frame_callback() is not None
