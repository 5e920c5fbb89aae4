"""What is known of an optimizer at its step: whose parameters it has, and how often the ranks have stepped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from fullshard import FullyShardedDataParallel as FSDP
from fullshard.optim.steps import _groups_of
from tests.fully_shard.cases import groups_of, inputs, shard_mlp
from tests.harness import World, ranks
from tests.harness.compare import whole
from tests.harness.models import MLP, seeded

TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "p2p", "collective"])


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


@ranks(2)
def test_the_groups_of_an_optimizer_are_those_of_its_parameters(world: World) -> None:
    model = shard_mlp()
    assert {*_groups_of(sgd(model.parameters()))} == {*groups_of(model)}
    assert _groups_of(sgd(seeded(MLP).parameters())) == []
    optimizer = sgd(model.blocks[0].parameters())
    assert _groups_of(optimizer) == groups_of(model.blocks[0])
    optimizer.add_param_group({"params": [*model.blocks[1].parameters()]})
    assert _groups_of(optimizer) == [*groups_of(model.blocks[0]), *groups_of(model.blocks[1])]


def train(model: Any, *optimizers: torch.optim.Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        model(inputs(step)).sum().backward()  # all ranks have the same inputs
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@ranks(2)
@TRANSPORTS
def test_ranks_may_have_different_numbers_of_optimizers(world: World, transport: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_TRANSPORT", transport)
        model = shard_mlp()
    reference = seeded(MLP)
    params = [*model.parameters()]
    train(model, *([sgd(params)] if world.rank == 0 else [sgd(params[:3]), sgd(params[3:])]))
    train(reference, sgd(reference.parameters()))
    for mine, plain in zip(params, reference.parameters(), strict=True):
        torch.testing.assert_close(whole(mine), plain.detach())


@ranks(2)
def test_optimizers_may_be_dropped_after_their_step(world: World) -> None:
    """One for each parameter. On the first rank each gets the address of the one before."""
    model, kept = shard_mlp(), []
    for step in range(3):
        model(inputs(step)).sum().backward()
        for param in model.parameters():
            optimizer = sgd([param])
            optimizer.step()
            kept.append(optimizer if world.rank else None)


@ranks(2)
def test_ranks_may_leave_out_parameters_of_which_they_have_nothing(world: World) -> None:
    """Each rank has elements of parameters in the order of the model: the last rank has none of the first layer."""
    model = FSDP(nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 6)), use_orig_params=True)
    halves = [[param for param in layer.parameters() if param.numel()] for layer in model.module]
    train(model, *[sgd(half) for half in halves if half])


class Scaled(nn.Module):
    """Its only parameter has one element, of which one rank has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@ranks(2)
@TRANSPORTS
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_that_only_makes_state_to_save_is_not_counted(world: World, transport: str, kind: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_TRANSPORT", transport)
        model = FSDP(Scaled(), use_orig_params=True)
        optimizer = kind(model.parameters())
        for _ in range(2):
            model(inputs(0)).sum().backward()
            optimizer.step()
            get_optimizer_state_dict(model, optimizer)  # steps on the rank without gradients and state
        optimizer.zero_grad()
        model(inputs(0)).sum().backward()
    assert groups_of(model)[0].step.optimizer_steps == 2


@ranks(2)
def test_an_optimizer_is_known_by_its_parameters_and_not_by_their_number(world: World) -> None:
    first, second = shard_mlp(), shard_mlp()
    optimizer = sgd(first.parameters())
    train(first, optimizer)
    optimizer.param_groups[0]["params"] = [*second.parameters()]
    (before, *_), (other, *_) = ([group.writes for group in groups_of(model)] for model in (second, first))
    train(second, optimizer)
    assert groups_of(second)[0].writes > before
    assert groups_of(second)[0].step.optimizer_steps == 3
    assert groups_of(first)[0].writes == other


@ranks(2)
def test_a_model_that_is_sharded_after_a_step_is_found(world: World) -> None:
    """The wrapper keeps the parameters' objects, so that optimizers stay right."""
    shard_mlp()  # looks at the steps of all optimizers from here on
    model = nn.Linear(6, 2)
    optimizer = sgd(model.parameters())
    train(model, optimizer)
    model = FSDP(model, use_orig_params=True)
    train(model, optimizer)
    assert groups_of(model)[0].step.optimizer_steps == 3


@ranks(2)
@TRANSPORTS
def test_a_rank_whose_optimizer_has_no_parameter_of_the_model_is_told_of_it(world: World, transport: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_TRANSPORT", transport)
        model, other = shard_mlp(), shard_mlp()
    trained = model if world.rank == 0 else other
    with pytest.raises(
        RuntimeError, match=r"after [01] optimizer steps.*the same number of micro-batches per optimizer step"
    ):
        train(model, sgd(trained.parameters()))
