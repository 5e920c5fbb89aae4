"""Steps cut short by an error: what the next step says, and what `reset_iter_state` makes right again."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import fullshard
from tests.fully_shard.cases import (
    BOTH,
    Library,
    Twins,
    assert_close,
    environment,
    first_of,
    inputs,
    shard_mlp,
    twins,
)
from tests.harness import RankPool, World, ranks
from tests.harness.compare import each_block, whole
from tests.harness.faults import FailingBackward, Fault
from tests.harness.models import MLP, Transformer, seeded
from tests.harness.wrapper import wrap_blocks


def fail_in_forward(module: nn.Module, call: Any) -> None:
    """Run `call` while `module` raises in its forward."""

    def fail(*args: Any) -> None:
        raise Fault

    handle = module.register_forward_pre_hook(fail)
    with pytest.raises(Fault):
        call()
    handle.remove()


def fail_in_backward(module: nn.Module, call: Any) -> None:
    """Run `call` while the backward of `module` raises before that of its parameters."""
    handle = module.register_forward_hook(lambda module, args, output: FailingBackward.apply(output))
    with pytest.raises(Fault):
        call()
    handle.remove()


@ranks(2)
def test_reset_before_and_between_good_steps_changes_nothing(world: World) -> None:
    pair = twins(world)
    for _ in range(2):
        pair.sharded.reset_iter_state()
        pair.step()


@ranks(2)
def test_a_reset_forgets_sums_over_some_of_the_ranks(world: World) -> None:
    model, reference = shard_mlp(mesh=world.mesh(2, 1, names=("replicate", "shard"))), seeded(MLP)
    model.set_requires_all_reduce(False)
    model(inputs(0)).sum().backward()
    model.reset_iter_state()
    model.set_requires_all_reduce(True)
    model(inputs(1)).sum().backward()
    reference(inputs(1)).sum().backward()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(whole(parameter.grad), expected.grad, "gradient")


@ranks(2)
@first_of("checkpointing", "non-reentrant", "reentrant")
def test_an_error_in_a_recomputation(world: World, checkpointing: Any) -> None:
    def build() -> Any:
        return seeded(lambda: Transformer(checkpointing=checkpointing))

    model = build()
    each_block()(fullshard, model)
    tokens = torch.arange(6).view(2, 3)
    loss = model(tokens).sum()
    fail_in_forward(model.blocks[0].mlp_norm, loss.backward)
    model.reset_iter_state()
    pair = Twins(world, model, build())
    for parameter in model.parameters():
        parameter.grad = None
    for _ in range(2):
        pair.step(batch=lambda seed: (tokens + seed) % 13)


@ranks(2)
def test_a_forward_that_is_never_differentiated_needs_no_reset(world: World) -> None:
    pair = twins(world)
    for _ in range(3):
        pair.sharded(inputs())  # with gradients enabled, and thrown away
        pair.step()


@ranks(2)
def test_an_error_in_evaluation(world: World) -> None:
    model = shard_mlp()
    with torch.no_grad():
        fail_in_forward(model.blocks[1][1], lambda: model(inputs()))
        with pytest.raises(RuntimeError, match="reset_iter_state"):
            model(inputs())
        model.reset_iter_state()
        assert_close(model(inputs()), seeded(MLP)(inputs()), "output")


@ranks(2)
def test_an_error_in_an_optimizer_hook_in_backward(world: World) -> None:
    model = shard_mlp()
    handle = model.blocks[1][0].weight.register_post_accumulate_grad_hook(_fail)
    with pytest.raises(Fault):
        model(inputs()).sum().backward()
    handle.remove()
    model.reset_iter_state()
    for parameter in model.parameters():
        parameter.grad = None
    Twins(world, model, seeded(MLP)).step()


@ranks(2, transport="shm")
def test_a_reset_inside_a_backward_leaves_the_next_step_right(world: World) -> None:
    """The hook runs when a later group waits for this reduction. The backward goes on, and begins once more."""
    pair = twins(world)
    pair.step()
    reset = pair.sharded.reset_iter_state
    hook = pair.sharded.blocks[2][0].weight.register_post_accumulate_grad_hook(lambda parameter: reset())
    pair.sharded(inputs()).sum().backward()
    hook.remove()
    pair.sharded.zero_grad()
    pair.step()


def _fail(parameter: Tensor) -> None:
    raise Fault


@ranks(2)
@BOTH
@pytest.mark.parametrize("reshard", [True, None])
def test_backward_twice_through_one_graph(world: World, fsdp: Library, reshard: bool | None) -> None:
    for evaluates in (False, True):
        model, reference = shard_mlp(fsdp, reshard_after_forward=reshard), seeded(MLP)
        parameters = list(model.parameters())
        with torch.no_grad():
            model(inputs()) if evaluates else None
        found, expected = model(inputs()).sum(), reference(inputs()).sum()
        for _ in range(2):
            found.backward(retain_graph=True)
            expected.backward(retain_graph=True)
        for parameter, other in zip(parameters, reference.parameters(), strict=True):
            assert_close(whole(parameter.grad), other.grad, "gradient")


def fail_on_rank_1(world: World, transport: str, where: str, folder: Path, wraps: bool = False) -> None:
    """A good step, and one in which rank 1 raises and so ends, as a program does that catches nothing."""
    with environment(FULLSHARD_TRANSPORT=transport):
        model = wrap_blocks()(fullshard, seeded(MLP)) if wraps else shard_mlp()
    model(inputs()).sum().backward()

    def fail(*args: Any) -> None:
        if world.rank == 1:
            raise Fault("out of luck")

    if where == "forward":
        model.blocks[2].register_forward_pre_hook(fail)
    else:
        model.blocks[2].register_full_backward_hook(fail)
    try:
        model(inputs()).sum().backward()
    except Fault as error:
        (folder / "said").write_text(str(error))
        os._exit(1)


#: What ranks say that lost another one.
LOOK = r"(Look there for|[Ff]ind) the first error"


@first_of("transport", "p2p", "shm", "collective")
@first_of("where", "backward", "forward")
@first_of("size", 2, 3)
def test_the_first_error_is_the_users_and_the_other_ranks_say_where_to_look(
    rank_pool: RankPool, tmp_path: Path, transport: str, where: str, size: int
) -> None:
    """With three ranks in the wrapper."""
    outcomes = rank_pool.run(fail_on_rank_1, size, transport, where, tmp_path, size == 3)
    assert (tmp_path / "said").read_text() == "out of luck"
    assert [outcome.kind for outcome in outcomes] == ["raised", "died", "raised"][:size]
    others = [outcome for outcome in outcomes if outcome.rank != 1]
    assert all(outcome.at - outcomes[1].at < 5 for outcome in others)
    assert any(re.search(LOOK, outcome.summary) for outcome in others), others[0].report


@ranks(2)
@pytest.mark.parametrize("fail", [fail_in_forward, fail_in_backward])
def test_what_is_refused_after_an_error_says_what_to_call_and_where(world: World, fail: Any) -> None:
    model = shard_mlp()
    fail(model.blocks[1][1], lambda: model(inputs()).sum().backward())
    what = r"reset_iter_state\(\) on the root module, on every rank"
    with pytest.raises(RuntimeError, match=f"did not end, probably because of an error in it: .*{what}"):
        model(inputs())
    with pytest.raises(RuntimeError, match=what), fullshard.summon_full_params(model):
        pass
    model.reset_iter_state()
    with fullshard.summon_full_params(model):
        pass
    assert_close(model(inputs()), seeded(MLP)(inputs()), "output")


@ranks(2)
@first_of("transport", "shm", "p2p")
def test_a_forward_that_was_refused_before_it_began_needs_no_reset(world: World, transport: str) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = transport
    pair = twins(world, lambda: seeded(MLP))
    pair.step()
    linear = next(each for each in pair.sharded.modules() if isinstance(each, nn.Linear))
    weight = linear._parameters["weight"]
    assert isinstance(weight, DTensor)
    linear._parameters["weight"] = nn.Parameter(DTensor.from_local(torch.zeros(1), weight.device_mesh, [Shard(0)]))
    with pytest.raises(RuntimeError, match="was replaced by a DTensor whose local shape is"):
        pair.sharded(inputs())
    linear._parameters["weight"] = weight
    for _ in range(2):
        pair.step()
