"""The only file that uses private names of torch. Each has a line that says why we need it, or what breaks without it.

All other files use documented names only. Names that some releases lack are looked up here, so that callers ask for a
feature and not for a version.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from operator import add, attrgetter, contains
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem  # memory that all ranks can address
import torch.utils._pytree as pytree  # torch.utils.pytree is not in every release: walking registered containers
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as outside_transforms  # for plain tensors
from torch._subclasses.fake_tensor import (  # tensors without memory that know their device, and what reads values
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # building a DTensor without dispatch
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as box_of  # if a dim was cut twice
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard  # a second cut of a dim
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # every batch norm: mixed precision leaves them alone
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode  # sees each operation
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_subclass  # quantized weights
from torch.utils.hooks import RemovableHandle

__all__ = [
    "BatchNorm",
    "DTensorSpec",
    "DispatchMode",
    "FakeTensor",
    "FakeTensorMode",
    "StridedShard",
    "box_of",
    "is_traceable_subclass",
    "outside_transforms",
    "pytree",
    "symm_mem",
]


def sharding_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> DTensorSpec:
    """The spec of a DTensor. Without it every gradient would pay ``DTensor.from_local`` (about 40 µs)."""
    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride, dtype))


def altered_spec(
    spec: DTensorSpec,
    mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    dtype: torch.dtype | None = None,
) -> DTensorSpec:
    """``spec`` with a different dtype or placement, for a tensor of the same shape."""
    meta = spec.tensor_meta
    assert meta is not None
    return sharding_spec(mesh or spec.mesh, placements or spec.placements, *meta[:2], dtype or meta.dtype)


spec_of: Callable[[DTensor], DTensorSpec] = attrgetter("_spec")
#: The local tensor itself; ``to_local()`` gives a view that autograd follows.
local_of: Callable[[DTensor], torch.Tensor] = attrgetter("_local_tensor")
#: A DTensor that holds a local tensor itself and not a view of it: ``make_dtensor(local, spec)``. The public way,
#: ``DTensor.from_local``, is slower; so is its ``__init__``, which does nothing.
make_dtensor: Callable[[torch.Tensor, DTensorSpec], DTensor] = partial(DTensor.__new__, DTensor, requires_grad=False)
#: A context in which attributes of DTensors are read in half the time, as ``__torch_function__`` is not looked up.
PlainAttributes: Any = torch._C.DisableTorchFunctionSubclass


def storage_info(path: str, offset: int, length: int) -> Any:
    """The position of a piece, in the form of ``torch.distributed.checkpoint``'s metadata."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(path, offset, length)


def set_local(tensor: DTensor, local: torch.Tensor, spec: DTensorSpec | None = None) -> None:
    """Replace the local tensor of a DTensor by another of the same shape, and its spec. It stays the same object."""
    tensor._local_tensor, tensor._spec = local, spec or tensor._spec


def set_rank(mesh: DeviceMesh, rank: int) -> None:
    """Let this process be a different one of a 1-D mesh."""
    mesh._coordinate_on_dim, mesh._rank = (rank,), rank


def set_data(param: torch.nn.Parameter, data: torch.Tensor) -> None:
    """Replace the data of a parameter, also by data of a subclass or on another device. It stays the same object.

    A third-party device may refuse ``param.data = data`` from the CPU. Then it swaps contents with a new one.
    """
    if not is_traceable_subclass(data) and torch._has_compatible_shallow_copy_type(param, data):
        param.data = data
        return
    with torch.no_grad():
        other = torch.nn.Parameter(data.detach(), requires_grad=param.requires_grad)
        other.__dict__.update({name: value for name, value in param.__dict__.items() if name not in other.__dict__})
        torch.utils.swap_tensors(param, other)


def lend_gradients(lent: Iterable[tuple[Any, ...]]) -> bool:
    """Give each twin the local gradient of its DTensor. An entry of ``lent`` is a DTensor, its local tensor, the twin,
    and a spec. Returns whether each DTensor still has that local tensor, and a gradient placed as the spec says."""
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


