"""Sharded training against the same training unsharded: losses, gradients and parameters, step by step.

The reference is a whole copy of the model on each rank, which sees the batches of all ranks and takes the mean of
their gradients: data parallelism as arithmetic, without communication. The same run is done with torch's own
`fully_shard` where it supports the case, so that a wrong test fails for both.

Every tensor is compared with one rule: the largest difference is at most `TOLERANCE` of the largest entry of the
reference. That is about eight roundings of fp32; what remains above zero is the order of sums over ranks.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils._python_dispatch import _disable_current_modes

import fullshard
from fullshard.testing import World

TOLERANCE = 1e-6
OURS = {"fullshard": fullshard}
LIBRARIES = {**OURS, "torch": torch.distributed.fsdp}
WRAPPER = "FullyShardedDataParallel"
#: The environment variable of the long lane, in which the same is done with torch's library too.
WITH_TORCH = "FULLSHARD_TESTS_WITH_TORCH"
Batch = tuple[Tensor, ...]
Call = Callable[..., Any]
"""The model as a loss sees it: something to call with the tensors of a batch."""
ShardFunction = Callable[[ModuleType, Any], object]
"""Shards a model with the library it is given, a module that has torch's names; returns the model if it is another."""


def mean_square(call: Call, batch: Batch) -> Tensor:
    """The loss of most cases: the mean square of what the model returns."""
    output: Tensor = call(*batch)
    return output.square().mean()


def each_block(*, precision: Precision | None = None, **options: Any) -> ShardFunction:
    """The usual way to shard: a group for each of `model.blocks` and one for the rest, all with the same options."""

    def shard(fsdp: ModuleType, model: Any) -> None:
        policy = {} if precision is None else {"mp_policy": precision.policy(fsdp)}
        for module in (*model.blocks, model):
            fsdp.fully_shard(module, **policy, **options)

    return shard


def sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum, so that a wrong gradient of one step is still seen in the next."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with an `eps` above most gradients; below it, even a rounding error would make a step of full size."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-2)


@dataclass(frozen=True)
class Precision:
    """A mixed-precision policy, which the reference follows with a low-precision copy of the model on each rank."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def policy(self, fsdp: ModuleType) -> Any:
        """The same as the policy of a library."""
        return fsdp.MixedPrecisionPolicy(**vars(self))


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training run, told in such a way that it can be done unsharded and with any library that has torch's names.

    `batch(seed)` makes one micro-batch. `set_up_micro(model, micro)` is called before each on a sharded model, and
    `around_micro(model, micro)` entered; `after_backward(model)` is called before each step of the optimizer on any,
    and what it returns is compared too.

    The reference divides the sum of the gradients of all ranks by `divisor`, or else by the number of data-parallel
    ranks, and rounds it to `mean_dtype`, or else to the dtype of the reduction. A parameter without a gradient on any
    rank has none, or zeros if `unused_are_zero` (for some of them: a function of the name). To say by hand what a
    policy does to single modules, the reference may have a model of its own, from `build_reference`.
    """

    build: Callable[[], nn.Module]
    shard: ShardFunction
    batch: Callable[[int], Batch]
    build_reference: Callable[[], nn.Module] | None = None
    loss: Callable[[Call, Batch], Tensor] = mean_square
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer] = sgd
    scaler: Callable[[], torch.amp.GradScaler] = lambda: torch.amp.GradScaler("cpu", enabled=False)
    precision: Precision = field(default_factory=Precision)
    steps: int = 3
    micro_batches: int = 1
    set_up_micro: Callable[[Any, int], object] = lambda model, micro: None
    around_micro: Callable[[Any, int], AbstractContextManager[object]] = lambda model, micro: nullcontext()
    after_backward: Callable[[nn.Module], Tensor | None] = lambda model: None
    divisor: float | None = None
    mean_dtype: torch.dtype | None = None
    unused_are_zero: bool | Callable[[str], bool] = False

    def micro(self, step: int, rank: int, size: int, micro: int) -> Batch:
        """The micro-batch of a rank, different from all others."""
        return self.batch((step * size + rank) * self.micro_batches + micro)


