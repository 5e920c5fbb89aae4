"""What autograd saved of a parameter is read when the parameter's group is there again, or not at all.

Groups whose parameters are frozen have no gradient by which a read at the wrong time would be noticed. These cases
differentiate a backward, and hand tensors on where no hook can be put on them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

import fullshard
from fullshard.group.full_buffer import RELEASED
from tests.fully_shard.cases import Twins, assert_close, inputs
from tests.harness import World, ranks
from tests.harness.models import seeded, shard_each

WIDTH = 6


class Box:
    """A plain object, of which the library knows nothing."""

    def __init__(self, content: Any) -> None:
        self.content = content


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def compute(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))

    def forward(self, x: Any) -> Any:
        return self.compute(x)


class Boxed(Plain):
    def forward(self, x: Any) -> Any:
        return Box(self.compute(x.content if isinstance(x, Box) else x))


class InSet(Plain):
    def forward(self, x: Any) -> Any:
        return {self.compute(next(iter(x)) if isinstance(x, set) else x)}


class Closed(Plain):
    """The same with the tensor in a closure, where nobody can see it."""

    def forward(self, x: Any) -> Any:
        out = self.compute(x if isinstance(x, Tensor) else x())
        return lambda: out


OPEN: dict[type[Plain], Callable[[Any], Tensor]] = {
    Plain: lambda x: x,
    Boxed: lambda x: x.content,
    InSet: lambda x: next(iter(x)),
    Closed: lambda x: x(),
}


class Game(nn.Module):
    """A generator and a critic, which has more blocks than there are slots, that run apart."""

    def __init__(self, frozen: bool = True, kind: type[Plain] = Plain) -> None:
        super().__init__()
        self.open = OPEN[kind]
        self.generator = nn.Sequential(kind(), kind())
        self.critic = nn.Sequential(*[kind() for _ in range(5)])
        self.critic.requires_grad_(not frozen)


def shard(game: Game) -> None:
    for part in (game.generator, game.critic):
        shard_each(*part, part, reshard_after_forward=True)


def wrap(game: Game, original: bool = True) -> None:
    wrapper = fullshard.FullyShardedDataParallel
    for name, part in (("generator", game.generator), ("critic", game.critic)):
        for index, block in enumerate(part):
            part[index] = wrapper(block, use_orig_params=original)
        setattr(game, name, wrapper(part, use_orig_params=original))


def penalty(game: Any, x: Tensor) -> Tensor:
    """The gradient penalty: how far the critic's gradient is from length 1."""
    made = game.open(game.generator(x))
    score = game.open(game.critic(made)).square().sum()
    (grad,) = torch.autograd.grad(score, made, create_graph=True)
    return (grad.norm(2, dim=1) - 1).square().mean()


def whole_step(game: Any, x: Tensor) -> Tensor:
    """A loss on what the critic says of two batches, and the penalty."""
    said = game.open(game.critic(game.generator(x))).mean() - game.open(game.critic(2 * x)).mean()
    return said + penalty(game, x)


def train(world: World, loss: Callable[[Any, Tensor], Tensor], **options: Any) -> None:
    game, reference = (seeded(lambda: Game(**options)) for _ in range(2))
    shard(game)
    pair = Twins(world, game, reference)
    for _ in range(3):
        pair.step(loss=loss)


@ranks(1, 2)
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
@pytest.mark.parametrize("loss", [penalty, whole_step])
def test_a_gradient_penalty(world: World, loss: Any, frozen: bool) -> None:
    train(world, loss, frozen=frozen)


