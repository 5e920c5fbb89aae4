"""Parity with wires: sharded training against the same training unsharded that encodes what ranks would send.

The reference knows no layouts and no messages. It cuts tensors as ``torch.chunk`` does, and takes from the library only
the encodings, which tests/test_encodings.py proves. What two ranks add up is then equal to the last bit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import fullshard
from fullshard import WirePolicy
from fullshard.encodings import Encoding, encoding
from fullshard.group.parameter import local_tensor
from fullshard.optim import ShardedGradScaler
from fullshard.wire_policy import EncodingName
from tests.harness import World, ranks
from tests.harness.compare import (
    Precision,
    Training,
    _Optimizer,
    _Worker,
    adamw,
    assert_equal_steps,
    each_block,
    train_sharded,
)
from tests.harness.models import MLP, Branches, OddParameters, random_batch, seeded
from tests.harness.slow import slow, some

EXACT = WirePolicy()
INT8 = WirePolicy(gather="int8", reduce="int8", block=16, min_numel=30)
POLICIES = {
    "bf16": WirePolicy(gather="bf16", reduce="bf16", block=8, min_numel=0),
    "fp8": WirePolicy(gather="fp8", reduce="fp8", block=32, min_numel=0),
    "int8": INT8,
    "int4": WirePolicy(gather="int4", reduce="int4", block=8, min_numel=0),
    "without feedback": WirePolicy(reduce="int8", block=16, error_feedback=False, min_numel=0),
    "gathers alone": WirePolicy(gather="int8", block=16, min_numel=0),
}
LAST = 2
#: Each test has its own choice of a transport: of those without shared memory, in which nothing is encoded.
on_ranks = partial(ranks, transport="p2p")
each_transport = pytest.mark.parametrize("transport", ["p2p", *slow("collective")])
#: Policies and cases of the quick lane.
QUICK = ("int8", "without feedback", "stage 1", "micro-batches", "unused")


class ReferenceWire:
    """Parts of tensors, as they arrive: ``size`` of each, cut along the first dim."""

    def __init__(self, policy: WirePolicy, size: int) -> None:
        self.policy, self.size = policy, size
        self.lost: dict[object, Tensor] = {}

    def _encoding(self, name: EncodingName, part: Tensor, numel: int) -> Encoding | None:
        """The encoding of a part of a parameter with ``numel`` elements, if it does not travel as it is."""
        of = encoding(name, self.policy.block)
        is_large = self.size > 1 and numel >= self.policy.min_numel
        return of if of is not None and is_large and of.saves(part.dtype) else None

    def _through(self, of: Encoding, part: Tensor) -> Tensor:
        """A part as it arrives. The last block is filled up with its last number."""
        values = part.float().reshape(-1)
        values = torch.cat([values, values[-1:].expand(-len(values) % of.block)])
        out = values.new_zeros(of.nbytes(len(values)), dtype=torch.uint8)
        of.encode(values, out, values)
        decoded, factor = of.decode(out, len(values))
        return (decoded * factor)[: part.numel()].view(part.shape)

    def gathered(self, tensor: Tensor, numel: int) -> Tensor:
        if tensor.ndim == 0:
            return tensor
        parts = [(self._encoding(self.policy.gather, part, numel), part) for part in tensor.chunk(self.size)]
        return torch.cat([part if of is None else self._through(of, part).to(part.dtype) for of, part in parts])

    def summed(self, name: str, of_ranks: list[Tensor], divisor: float, numel: int) -> Tensor:
        """The sum of the tensors of ``size`` ranks, each part in fp32 on the rank that owns it."""
        if of_ranks[0].ndim == 0:
            return torch.stack(of_ranks).float().sum(0) / divisor
        parts = list[Tensor]()
        cut = [tensor.chunk(self.size) for tensor in of_ranks]
        for owner in range(len(cut[0])):
            total = cut[owner][owner].float()
            for rank in range(self.size):
                if rank != owner:
                    total = total + self._sent((name, owner, rank), cut[rank][owner], numel)
            parts.append(total / divisor)
        return torch.cat(parts)

    def _sent(self, key: object, part: Tensor, numel: int) -> Tensor:
        of = self._encoding(self.policy.reduce, part, numel)
        if of is None:
            return part.float()
        given = part.float() + self.lost.get(key, 0)
        found = self._through(of, given)
        if self.policy.error_feedback:
            self.lost[key] = (given - found).bfloat16()
        return found


@_disable_current_modes()
def train_with_wires(
    training: Training, rank: int, size: int, inner: WirePolicy, outer: WirePolicy = EXACT, replicas: int = 1
) -> list[Any]:
    """Training for all ranks at once. Replicas cut their shards again if there are several."""
    model = training.build()
    optimizer, precision = _Optimizer(training, model), training.precision
    shards = size // replicas
    wire, outer_wire = ReferenceWire(inner, shards), ReferenceWire(outer, replicas)
    for step in range(training.steps):
        worker, losses = _Worker(model, precision), list[Tensor]()
        for param in worker.model.parameters():
            whole = param.data
            if replicas > 1 and whole.ndim:
                whole = torch.cat([outer_wire.gathered(part, param.numel()) for part in whole.chunk(shards)])
            param.data = wire.gathered(whole, param.numel())
        of_ranks = list[dict[str, Tensor]]()
        for other in range(size):
            sums = dict[str, Tensor]()
            for micro in range(training.micro_batches):
                worker.begin()
                loss = training.loss(worker, training.micro(step, other, size, micro))
                optimizer.scaler.scale(loss).backward()
                losses += [loss.detach()] if other == rank else []
                for name, gradient in worker.gradients().items():
                    travels = gradient.to(precision.reduce_dtype or gradient.dtype)
                    sums[name] = sums[name] + travels if name in sums else travels
            of_ranks.append(sums)
        for name, param in model.named_parameters():
            if name not in of_ranks[0]:
                continue
            totals = [
                wire.summed(f"{name} of replica {first}", [each[name] for each in of_replica], size, param.numel())
                for first in range(0, size, shards)
                if (of_replica := of_ranks[first : first + shards])
            ]
            if replicas == 1:
                (total,) = totals
            elif not param.ndim:
                total = torch.stack(totals).sum(0)
            else:
                cut = zip(*(each.chunk(shards) for each in totals), strict=True)
                total = torch.cat(
                    [outer_wire.summed(f"{name} {at}", [*each], 1, param.numel()) for at, each in enumerate(cut)]
                )
            param.grad = total.to(param.dtype)
        before = optimizer.scaler.get_scale()
        optimizer.step(losses)
        factor = optimizer.scaler.get_scale() / before
        for each in (wire, outer_wire):  # a step was skipped if the scale is smaller
            each.lost = {key: lost * factor for key, lost in each.lost.items() if factor >= 1}
    return optimizer.steps


def training_of(
    policy: WirePolicy, precision: Precision | None = None, options: dict[str, Any] | None = None, **changes: Any
) -> Training:
    defaults: dict[str, Any] = {
        "build": lambda: seeded(MLP),
        "shard": each_block(precision=precision, wire_policy=policy, **(options or {})),
        "batch": random_batch(4, 6),
        "precision": precision or Precision(),
    }
    return Training(**{**defaults, **changes})


def check(world: World, transport: str, policy: WirePolicy, **changes: Any) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = transport
    training = training_of(policy, **changes)
    found = train_sharded(training, fullshard, world.rank, world.size)
    assert_equal_steps(found, train_with_wires(training, world.rank, world.size, policy), f"{transport} {policy}")


@on_ranks(2, 3)
@pytest.mark.parametrize("transport", ["p2p", "collective"])
@pytest.mark.parametrize("name", some(POLICIES, QUICK))
def test_training_is_the_same_as_with_what_arrives(world: World, transport: str, name: str) -> None:
    check(world, transport, POLICIES[name])


def with_a_frozen_block() -> MLP:
    model = seeded(MLP)
    model.blocks[1].requires_grad_(False)
    return model


def branches(seed: int) -> tuple[Tensor, Tensor]:
    """A batch that uses one branch in even steps and the other in odd ones, on both ranks."""
    (x,) = random_batch(4, 6)(seed)
    return x, torch.tensor([seed // 2 % 2, 1 - seed // 2 % 2])


CASES: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"options": {"zero_stage": stage}, "optimizer": adamw} for stage in (1, 2)},
    "micro-batches": {
        "micro_batches": LAST + 1,
        "set_up_micro": lambda model, micro: model.set_requires_gradient_sync(micro == LAST),
    },
    "offloaded": {"options": {"offload_policy": fullshard.CPUOffloadPolicy()}},
    "scalars and gaps": {"build": lambda: seeded(lambda: OddParameters(non_contiguous=False))},
    "frozen": {"build": with_a_frozen_block},
    "unused": {"build": lambda: seeded(Branches), "batch": branches, "steps": 4},
}


@on_ranks(2)
@each_transport
@pytest.mark.parametrize("case", some(CASES, QUICK))
def test_ways_to_train(world: World, transport: str, case: str) -> None:
    check(world, transport, INT8, **CASES[case])


@on_ranks(2)
@each_transport
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["int8", *slow("fp8")])
def test_mixed_precision(world: World, transport: str, reduce_dtype: torch.dtype, name: str) -> None:
    check(world, transport, POLICIES[name], precision=Precision(torch.bfloat16, reduce_dtype))


def overflowing(call: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """A loss whose gradients are infinite or NaN on the first rank of two in the second step."""
    loss: Tensor = call(batch[0]).square().mean()
    return loss + (loss - loss.detach()).sqrt() if int(batch[1]) == 2 else loss


def without_infinities(model: torch.nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            local_tensor(param.grad).nan_to_num_(0.0, 0.0, 0.0)


@on_ranks(2)
@each_transport
@pytest.mark.parametrize("name", ["int8", *slow("bf16", "int4")])
def test_a_step_that_a_scaler_skips_leaves_nothing_and_the_scale_is_followed(
    world: World, transport: str, name: str
) -> None:
    steps = {
        "loss": overflowing,
        "batch": lambda seed: (*random_batch(4, 6)(seed), torch.tensor(seed)),
        "steps": 4,
        "after_backward": without_infinities,
    }
    check(world, transport, POLICIES[name], scaler=scaler, **steps)


def scaler() -> ShardedGradScaler:
    return ShardedGradScaler("cpu", init_scale=8.0, growth_interval=1)


@pytest.mark.slow
@on_ranks(4)
@each_transport
@pytest.mark.parametrize("stage", [3, *slow(1)])
@pytest.mark.parametrize("outer", ["int8", *slow("exact")])
def test_replicas_that_shard(world: World, transport: str, stage: int, outer: str) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = transport
    outer_wire = {"exact": EXACT, "int8": WirePolicy(gather="int8", reduce="int8", block=8, min_numel=0)}[outer]
    mesh = world.mesh(2, 2, names=("replicate", "shard"))
    options = {"mesh": mesh, "zero_stage": stage, "outer_zero_stage": 1, "outer_wire_policy": outer_wire}
    training = training_of(INT8, options=options)
    found = train_sharded(training, fullshard, world.rank, world.size)
    assert_equal_steps(found, train_with_wires(training, world.rank, 4, INT8, outer_wire, 2), transport)


@on_ranks(4)
@each_transport
def test_replicas_add_up_what_arrives(world: World, transport: str) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = transport
    mesh = world.mesh(2, 2, names=("replicate", "shard"))
    training = training_of(INT8, options={"mesh": mesh})
    found = train_sharded(training, fullshard, world.rank, world.size)
    assert_equal_steps(found, train_with_wires(training, world.rank, 4, INT8, EXACT, 2), transport)


def parameters(world: World, policy: WirePolicy) -> Iterator[Tensor]:
    training = training_of(policy)
    for step in train_sharded(training, fullshard, world.rank, world.size):
        yield from step.losses
        for values in step.parameters.values():
            yield values if isinstance(values, Tensor) else values.local


@pytest.mark.slow
@on_ranks(2, 3)
@each_transport
def test_what_travels_as_it_is_stays_the_same_to_the_last_bit(world: World, transport: str) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = transport
    plain = [*parameters(world, EXACT)]
    tolerance = 1e-6 if world.size > 2 and transport == "collective" else 0.0  # gloo adds up in an order of its own
    for policy in (WirePolicy(min_numel=0), WirePolicy(gather="int4", reduce="int4", min_numel=10**6)):
        found = [*parameters(world, policy)]
        torch.testing.assert_close(found, plain, rtol=tolerance, atol=tolerance, msg=str(policy))