@dataclass(frozen=True)
class LocalShard:
    """What this rank holds of a DTensor: to compare it takes no communication, unlike the whole tensor."""

    local: Tensor
    shape: torch.Size
    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    def part_of(self, tensor: Tensor) -> Tensor:
        """The same part of a whole tensor: what `torch.chunk` gives to this rank along each dim of the mesh."""
        for at, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                chunks = tensor.chunk(self.mesh.size(at), placement.dim)
                here = self.mesh.get_local_rank(at)
                tensor = chunks[here] if here < len(chunks) else tensor.narrow(placement.dim, 0, 0)
        return tensor


@dataclass
class Step:
    """What one step left behind: this rank's losses, and gradients and parameters by name, whole or a part."""

    losses: list[Tensor]
    gradients: dict[str, Tensor | LocalShard | None]
    parameters: dict[str, Tensor | LocalShard]
    extra: Tensor | None


def compare(
    world: World,
    training: Training,
    *,
    with_torch: bool = True,
    data_parallel: tuple[int, int] | None = None,
) -> None:
    """Train unsharded, with fullshard, and (in the long lane, unless the case is beyond it) with torch; compare.

    A test that runs with each of our transports runs torch with the first only, because torch does not know them. A
    torch that has not yet what the case needs is left out.
    `data_parallel` is this rank's place among the ranks with different data and their number, if not the world's.
    """
    rank, size = data_parallel or (world.rank, world.size)
    reference = train_unsharded(training, rank, size)
    with_torch &= os.environ.get("FULLSHARD_TRANSPORT") in (None, "shm" if world.size > 1 else "p2p")
    with_torch &= WITH_TORCH in os.environ
    for name, fsdp in (LIBRARIES if with_torch else OURS).items():
        try:
            steps = train_sharded(training, fsdp, rank, size)
        except AttributeError as error:
            if fsdp is fullshard or not is_newer_than_torch(error):
                raise
            continue
        assert_equal_steps(steps, reference, name)


def is_newer_than_torch(error: AttributeError) -> bool:
    """Whether fullshard has a name of which this says that it is missing, and the installed torch has it not yet."""
    name = error.name or ""
    pairs = ((fullshard, torch.distributed.fsdp), (fullshard.FSDPModule, torch.distributed.fsdp.FSDPModule))
    return any(hasattr(ours, name) and not hasattr(theirs, name) for ours, theirs in pairs)


def train_sharded(training: Training, fsdp: ModuleType, rank: int, size: int) -> list[Step]:
    """Do the run with the module `fsdp`."""
    plain = training.build()
    model: Any = training.shard(fsdp, plain) or plain
    wrapper = getattr(fsdp, WRAPPER, ())
    is_wrapped = any(isinstance(module, wrapper) for module in model.modules())
    optimizer = (_WrapperOptimizer if is_wrapped else _Optimizer)(training, model, fsdp)
    for step in range(training.steps):
        losses = []
        for micro in range(training.micro_batches):
            training.set_up_micro(model, micro)
            with training.around_micro(model, micro):
                loss = training.loss(model, training.micro(step, rank, size, micro))
                optimizer.scaler.scale(loss).backward()
            losses.append(loss.detach())
        optimizer.step(losses)
    return optimizer.steps


@_disable_current_modes()
def train_unsharded(training: Training, rank: int, size: int) -> list[Step]:
    """Do the run with a whole model, for all ranks; the losses are those of `rank`."""
    model = (training.build_reference or training.build)()
    optimizer = _Optimizer(training, model)
    precision = training.precision
    zero = training.unused_are_zero if callable(training.unused_are_zero) else lambda name: training.unused_are_zero
    reduce_dtype = {
        name: precision.reduce_dtype or precision.param_dtype or parameter.dtype
        for name, parameter in model.named_parameters()
    }
    for step in range(training.steps):
        losses: list[Tensor] = []
        sums: dict[str, Tensor] = {}
        worker = _Worker(model, training.precision)
        for other in range(size):
            of_rank: dict[str, Tensor] = {}
            for micro in range(training.micro_batches):
                worker.begin()
                loss = training.loss(worker, training.micro(step, other, size, micro))
                optimizer.scaler.scale(loss).backward()
                losses += [loss.detach()] if other == rank else []
                _add(of_rank, worker.gradients())
            _add(sums, {name: gradient.to(reduce_dtype[name]) for name, gradient in of_rank.items()})
        for name, parameter in model.named_parameters():
            unused = 0 * parameter if zero(name) and parameter.requires_grad else None
            if (total := sums.get(name, unused)) is None:
                continue
            mean = total / (training.divisor or size)
            parameter.grad = mean.to(training.mean_dtype or reduce_dtype[name]).to(parameter.dtype)
        optimizer.step(losses)
    return optimizer.steps


