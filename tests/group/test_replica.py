"""What a replica gathers, keeps and adds up where replicas shard each shard again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fullshard
from fullshard.group.reduction import ScatterHop
from fullshard.group.source import ReplicaShard
from tests.harness import World, ranks
from tests.harness.compare import Precision, each_block, whole
from tests.harness.models import MLP, Branches, seeded

LAST = 2
"""The last of three micro-batches, the one after which gradients are complete."""


def sharded(world: World) -> Any:
    """The MLP on two replicas of one rank each."""
    model: Any = seeded(MLP)
    mesh = world.mesh(2, 1, names=("replicate", "shard"))
    each_block(mesh=mesh, outer_zero_stage=1)(fullshard, model)
    return model


@ranks(2)
def test_a_hook_sees_the_part_of_each_rank(world: World) -> None:
    seen: list[int] = []
    model = sharded(world)
    model.set_all_reduce_hook(lambda output: (seen.append(output.numel()), output.mul_(2)))
    plain = sharded(world)
    for each in (model, plain):
        each(torch.ones(2, 6)).sum().backward()
    assert len(seen) == 1, "of the root's group only"
    assert seen[0] <= 16, "its part of three elements, with padding"
    assert torch.equal(whole(model.scale.grad), 2 * whole(plain.scale.grad))
    assert torch.equal(whole(model.blocks[0][0].weight.grad), whole(plain.blocks[0][0].weight.grad))


@ranks(2)
def test_a_step_gathers_over_replicas_once_for_all_micro_batches(world: World, monkeypatch: Any) -> None:
    gathers: list[object] = []
    gather = ReplicaShard._gather

    def counted(self: Any, *values: Any) -> None:
        gathers.append(self)
        gather(self, *values)

    monkeypatch.setattr(ReplicaShard, "_gather", counted)
    model = sharded(world)
    optimizer, groups = torch.optim.SGD(model.parameters(), lr=0.1), len(model.blocks) + 1
    for _ in range(2):
        gathers.clear()
        for micro in range(LAST + 1):
            model.set_requires_gradient_sync(micro == LAST)
            model(torch.ones(2, 6)).sum().backward()
        assert len(gathers) == len(set(gathers)) == groups
        optimizer.step()
    gathers.clear()
    with torch.no_grad():
        model(torch.ones(2, 6))
        model(torch.ones(2, 6))
    assert len(gathers) == 2 * groups, "writes that leave no trace are seen by the next forward"


@ranks(2)
def test_a_group_that_was_gathered_ahead_and_not_used_is_gathered_again(world: World) -> None:
    def shard(model: Any) -> Any:
        mesh = world.mesh(2, 1, names=("replicate", "shard"))
        each_block(mesh=mesh, outer_zero_stage=1, precision=Precision(torch.bfloat16))(fullshard, model)
        return model

    model, plain = shard(seeded(Branches)), seeded(Branches).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x, every, first = torch.ones(2, 6, dtype=torch.bfloat16), torch.ones(3), torch.tensor([1, 0, 0])
    for used in (every, first, every):
        output = model(x, used)
        assert torch.equal(output, plain(x, used))
        output.sum().backward()
        optimizer.step()


@ranks(2)
def test_writes_between_micro_batches_are_seen(world: World) -> None:
    model, plain = sharded(world), seeded(MLP)
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 6)).sum().backward()
    with torch.no_grad():
        for param in (*model.parameters(), *plain.parameters()):
            param.fill_(0.25)
    assert torch.allclose(model(torch.ones(2, 6)), plain(torch.ones(2, 6)))


@ranks(2)
def test_free_buffers_frees_what_replicas_have(world: World) -> None:
    model = sharded(world)
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
        assert model.free_buffers() > 0
        assert model.free_buffers() == 0


@ranks(2)
def test_an_error_in_a_step_leaves_the_model_able_to_train(world: World) -> None:
    model, plain = sharded(world), seeded(MLP)

    def fail(grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("a hook of the user")

    hook = model.blocks[0].register_full_backward_hook(lambda *_: fail(torch.ones(1)))
    with pytest.raises(ValueError, match="a hook of the user"):
        model(torch.ones(2, 6)).sum().backward()
    hook.remove()
    model.reset_iter_state()
    model.zero_grad()
    for each in (model, plain):
        each(torch.ones(2, 6)).sum().backward()
    for one, two in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(one.grad), two.grad)


@ranks(2)
def test_gradients_of_replicas_return_their_memory(world: World, monkeypatch: Any) -> None:
    made: list[ScatterHop] = []
    finish = ScatterHop.__init__
    monkeypatch.setattr(ScatterHop, "__init__", lambda self, *args: (made.append(self), finish(self, *args))[1])
    model = sharded(world)
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
        assert len(made) == len(model.blocks) + 1
        assert not any(each.buffer.in_use for each in made)
