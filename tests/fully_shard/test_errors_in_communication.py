"""Errors while communication starts or ends: nothing stays taken, and training goes on as if the step had not been."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

import fullshard
from fullshard.buffer.slots import SHARED
from fullshard.group.full_buffer import State
from tests.fully_shard.cases import assert_close, groups_of, inputs, local, slots_in_use
from tests.fully_shard.test_communication import CountingAllGather, CountingReduceScatter
from tests.group.test_extension import Gathered, Kept, build
from tests.harness import World, ranks
from tests.harness.compare import each_block
from tests.harness.faults import Fault, When, failing
from tests.harness.models import MLP, seeded, shard_each
from tests.harness.wrapper import wrap_blocks


class Training:
    """A sharded model and a whole one, which take the same steps of SGD on one batch for all ranks."""

    def __init__(self, model: Any, reference: nn.Module) -> None:
        self.model, self.reference, self.steps = model, reference, 0
        self.leased = _leased()

    def step(self) -> None:
        """A step of both, before which their losses have to be equal, and after which nothing is in use."""
        self.steps += 1
        found, expected = (self._step(each, self.steps) for each in (self.model, self.reference))
        assert_close(found, expected, f"loss of step {self.steps}")

    def failed_step(self) -> bool:
        """A step of the sharded model that is given up if a user's error ends it; returns whether one did."""
        try:
            self._step(self.model, 99, lr=0.0)
        except Fault:
            for parameter in self.model.parameters():
                parameter.grad = None
            if hasattr(self.model, "reset_iter_state"):
                self.model.reset_iter_state()
                self.check_is_idle()
            return True
        return False

    def check_is_idle(self) -> None:
        """Nothing that a gather or a reduction takes is in use."""
        for group in groups_of(self.model):
            assert group.full.state is State.SHARDED, group
            for pool in group.comm.pools.values():
                assert slots_in_use(pool) == 0, group
        assert _leased() == self.leased, "staging was not given back"

    @staticmethod
    def _step(model: Any, seed: int, lr: float = 0.1) -> Tensor:
        loss: Tensor = model(inputs(seed)).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    held(parameter).sub_(lr * held(parameter.grad))
                    parameter.grad = None
        return loss.detach()


def _leased() -> int:
    """Buffers of staging that exchanges have now."""
    return SHARED._made - sum(map(len, SHARED.free.values()))


def held(tensor: Any) -> Tensor:
    mine = local(tensor)
    return mine.held if isinstance(mine, Gathered) else mine


def build_small() -> Any:
    return seeded(lambda: MLP((6, 7, 5)))


def small(**options: Any) -> Any:
    model = build_small()
    each_block(**options)(fullshard, model)
    return model


def extended() -> Any:
    model = build(Kept)
    shard_each(model[0], model[2], model)
    return model


def resting() -> Any:
    return small(reshard_after_forward=2)


def in_double() -> Any:
    policy = fullshard.MixedPrecisionPolicy(param_dtype=torch.float64, output_dtype=torch.float32)
    return small(mp_policy=policy)


def custom() -> Any:
    model = small()
    for module in (model, *model.blocks):
        module.set_custom_all_gather(CountingAllGather())
        module.set_custom_reduce_scatter(CountingReduceScatter())
    return model


def wrapped(**options: Any) -> Any:
    return wrap_blocks(**options)(fullshard, build_small())


