"""What programs do to wrapped models between forward, backward and step: it is seen, by all ranks alike."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard.group.full_buffer import RELEASED, State
from tests.fully_shard.cases import environment, first_of, groups_of, inputs
from tests.harness import World, fake_world, ranks
from tests.harness.compare import Precision, deviation, whole_gradients
from tests.harness.faults import FailingBackward, Fault
from tests.harness.models import MLP, seeded
from tests.harness.wrapper import ORIGINAL, SHARDED, STRATEGIES, wrap_blocks


def wrapped(strategy: str, original: bool, transport: str = "p2p", build: Any = MLP) -> Any:
    with environment(FULLSHARD_TRANSPORT=transport):
        return wrap_blocks(strategy=strategy, original=original)(fullshard, seeded(build))


@ranks(2)
@first_of("original", True, False)
@first_of("transport", "shm", "p2p", "collective", quick=2)
def test_writes_through_data_between_evaluations_are_seen(world: World, original: bool, transport: str) -> None:
    """As of an average of another model, which is never trained."""
    for strategy in STRATEGIES:
        model, plain = wrapped(strategy, original, transport), seeded(MLP)
        with torch.no_grad():
            for seed in range(3):
                assert deviation(model(inputs(seed)), plain(inputs(seed))) < 1e-6, strategy
                for parameter in (*model.parameters(), *plain.parameters()):
                    parameter.data.mul_(1.5)


class Uneven(nn.Module):
    """Of four ranks most have nothing of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList((nn.Linear(6, 5), nn.Linear(5, 1)))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.slow
@ranks(4)
@first_of("original", False, True)
@first_of("transport", "shm", "p2p", "collective")
def test_all_ranks_see_writes_to_what_only_some_of_them_have(world: World, original: bool, transport: str) -> None:
    for strategy, grad in itertools.product(STRATEGIES, (True, False)):
        model, plain = wrapped(strategy, original, transport, Uneven), seeded(Uneven)
        parameters = list(model.parameters())
        for seed in range(2):
            with torch.set_grad_enabled(grad):  # a forward without a backward
                assert deviation(model(inputs(seed)), plain(inputs(seed))) < 1e-6, strategy
            with torch.no_grad():
                for parameter in (*parameters, *plain.parameters()):
                    if parameter.numel():
                        parameter.mul_(1.5)