#: The attributes with the hooks of an optimizer's step: its substitute must not call them a second time.
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def reorder(hook: RemovableHandle, last: bool) -> None:
    """Make a hook run after, or before, all others of its kind. Torch has no public way for hooks of optimizers."""
    hooks = hook.hooks_dict_ref()
    assert hooks is not None
    hooks.move_to_end(hook.id, last)


def only_makes_state(optimizer: torch.optim.Optimizer, arguments: dict[str, Any]) -> bool:
    """Whether a step with these keyword arguments is that of torch's functions for state dicts, at a learning rate of
    0: it gives state to an optimizer without any, which only some ranks may have."""
    is_torchs = "closure" in arguments and arguments["closure"] is None
    return is_torchs and not any(float(group.get("lr", 0)) for group in optimizer.param_groups)


#: One mesh of several that come from one root mesh: data parallel beside tensor parallel.
concatenate_meshes: Callable[[list[DeviceMesh]], DeviceMesh] = DeviceMesh._concatenate
#: Several dims of a mesh as one, with a name.
flatten_mesh: Callable[[DeviceMesh, str], DeviceMesh] = DeviceMesh._flatten

#: The number of the backward in which this thread runs, or -1 outside of any. A forward inside a backward is a
#: recomputation.
running_backward: Callable[[], int] = torch._C._current_graph_task_id
#: The node of autograd that runs in this thread.
running_node: Callable[[], Any] = torch._C._current_autograd_node
#: Calls back at the end of the backward that runs now; without it the last reductions would never be waited for.
call_after_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
#: Hooks that a user registered on a tensor, if any. They move from a parameter to the one that replaces it.
gradient_hooks: Callable[[torch.Tensor], dict[int, Any] | None] = attrgetter("_backward_hooks")
#: The hooks of ``register_post_accumulate_grad_hook``. We set gradients ourselves, so we call these hooks.
post_accumulate_hooks: Callable[[torch.Tensor], dict[int, Any] | None] = attrgetter("_post_accumulate_grad_hooks")

#: Whether torch's own FSDP by default reduces gradients in the dtype of their parameter, not in that of computation. It
#: asks for a version, because the meaning of a default changed and no name tells.
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
    """Assign the ``grad_dtype`` that was chosen for another parameter. Autograd enforces it."""
    if chosen != "own":
        param.grad_dtype = None if chosen == "any" else chosen


#: The attribute in which ``_apply_optimizer_in_backward`` keeps a parameter's optimizers. It steps them in hooks on the
#: accumulation of gradients, which autograd does not do for sharded parameters. So we step them.
IN_BACKWARD_OPTIMIZERS = "_in_backward_optimizers"


def after_accumulation(params: Sequence[torch.Tensor]) -> bool:
    """Whether hooks or optimizers must run once ``params`` have their gradients."""
    if any(map(post_accumulate_hooks, params)):
        return True
    return any(map(contains, map(vars, params), repeat(IN_BACKWARD_OPTIMIZERS)))


def run_after_accumulation(param: torch.Tensor) -> None:
    """Call the hooks that wait for the gradient of ``param``, and step the optimizers that run in backward."""
    for hook in tuple((post_accumulate_hooks(param) or {}).values()):
        hook(param)
    for optimizer in (steps := param.__dict__.get(IN_BACKWARD_OPTIMIZERS, ())):
        optimizer.step()
    if steps:
        param.grad = None


def is_sharded_tensor(value: object) -> bool:
    """Whether a value is a ``ShardedTensor``, as sharded state dicts had before DTensors."""
    return isinstance(value, torch.Tensor) and hasattr(value, "local_shards")


def own_part_of_sharded_tensor(tensor: Any) -> tuple[torch.Tensor, dist.ProcessGroup]:
    """A tensor like the whole of a ``ShardedTensor``, with this rank's chunks and zeros elsewhere, so that the sum of
    the bytes of all ranks is the whole; and its process group."""
    group = tensor._process_group
    kinds = {device.type for device in group._device_types}
    whole = torch.zeros(tuple(tensor.size()), dtype=tensor.dtype, device="cpu" if "cpu" in kinds else kinds.pop())
    for shard in tensor.local_shards():
        starts = shard.metadata.shard_offsets
        whole[tuple(map(slice, starts, map(add, starts, shard.metadata.shard_sizes)))] = shard.tensor
    return whole, group


