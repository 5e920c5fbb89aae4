"""What programs do to wrapped models between forward, backward and step: it is seen, by all ranks alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard.group.full_buffer import RELEASED, State
from tests.fully_shard.cases import groups_of
from tests.harness import World, fake_world, ranks
from tests.harness.compare import Precision, deviation, whole_gradients
from tests.harness.models import MLP, seeded
from tests.harness.wrapper import ORIGINAL, SHARDED, STRATEGIES, wrap_blocks

TRANSPORT = pytest.mark.parametrize("transport", ["shm", "p2p", "collective"])
STRATEGY = pytest.mark.parametrize("strategy", STRATEGIES)


def batch(seed: int) -> Tensor:
    return torch.randn((4, 6), generator=torch.Generator().manual_seed(seed))


def wrapped(strategy: str, original: bool, transport: str = "p2p") -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_TRANSPORT", transport)
        return wrap_blocks(strategy=strategy, original=original)(fullshard, seeded(MLP))


@ranks(2)
@ORIGINAL
@STRATEGY
@TRANSPORT
def test_writes_through_data_between_evaluations_are_seen(
    world: World, strategy: str, original: bool, transport: str
) -> None:
    """As of an average of another model, which is never trained."""
    model, plain = wrapped(strategy, original, transport), seeded(MLP)
    with torch.no_grad():
        for seed in range(3):
            assert deviation(model(batch(seed)), plain(batch(seed))) < 1e-6
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


@ranks(4)
@ORIGINAL
@STRATEGY
@TRANSPORT
@pytest.mark.parametrize("grad", [True, False])
def test_all_ranks_see_writes_to_what_only_some_of_them_have(
    world: World, strategy: str, original: bool, transport: str, grad: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_TRANSPORT", transport)
        model = wrap_blocks(strategy=strategy, original=original)(fullshard, seeded(Uneven))
    plain = seeded(Uneven)
    parameters = list(model.parameters())
    for seed in range(2):
        with torch.set_grad_enabled(grad):  # a forward without a backward
            assert deviation(model(batch(seed)), plain(batch(seed))) < 1e-6
        with torch.no_grad():
            for parameter in (*parameters, *plain.parameters()):
                if parameter.numel():
                    parameter.mul_(1.5)


@ranks(2)
@STRATEGY
@pytest.mark.parametrize("to_none", [True, False])
def test_an_optimizer_clears_what_waits_of_its_own_parameters_only(world: World, strategy: str, to_none: bool) -> None:
    model, plain = wrapped(strategy, True), seeded(MLP)

    def weights(of: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([each for name, each in of.named_parameters() if "weight" in name], lr=0.1)

    clears, expected = weights(model), weights(plain)
    with model.no_sync():
        model(batch(world.rank)).square().mean().backward()
    clears.zero_grad(to_none)
    model(batch(10 + world.rank)).square().mean().backward()
    for first in (0, 10):
        sum(plain(batch(first + rank)).square().mean() / world.size for rank in range(world.size)).backward()
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
        assert model(batch(0)).dtype == torch.float32
    model.train()


@ranks(2)
@ORIGINAL
@STRATEGY
@pytest.mark.parametrize("transport", ["shm", "p2p"])
def test_gradients_that_wait_outlive_an_evaluation_in_full_precision(
    world: World, strategy: str, original: bool, transport: str
) -> None:
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_TRANSPORT", transport)
        patch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
        for evaluates in (False, True):
            model = wrap_blocks(strategy=strategy, original=original, precision=HALF)(fullshard, seeded(MLP))
            with model.no_sync():
                model(batch(world.rank)).float().square().mean().backward()
            if evaluates:
                evaluate(model)
            model(batch(10 + world.rank)).float().square().mean().backward()
            found.append(whole_gradients(fullshard, model))
    without, within = found
    for name, gradient in without.items():
        assert gradient is not None
        torch.testing.assert_close(within[name], gradient, rtol=0, atol=0)


@ranks(2)
def test_an_evaluation_in_full_precision_between_forward_and_backward_is_refused(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
        model = wrap_blocks(precision=HALF)(fullshard, seeded(MLP))
        loss = model(batch(0)).float().mean()
        evaluate(model)
        with pytest.raises(RuntimeError, match=f"is at version {RELEASED}"):  # the guide has this number
            loss.backward()
        model(batch(1)).float().mean().backward()
        assert all(gradient is not None for gradient in whole_gradients(fullshard, model).values())


@ranks(2)
@ORIGINAL
@pytest.mark.parametrize("strategy", SHARDED)
def test_a_gradient_that_waited_comes_home_in_its_own_dtype(world: World, strategy: str, original: bool) -> None:
    """What was shown meanwhile is of the parameter's."""
    options: dict[str, Any] = {"precision": Precision(torch.bfloat16), "flags": {"keep_low_precision_grads": True}}
    model = wrap_blocks(strategy=strategy, original=original, **options)(fullshard, seeded(MLP))
    with model.no_sync():
        model(batch(world.rank)).float().mean().backward()
    assert {each.grad.dtype for each in model.parameters()} == {torch.float32}
    model(batch(world.rank)).float().mean().backward()
    assert {each.grad.dtype for each in model.parameters() if each.grad is not None} == {torch.bfloat16}


@pytest.mark.parametrize("api", ["wrapper", "fully_shard"])
def test_a_module_that_ran_alone_before_reshards_inside_of_another(api: str) -> None:
    shard: Any = fullshard.FullyShardedDataParallel if api == "wrapper" else fullshard.fully_shard
    with fake_world(2):
        inner = shard(nn.Linear(6, 6))
        inner(batch(0))
        outer = shard(nn.Sequential(inner, nn.Linear(6, 6)))
        outer(batch(0))
        group = inner._unit.groups[0] if api == "wrapper" else groups_of(inner)[0]
        assert group.full.state is State.SHARDED


class Failing(MLP):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.fails:
            raise KeyError("in forward")
        return x


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise KeyError("in backward")


def fail_in(where: str, model: Any) -> None:
    hook = model.module.blocks[2].register_forward_hook(lambda *given: FailingBackward.apply(given[2]))
    model.module.fails = where == "forward"
    try:
        model(batch(0)).sum().backward()
    finally:
        model.module.fails = False
        hook.remove()


@ranks(2)
@ORIGINAL
@STRATEGY
@pytest.mark.parametrize("transport", ["shm", "p2p"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_model_is_saved_after_an_error_in_a_step(
    world: World, strategy: str, original: bool, transport: str, where: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_TRANSPORT", transport)
        model = wrap_blocks(strategy=strategy, original=original)(fullshard, seeded(Failing))
    plain = seeded(Failing)
    for use in ("state_dict", "load_state_dict", "summon_full_params", "apply"):
        with pytest.raises(KeyError, match=where):
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
        model(batch(1)).square().mean().backward()
        plain.zero_grad()
        plain(batch(1)).square().mean().backward()
        found = whole_gradients(fullshard, model)
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            assert found[name] is not None
            assert deviation(found[name], parameter.grad) < 1e-6, name