@ranks(2)
@first_of("strategy", *STRATEGIES)
@pytest.mark.parametrize("to_none", [True, False])
def test_an_optimizer_clears_what_waits_of_its_own_parameters_only(world: World, strategy: str, to_none: bool) -> None:
    model, plain = wrapped(strategy, True), seeded(MLP)

    def weights(of: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([each for name, each in of.named_parameters() if "weight" in name], lr=0.1)

    clears, expected = weights(model), weights(plain)
    with model.no_sync():
        model(inputs(world.rank)).square().mean().backward()
    clears.zero_grad(to_none)
    model(inputs(10 + world.rank)).square().mean().backward()
    for first in (0, 10):
        sum(plain(inputs(first + rank)).square().mean() / world.size for rank in range(world.size)).backward()
        if first == 0:
            expected.zero_grad(to_none)
    found = whole_gradients(fullshard, model)
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        assert found[name] is not None
        assert deviation(found[name], parameter.grad) < 1e-6, name


HALF = Precision(torch.bfloat16, torch.float32)


def evaluate(model: Any) -> None:
    model.eval()
    with torch.no_grad():
        assert model(inputs(0)).dtype == torch.float32
    model.train()


@ranks(2)
@ORIGINAL
@first_of("strategy", *STRATEGIES)
@first_of("transport", "shm", "p2p")
def test_gradients_that_wait_outlive_an_evaluation_in_full_precision(
    world: World, strategy: str, original: bool, transport: str
) -> None:
    found = []
    with environment(FULLSHARD_TRANSPORT=transport, FSDP_USE_FULL_PREC_IN_EVAL="1"):
        for evaluates in (False, True):
            model = wrap_blocks(strategy=strategy, original=original, precision=HALF)(fullshard, seeded(MLP))
            with model.no_sync():
                model(inputs(world.rank)).float().square().mean().backward()
            if evaluates:
                evaluate(model)
            model(inputs(10 + world.rank)).float().square().mean().backward()
            found.append(whole_gradients(fullshard, model))
    without, within = found
    for name, gradient in without.items():
        assert gradient is not None
        torch.testing.assert_close(within[name], gradient, rtol=0, atol=0)
    model(inputs(0)).float().mean().backward()
    for group in groups_of(model):  # nothing is kept of the leaves before
        assert all(map(operator.is_, group.gradients.buffer.leaves, [param.unsharded for param in group.params]))


@ranks(2)
def test_an_evaluation_in_full_precision_between_forward_and_backward_is_refused(world: World) -> None:
    with environment(FSDP_USE_FULL_PREC_IN_EVAL="1"):
        model = wrap_blocks(precision=HALF)(fullshard, seeded(MLP))
        loss = model(inputs(0)).float().mean()
        evaluate(model)
        with pytest.raises(RuntimeError, match=f"is at version {RELEASED}"):  # the guide has this number
            loss.backward()
        model(inputs(1)).float().mean().backward()
        assert all(gradient is not None for gradient in whole_gradients(fullshard, model).values())


@ranks(2)
@ORIGINAL
@pytest.mark.parametrize("strategy", SHARDED)
def test_a_gradient_that_waited_comes_home_in_its_own_dtype(world: World, strategy: str, original: bool) -> None:
    """What was shown meanwhile is of the parameter's."""
    options: dict[str, Any] = {"precision": Precision(torch.bfloat16), "flags": {"keep_low_precision_grads": True}}
    model = wrap_blocks(strategy=strategy, original=original, **options)(fullshard, seeded(MLP))
    with model.no_sync():
        model(inputs(world.rank)).float().mean().backward()
    assert {each.grad.dtype for each in model.parameters()} == {torch.float32}
    model(inputs(world.rank)).float().mean().backward()
    assert {each.grad.dtype for each in model.parameters() if each.grad is not None} == {torch.bfloat16}


@pytest.mark.parametrize("api", ["wrapper", "fully_shard"])
def test_a_module_that_ran_alone_before_reshards_inside_of_another(api: str) -> None:
    shard: Any = fullshard.FullyShardedDataParallel if api == "wrapper" else fullshard.fully_shard
    with fake_world(2):
        inner = shard(nn.Linear(6, 6))
        inner(inputs(0))
        outer = shard(nn.Sequential(inner, nn.Linear(6, 6)))
        outer(inputs(0))
        group = inner._unit.groups[0] if api == "wrapper" else groups_of(inner)[0]
        assert group.full.state is State.SHARDED


def fail(*_: object) -> None:
    raise Fault


def fail_in(where: str, model: Any) -> None:
    if where == "forward":
        hook = model.module.register_forward_hook(fail)
    else:
        hook = model.module.blocks[2].register_forward_hook(lambda *given: FailingBackward.apply(given[2]))
    with pytest.raises(Fault):
        model(inputs()).sum().backward()
    hook.remove()


@ranks(2)
@ORIGINAL
@first_of("strategy", *STRATEGIES)
@first_of("transport", "shm", "p2p")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_model_is_saved_after_an_error_in_a_step(
    world: World, strategy: str, original: bool, transport: str, where: str
) -> None:
    model, plain = wrapped(strategy, original, transport), seeded(MLP)
    for use in ("state_dict", "load_state_dict", "summon_full_params", "apply"):
        fail_in(where, model)
        if use == "state_dict":
            saved = model.state_dict()
            assert all(torch.equal(saved[name], value) for name, value in plain.state_dict().items())
        elif use == "load_state_dict":
            model.load_state_dict(plain.state_dict())
        elif use == "apply":
            model.apply(lambda module: None)
        else:
            with model.summon_full_params(model):
                assert all(map(torch.equal, model.parameters(), plain.parameters()))
        model.zero_grad()
        model(inputs(1)).square().mean().backward()
        plain.zero_grad()
        plain(inputs(1)).square().mean().backward()
        found = whole_gradients(fullshard, model)
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            assert found[name] is not None
            assert deviation(found[name], parameter.grad) < 1e-6, name