#: Errors of fake tensors: an operator reads their values.
READS_VALUES = DataDependentOutputException, DynamicOutputShapeException
#: Operators that have no public name: they read one number, compute a CTC loss, and multiply groups of rows.
read_number, ctc_loss, grouped_product = (
    torch.ops.aten._local_scalar_dense,
    torch.ops.aten._ctc_loss,
    torch.ops.aten._grouped_mm.default,
)
#: Attention as GPUs fuse it, in two ways.
flash_attention: Any = torch.ops.aten._scaled_dot_product_flash_attention
efficient_attention: Any = torch.ops.aten._scaled_dot_product_efficient_attention
#: A context in which operators have other implementations.
scoped_library = torch.library._scoped_library
schema_of: Callable[[Any], Any] = attrgetter("_schema")  # what an operator says of its arguments
#: The tensor of which this one is a view. Without it a hook on a view would be lost to an operation in place.
base_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")
#: Counts the writes in place to a tensor, as autograd does: values that are still in a slot may be stale.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
#: Sets these counters. Without it a saved tensor could be read while its memory holds something else. 0.7 µs for 8.
set_versions: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None] = (
    torch._C._autograd._unsafe_set_version_counter
)
wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass
#: Exchanges the memory of two storages; every tensor follows its storage. A slot then serves any group, for 0.1 µs.
#: Torch before 2.12 lacks it: a buffer is then allocated when it takes a slot.
swap_memory: Any = getattr(torch.UntypedStorage, "_swap_data_ptr_", None)
CAN_SWAP_MEMORY = swap_memory is not None


def storage_id(tensor: torch.Tensor) -> int:
    """Identifies the storage of a tensor; 0 for one that has none. Storages have no public identity but an address,
    which empty ones share."""
    try:
        return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0
    except RuntimeError:  # wrapped by a transform of ``torch.func``
        return storage_id(torch._C._functorch.get_unwrapped(tensor))


def shares_memory(tensor: torch.Tensor) -> bool:
    """Whether other tensors have this one's storage and may read it, such as a gradient that autograd passes on."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > 2  # the tensor's and ours


def alias_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A storage that reads the same memory and does not own it."""
    construct: Any = torch._C._construct_storage_from_data_pointer
    return construct(storage.data_ptr(), storage.device, storage.nbytes())