def _add(sums: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
    """Sum up in double precision, so that what is rounded in the reference is rounded where a library rounds."""
    for name, gradient in gradients.items():
        sums[name] = sums.get(name, 0) + gradient.double()


class _Optimizer:
    """The end of each step, the same for both runs: unscale, look at everything, step."""

    def __init__(self, training: Training, model: nn.Module, fsdp: ModuleType | None = None) -> None:
        self.after_backward = training.after_backward
        self.model, self.fsdp = model, fsdp
        # The optimizer's parameters are read, whatever the model shows in their place at the end of a step.
        self.shown = dict(model.named_parameters())
        self.optimizer = training.optimizer(model.parameters())
        self.scaler = training.scaler()
        self.steps: list[Step] = []

    def step(self, losses: list[Tensor]) -> None:
        self.scaler.unscale_(self.optimizer)
        extra = self.after_backward(self.model)
        gradients = self.gradients()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.steps.append(Step(losses, gradients, self.parameters(), None if extra is None else whole(extra)))

    def gradients(self) -> dict[str, Tensor | LocalShard | None]:
        return {name: None if p.grad is None else kept(p.grad) for name, p in self.shown.items()}

    def parameters(self) -> dict[str, Tensor | LocalShard]:
        return {name: kept(parameter) for name, parameter in self.shown.items()}


class _WrapperOptimizer(_Optimizer):
    """The same for models in the wrapper, whose whole gradients and parameters `summon_full_params` shows."""

    fsdp: ModuleType

    def gradients(self) -> dict[str, Tensor | LocalShard | None]:
        return {**whole_gradients(self.fsdp, self.model)}

    def parameters(self) -> dict[str, Tensor | LocalShard]:
        return {**whole_parameters(self.fsdp, self.model)}


def whole_parameters(fsdp: ModuleType, model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters of a model with wrappers in it, whole and by the names that they have without them."""
    with getattr(fsdp, WRAPPER).summon_full_params(model, writeback=False):
        return {unwrapped(name): parameter.detach().clone() for name, parameter in model.named_parameters()}


def whole_gradients(fsdp: ModuleType, model: nn.Module) -> dict[str, Tensor | None]:
    """The same of gradients.

    Nothing shows the whole gradients of flat parameters. So they are put for a moment where the parameters are, NaN
    for none. What is shown of a frozen parameter among trained ones, torch's zeros, is nobody's gradient.
    """
    flat = [parameter for parameter in model.parameters() if isinstance(parameter, fsdp.FlatParameter)]
    if flat:
        values = [parameter.detach().clone() for parameter in flat]
        for parameter in flat:
            parameter.data.copy_(torch.tensor(torch.nan) if parameter.grad is None else parameter.grad)
        found = whole_parameters(fsdp, model)
        for parameter, value in zip(flat, values, strict=True):
            parameter.data.copy_(value)
        own = {unwrapped(name): p.grad for name, p in model.named_parameters() if not isinstance(p, fsdp.FlatParameter)}
        return {name: None if value.isnan().all() else value for name, value in found.items()} | own
    with getattr(fsdp, WRAPPER).summon_full_params(model, writeback=False, with_grads=True):
        trained = {unwrapped(name): p.grad if p.requires_grad else None for name, p in model.named_parameters()}
        return {name: gradient if gradient is None else gradient.clone() for name, gradient in trained.items()}


def unwrapped(name: str) -> str:
    """The name of a parameter or buffer without those of the wrappers around its module."""
    return name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")


class _Worker:
    """A copy of the model as one rank computes with it: low-precision parameters, and casts at the boundary.

    It serves all ranks in turn, and all micro-batches of a step.
    """

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        self.model = copy.deepcopy(model)
        self.precision = precision
        self.buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        if precision.param_dtype is not None:
            for parameter in self.model.parameters():
                parameter.data = parameter.data.to(precision.param_dtype)

    def begin(self) -> None:
        """Forget what the last micro-batch left."""
        for parameter in self.model.parameters():
            parameter.grad = None
        with torch.no_grad():
            for buffer, value in self.buffers:
                buffer.copy_(value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, *batch: Tensor) -> Any:
        precision = self.precision
        inputs = precision.param_dtype if precision.cast_forward_inputs else None
        output = self.model(*(x.to(inputs) if x.is_floating_point() else x for x in batch))
        return output if precision.output_dtype is None else output.to(precision.output_dtype)

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}


def whole(tensor: Tensor) -> Tensor:
    """A copy of a tensor with all its rows; all ranks of its mesh have to call this."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def kept(tensor: Tensor) -> Tensor | LocalShard:
    """A copy of what this rank holds of a tensor. Beside tensor parallelism, of all of it."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor) or any(type(each) not in (Shard, Replicate) for each in tensor.placements):
        return whole(tensor)
    return LocalShard(tensor.to_local().clone(), tensor.shape, tensor.device_mesh, tuple(tensor.placements))


def assert_equal_steps(steps: Sequence[Step], reference: Sequence[Step], subject: str) -> None:
    """Fail with every tensor that differs, in the first step in which one does."""
    if difference := first_difference(steps, reference):
        raise AssertionError(f"{subject} differs from unsharded training in {difference}")


@_disable_current_modes()
def first_difference(steps: Sequence[Step], reference: Sequence[Step]) -> str | None:
    """Every tensor that differs in the first step in which one does, or None."""
    for number, (step, expected) in enumerate(zip(steps, reference, strict=True)):
        problems = [
            *_differences("loss", dict(enumerate(step.losses)), dict(enumerate(expected.losses))),
            *_differences("result of after_backward", {"": step.extra}, {"": expected.extra}),
            *_differences("gradient", step.gradients, expected.gradients),
            *_differences("parameter", step.parameters, expected.parameters),
        ]
        if problems:
            return f"step {number}:\n  " + "\n  ".join(problems)
    return None


def _differences(
    kind: str, found: Mapping[Any, Tensor | LocalShard | None], expected: Mapping[Any, Tensor | LocalShard | None]
) -> Iterator[str]:
    """Compare what was found, whole tensors or parts of them, with whole tensors."""
    if list(found) != list(expected):
        yield f"{kind}s of {list(found)} instead of {list(expected)}"
        return
    for name, tensor in found.items():
        other = expected[name]
        assert not isinstance(other, LocalShard)
        if isinstance(tensor, LocalShard) and other is not None:
            if tensor.shape != other.shape:
                yield f"{kind} {name}: a tensor of {list(tensor.shape)} instead of {list(other.shape)}"
                continue
            tensor, other, largest = tensor.local, tensor.part_of(other), other
        else:
            largest = other
        if tensor is None or other is None:
            if tensor is not other:
                yield f"{kind} {name}: {'None' if tensor is None else 'a tensor'} instead of " + (
                    "None" if other is None else "a tensor"
                )
        elif (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
            found_here, wanted = (f"{x.dtype} of {list(x.shape)}" for x in (tensor, other))
            yield f"{kind} {name}: {found_here} instead of {wanted}"
        elif not (error := deviation(tensor, other, largest)) <= TOLERANCE:
            yield f"{kind} {name}: off by {error:.2e} of its largest entry (allowed: {TOLERANCE:.0e})"


def deviation(tensor: Tensor, reference: Tensor, whole_reference: Tensor | None = None) -> float:
    """The largest difference of two tensors as a fraction of the largest entry of the second, or of the whole of which
    it is a part; NaN if either has one."""
    tensor = tensor.to(reference.device)
    if torch.equal(tensor, reference):
        return 0.0
    difference = (tensor.double() - reference.double()).abs()
    if not difference.any():
        return 0.0
    largest = reference if whole_reference is None else whole_reference
    return (difference.max() / largest.double().abs().max()).item()