MODELS: dict[str, Callable[[], Any]] = {
    "fully_shard": small,
    "double": in_double,
    "resting": resting,
    "custom": custom,
    "extended": extended,
    "original": wrapped,
    "flat": lambda: wrapped(original=False),
}
#: The transports of the quick lane, and the others.
QUICK = {"double": "p2p"}
CASES = [
    pytest.param(kind, transport, marks=[] if transport == QUICK.get(kind) else pytest.mark.slow)
    for kind in MODELS
    for transport in ("shm", "p2p", "collective")
]
#: Each step of a gather, and of a reduction, in which something may raise.
POINTS: dict[str, tuple[str, When]] = {
    "a slot is made": ("fullshard.buffer.slots:SlotPool.make", "before"),
    "a slot is taken": ("fullshard.buffer.slots:SlotBuffer.take", "before"),
    "the shard is staged": ("fullshard.group.source:StagedSource.start", "before"),
    "the shard was staged": ("fullshard.group.source:StagedSource.start", "after"),
    "a route is made": ("fullshard.comm.transport:Transport.gather_route", "before"),
    "staging is leased": ("fullshard.buffer.slots:Staging.lease", "before"),
    "collectives are bound": ("fullshard.comm.collective:_CollectiveRoute._bind", "before"),
    "a collective starts": ("fullshard.comm.collective:_CollectiveRoute.start", "before"),
    "a user's all-gather allocates": ("tests.fully_shard.test_communication:CountingAllGather.allocate", "before"),
    "a user's all-gather starts": ("tests.fully_shard.test_communication:CountingAllGather.__call__", "before"),
    "a user's reduction starts": ("tests.fully_shard.test_communication:CountingReduceScatter.__call__", "before"),
    "a collective has ended": ("fullshard.comm.collective:_PendingCollectives.finish", "after"),
    "messages have arrived": ("fullshard.comm.point_to_point:_Exchange.finish", "after"),
    "a subclass says what travels": ("tests.group.test_extension:Kept.fsdp_pre_all_gather", "before"),
    "a subclass makes a parameter": ("tests.group.test_extension:Kept.fsdp_post_all_gather", "before"),
    "an extension has arrived": ("fullshard.group.extension:_Extended.finish", "after"),
    "an extension starts": ("fullshard.group.extension:_Extended.start", "before"),
    "leaves are made": ("fullshard.group.full_buffer:FullBuffer._make_leaves", "before"),
    "leaves are known": ("fullshard.group.full_buffer:register", "before"),
    "values have arrived": ("fullshard.group.full_buffer:FullBuffer.wait_for_gather", "before"),
    "a reduction is planned": ("fullshard.group.reduction:Reducer.plan", "before"),
    "a reduction starts": ("fullshard.group.reduction:PendingReduction.start", "before"),
    "a reduction has ended": ("fullshard.group.reduction:PendingReduction.accumulate", "before"),
}


@ranks(2)
@pytest.mark.parametrize(("kind", "transport"), CASES)
def test_training_goes_on_after_an_error_at_any_point_of_communication(world: World, kind: str, transport: str) -> None:
    """On all ranks alike. Each point fails at its first call, in another step at its second, and so on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_TRANSPORT", transport)
        for what, (where, when) in POINTS.items():
            training = Training(MODELS[kind](), build(None) if kind == "extended" else build_small())
            for call in range(1, 40):
                with failing(where, call, when):
                    failed = training.failed_step()
                try:
                    training.step()
                except Exception as error:
                    error.add_note(f"after an error where {what}, call {call}")
                    raise
                if not failed:
                    break


class FailingWork:
    def wait(self) -> None:
        raise RuntimeError("of a user")


def fail(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("of a user")


def with_failing_all_gather(world: World) -> Any:
    model = custom()
    CountingAllGather.__call__ = lambda *args, **kwargs: FailingWork()  # type: ignore[method-assign]
    return model


def with_failing_comm_hook(world: World) -> Any:
    model = wrapped(strategy="NO_SHARD")
    model.register_comm_hook(None, fail)
    return model


def with_failing_all_reduce_hook(world: World) -> Any:
    model = small(mesh=world.mesh(2, 1, names=("replicate", "shard")))
    model.set_all_reduce_hook(fail)
    return model


@ranks(2)
@pytest.mark.parametrize("build", [with_failing_all_gather, with_failing_comm_hook, with_failing_all_reduce_hook])
def test_an_error_of_a_users_function_is_not_taken_for_a_lost_rank(world: World, build: Callable[..., Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CountingAllGather, "__call__", CountingAllGather.__call__)  # put back at the end
        model = build(world)
        with pytest.raises(RuntimeError, match=r"^of a user$") as raised:
            model(inputs()).sum().backward()
    assert type(raised.value) is RuntimeError
    assert str(raised.traceback[-1].path) == __file__


@ranks(2)
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, NotImplementedError])
def test_an_error_of_redistribute_is_not_taken_for_a_lost_rank(world: World, error: type[Exception]) -> None:
    """A model whose gradients must be redistributed over the mesh of tensor parallel."""
    mesh = world.mesh(1, 2, names=("data", "tensor"))
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tensor"], [Replicate()]))
    model.bias = nn.Parameter(distribute_tensor(model.bias.detach(), mesh["tensor"], [Replicate()]))
    fullshard.fully_shard(model, mesh=mesh["data"])
    (group,) = groups_of(model)
    partial = DTensor.from_local(torch.ones(4, 4), mesh["tensor"], [Partial()])

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error("no")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "redistribute", fail)
        with pytest.raises(error, match=r"^no$") as raised:
            group.params[0].local_gradient(partial)
    assert type(raised.value) is error