#: The names of buffers that are not in state dicts: users are warned of those that ``to_empty()`` left undefined.
non_persistent_buffers: Callable[[torch.nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")


def replicated(modules: Iterable[torch.nn.Module]) -> set[torch.nn.Module]:
    """The modules under torch's composable ``replicate``, which are not sharded. Imports nothing."""
    contract: Any = sys.modules.get("torch.distributed._composable.contract")
    inside = (inner for module in modules for inner in module.modules())
    roots = [each for each in inside if contract is not None and "replicate" in (contract._get_registry(each) or ())]
    return {inner for root in roots for inner in root.modules()}


def plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors of which a tensor consists."""
    if not is_traceable_subclass(tensor):
        yield tensor
        return
    for attribute in tensor.__tensor_flatten__()[0]:
        if isinstance(part := getattr(tensor, attribute), torch.Tensor):
            yield from plain_parts(part)


def parts_of(spec: DTensorSpec, dim: int, after: int = -1) -> int:
    """The number of parts into which tensor parallel cut ``dim``, over the mesh dims behind ``after``."""
    return math.prod(
        spec.mesh.size(mesh_dim)
        for mesh_dim, placement in enumerate(spec.placements)
        if mesh_dim > after and isinstance(placement, (Shard, StridedShard)) and placement.dim == dim
    )


#: Container classes registered with pytree, and how each comes apart and together again (``flatten_fn``,
#: ``unflatten_fn``); without it tensors inside registered objects would not be found. The public module cannot look up.
PYTREE_NODES: dict[type, Any] = pytree.SUPPORTED_NODES
Tensors = list[torch.Tensor] | tuple[torch.Tensor, ...]

#: Many copies (at least one) in one call, without waiting for the device. Separate calls would take the host most of a
#: gather.
foreach_copy: Callable[[Tensors, Tensors], object] = partial(torch._foreach_copy_, non_blocking=True)
foreach_add: Callable[[Tensors, Tensors], None] = torch._foreach_add_  # in place
#: Writes the chunks of tensors along their first dim, as ``torch.chunk`` cuts and padded, end to end to ``out``: a row
#: for each rank. It is one kernel; copies to strided places take one each.
chunk_cat: Callable[..., torch.Tensor] = partial(torch._chunk_cat, dim=0)
foreach_norm: Callable[..., tuple[torch.Tensor, ...]] = torch._foreach_norm  # the maximum norm fails for empty tensors
foreach_scale: Callable[[Tensors, torch.Tensor], None] = torch._foreach_mul_  # in place, with a 0-dim tensor

#: Named so since torch 2.13, where the older names, the only ones until then, warn at every call.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# The methods that these functions call, which check arguments for as long as a group of small parameters is copied.
_GATHER, _REDUCE_SCATTER = (
    new if hasattr(dist.ProcessGroup, new) else old
    for new, old in (("all_gather_single", "_allgather_base"), ("reduce_scatter_single", "_reduce_scatter_base"))
)

#: Communicates its second argument and writes the result to its first. The caller waits for the work that it returns.
Collective = Callable[[torch.Tensor, torch.Tensor], dist.Work | None]
#: The same for several pairs of tensors in one call.
Collectives = Callable[[Tensors, Tensors], dist.Work | None]


def all_gather_over(group: dist.ProcessGroup, async_op: bool) -> tuple[Collective, Collectives]:
    """``all_gather_single`` of plain tensors, outside of coalescing, for many calls; and of several in one call."""
    options = AllgatherOptions()
    options.asyncOp = async_op
    return partial(getattr(group, _GATHER), opts=options), partial(group.allgather_into_tensor_coalesced, opts=options)


def reduce_scatter_over(group: dist.ProcessGroup, op: Any, async_op: bool) -> tuple[Collective, Collectives]:
    """``reduce_scatter_single`` of plain tensors, outside of coalescing, for many calls; and of several in one call."""
    options = ReduceScatterOptions()
    options.reduceOp, options.asyncOp = op, async_op
    together = partial(group.reduce_scatter_tensor_coalesced, opts=options)
    return partial(getattr(group, _REDUCE_SCATTER), opts=options), together


def premultiplied_sum(factor: float) -> Any:
    """NCCL's sum of values times ``factor``; where torch lacks ``ReduceOp.PREMUL_SUM``, a private maker."""
    if callable(dist.ReduceOp.PREMUL_SUM):
        return dist.ReduceOp.PREMUL_SUM(factor)
    return dist._make_nccl_premul_sum(factor)


#: Whether a transform of ``torch.func`` runs: tensors may be wrapped, and operations make wrapped ones.
transforms_are_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
#: The mode in which ``make_fx`` records operations, or ``None``. It has no public name.
make_fx_mode: Callable[[], object] = partial(torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY)
#: ``apply`` of a function outside of transforms, without its search of each argument for dead wrappers of them.
plain_apply: Callable[[Any], Any] = partial(vars(torch._C._FunctionBase)["apply"].__get__, None)


def allocating_backend(group: Any, device: torch.device) -> Any:
    """The backend of a process group if it allocates tensors for zero-copy transfers, or ``None``."""
    backend = None if group is None else group._get_backend(device)
    return backend if getattr(backend, "supports_tensor_alloc", lambda _: False)(device) else None


class OpenGradScaler(torch.amp.GradScaler):
    """A ``GradScaler`` whose subclasses say which gradients are unscaled, and what follows from infinities.

    torch has no public place for this: ``unscale_`` refuses fp16, and a fused optimizer's step does not call it.
    """

    def unscale_gradients(
        self, params: list[torch.Tensor], inv_scale: torch.Tensor, found_inf: torch.Tensor
    ) -> dict[torch.device, torch.Tensor]:
        """Multiply the gradients by ``inv_scale`` in place; returns, by device, 1 if one was not finite and else 0."""
        optimizer: Any = SimpleNamespace(param_groups=[{"params": params}])
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16=True)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        return self.unscale_gradients(params, inv_scale, found_inf)


def timeout_of(process_group: Any) -> float:
    """The timeout of a process group in seconds, or 1800 if it is unknown. There is no public function for it."""
    options = getattr(process_group._get_backend(torch.device("cpu")), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout.total_seconds() if timeout is not None else 1800.0


#: Lets the device's current stream wait for so many cycles of its clock. Without it a simulated network takes no time.
device_sleep: Callable[[int], None] = torch.cuda._sleep

#: The store with which the default process group was initialized.
default_store: Callable[[], Any] = dist.distributed_c10d._get_default_store


def port_of(store: Any) -> int:
    """The port of a store's server; 0 if it has none."""
    while not hasattr(store, "port") and hasattr(store, "underlying_store"):
        store = store.underlying_store
    return int(getattr(store, "port", 0))


#: Whether a profiler records. If not, we open no ranges: they would cost several times what they measure.
profiler_listens: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
#: What ``torch.compile`` calls for each frame that this thread enters; ``None`` outside of it. Without it, each hook
#: would pay for being kept out of graphs, also in programs that compile nothing.
compiler_callback: Callable[[], object] = get_eval_frame_callback


def init_fake_group(size: int, rank: int) -> None:
    """Make a default process group whose collectives move nothing."""
    import torch.testing._internal.distributed.fake_pg  # makes the backend known  # noqa: F401

    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=size)  # type: ignore[attr-defined]


def init_with_gloo(store: Any, rank: int, size: int, connecting: Any, kinds: Collection[str]) -> None:
    """Make a default process group of gloo, and of the usual backends for further kinds of devices. RuntimeError is
    raised if processes do not connect within a time."""
    others = {kind: dist.get_default_backend_for_device(kind) for kind in kinds if kind != "cpu"}
    backends = ",".join(["cpu:gloo", *(f"{kind}:{backend}" for kind, backend in others.items())]) if others else "gloo"
    try:
        dist.init_process_group(backends, store=store, rank=rank, world_size=size, timeout=connecting)
    except BaseException:  # the number of groups stays counted, and names keys: the next one would find no peer
        init_fake_group(size, rank)
        dist.destroy_process_group()
        raise
    for kind in ("cpu", *others):
        backend = dist.group.WORLD._get_backend(torch.device(kind))  # type: ignore[union-attr]
        backend._set_default_timeout(dist.default_pg_timeout)


@contextmanager
def simulated_world(size: int, rank: int) -> Iterator[None]:
    """A context in which this process is one rank of a simulated world of ``size`` ranks. Collectives move nothing. At
    the end, torch's caches of meshes are cleared."""
    init_fake_group(size, rank)
    try:
        yield
    finally:
        forget_meshes()
        dist.destroy_process_group()


def forget_meshes() -> None:
    """Clear DTensor's caches, whose keys are meshes: one with the same ranks as an old mesh would get its groups."""
    modules = [module for name, module in sys.modules.items() if name.startswith("torch.distributed.tensor")]
    for value in [value for module in modules for value in vars(module).values()]:
        if isinstance(value, functools._lru_cache_wrapper):
            value.cache_clear()
    if modules:  # what torch.distributed.tensor.debug does, which cannot be imported without numpy
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        torch._C._clear_DTensor_sharding_propagator_cache()


#: What ``DTensor`` calls to communicate.
FUNCTIONAL_COLLECTIVES: Any = torch.ops._c10d_functional


def written_by(operator: Any) -> list[int]:
    """The positions of the arguments that an operator writes."""
    arguments = operator._schema.arguments
    return [at for at, each in enumerate(arguments) if each.alias_info is not None and each.alias_info.is_write]


def process_groups() -> list[Any]:
    """The process groups of this process."""
    return list(dist.distributed_c10d._world.pg_map)


def collectives_seen(group: Any) -> int:
    """How many collectives a process group has begun."""
    seen: int = group._get_sequence_number_for_group()
    return seen


def checkpointed(module: torch.nn.Module) -> torch.nn.Module:
    """The module in torch's wrapper for activation checkpointing, which is not reentrant and keeps state-dict keys."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    wrapped: torch.nn.Module = checkpoint_wrapper(module)
    return wrapped