class Tokens(nn.Module):
    """What stands first has no input that requires gradients, and shares its group with what stands last."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(3, WIDTH), Plain(), nn.Linear(WIDTH, 3)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.relu(self.block(x + self.embedding(torch.arange(len(x)) % 3))))


def penalty_of_inputs(model: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    score = model(x).square().sum()
    (grad,) = torch.autograd.grad(score, x, create_graph=True)
    return score + (grad.norm(2, dim=1) - 1).square().mean()


@ranks(1, 2)
def test_a_penalty_through_a_later_module_of_a_list(world: World) -> None:
    model, reference = seeded(Tokens), seeded(Tokens)
    fullshard.fully_shard([model.embedding, model.relu, model.head], reshard_after_forward=True)
    fullshard.fully_shard(model.block)
    fullshard.fully_shard(model, reshard_after_forward=True)
    pair = Twins(world, model, reference)
    for _ in range(3):
        pair.step(loss=penalty_of_inputs)


@ranks(2)
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
@pytest.mark.parametrize("kind", [Boxed, InSet, Closed])
def test_blocks_hand_on_what_no_hook_can_replace(world: World, kind: type[Plain], frozen: bool) -> None:
    train(world, lambda game, x: game.open(game.critic(game.generator(x))).square().mean(), kind=kind, frozen=frozen)


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize("original", [True, False], ids=["original", "flat"])
def test_a_penalty_in_the_wrapper(world: World, original: bool) -> None:
    game, reference = (seeded(Game) for _ in range(2))
    wrap(game, original)
    optimizers = [torch.optim.SGD(model.generator.parameters(), lr=0.1) for model in (game, reference)]
    for step in range(3):
        for rank in range(world.size):
            (penalty(reference, inputs(step * world.size + rank)) / world.size).backward()
        penalty(game, inputs(step * world.size + world.rank)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with fullshard.FullyShardedDataParallel.summon_full_params(game):
            for one, other in zip(game.parameters(), reference.parameters(), strict=True):
                assert_close(one, other, "parameter")


class Leaks(Plain):
    """Its loss leaves through an attribute, and its output does not need the gradient of it."""

    def forward(self, x: Any) -> Any:
        self.loss = self.compute(x).square().mean()
        return x.detach().requires_grad_()


@ranks(2)
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_what_cannot_be_known_is_refused_and_not_read(world: World, frozen: bool) -> None:
    """The gradient enters the block where no hook is. Memory that ranks share is right at any time of a pass."""
    block = Leaks().requires_grad_(not frozen)
    fullshard.fully_shard(block, reshard_after_forward=True)
    x = inputs(width=WIDTH).requires_grad_()
    block(x)
    if os.environ["FULLSHARD_TRANSPORT"] == "shm":
        versions = {parameter.unsharded._version for parameter in fullshard.fully_shard.state(block).groups[0].params}
        assert versions == {RELEASED}
    with pytest.raises(RuntimeError, match=str(RELEASED)):
        block.loss.backward()


@ranks(2)
def test_a_write_in_forward_is_not_read_without_it(world: World) -> None:
    """A reshard throws the write away: the backward would compute with the value before it."""

    class Clamps(Plain):
        def forward(self, x: Any) -> Any:
            with torch.no_grad():
                self.up.weight.clamp_(-0.1, 0.1)
            return self.compute(x)

    block = Clamps()
    fullshard.fully_shard(block, reshard_after_forward=True)
    output = block(inputs(width=WIDTH).requires_grad_())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@ranks(1, 2)
def test_a_replaced_parameter_and_writes_are_not_taken_for_none(world: World) -> None:
    """Versions begin anew with the new parameter; with some number of writes their sum is what it was before."""
    for writes in range(8):
        block, reference = Plain(), Plain()
        fullshard.fully_shard(block, reshard_after_forward=False)
        block.load_state_dict(split(reference, block))
        bias, weight = block.down.bias, block.up.weight
        with torch.no_grad():
            for _ in range(4):
                weight.mul_(1)
        block(inputs(width=WIDTH))  # gathered, and stays so
        new = torch.randn(8, WIDTH)
        block.up.weight = nn.Parameter(distribute_tensor(new, weight.device_mesh, weight.placements))
        with torch.no_grad():
            reference.up.weight.copy_(new)
            for written in (bias, reference.down.bias):
                for _ in range(writes):
                    written.mul_(1.5)
        assert_close(block(inputs(width=WIDTH)), reference(inputs(width=WIDTH)), f"output after {writes} writes")


@ranks(2)
def test_a_replaced_parameter_is_gathered_by_hand(world: World) -> None:
    block, reference = Plain(), Plain()
    fullshard.fully_shard(block)
    block(inputs(width=WIDTH))
    block.load_state_dict(split(reference, block), assign=True)
    block.unshard()
    assert_close(block.up.weight, reference.up.weight, "parameter")
    assert_close(block(inputs(width=WIDTH)), reference(inputs(width=WIDTH)), "output")


def split(model: nn.Module, like: nn.Module) -> dict[str, Any]:
    placed = like.state_dict()
    return {
        name: distribute_tensor(value, placed[name].device_mesh, placed[name].placements)
        for name, value in model.state_dict().items()
    }


@pytest.mark.slow
@ranks(4)
def test_what_rests_on_fewer_ranks_may_be_resharded_before_its_backward(world: World) -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        output = model(x)
        model.state_dict()
        return output.square().mean()

    pair = Twins(world, *(seeded(lambda: nn.Sequential(Plain(), Plain(), Plain())) for _ in range(2)))
    shard_each(*pair.sharded, pair.sharded, reshard_after_forward=2)
    pair = Twins(world, pair.sharded, pair.whole)
    pair.step(loss=loss)
