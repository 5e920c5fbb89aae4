"""Errors that torch raises about DTensors are printed with advice that fits what the program did."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import raw_errors
from fullshard.watch import watch
from tests.harness import World, ranks
from tests.harness.models import MLP, seeded

X = torch.ones(2, 6)


def sharded() -> Any:
    return fullshard.fully_shard_blocks(seeded(MLP))


def penalized_loss() -> None:
    model = sharded()
    penalty = model.blocks[0][0].weight.norm()
    (F.cross_entropy(model(X), torch.zeros(2, dtype=torch.int64)) + penalty).backward()


def clip_with_a_forgotten_root() -> None:
    model: Any = seeded(MLP)
    for block in model.blocks:
        fullshard.fully_shard(block)
    model(X).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


class Rows(torch.optim.Optimizer):
    """Sums rows in place, as Adafactor does, which is refused by name before its step."""

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            torch.norm(param.grad, dim=-1, keepdim=True).square_()


def sum_rows() -> None:
    model = sharded()
    optimizer = Rows(model.parameters(), {})
    model(X).sum().backward()
    optimizer.step()


def clip_over_two_meshes() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    fullshard.fully_shard(model[0], mesh=mesh)
    fullshard.fully_shard(model)
    model(X).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def run_out_of_memory() -> None:
    torch.empty(1 << 60)


def load_plain_state() -> None:
    """Which torch's own ``load_state_dict`` of an optimizer accepts."""
    plain, model = seeded(MLP), sharded()
    before, optimizer = (torch.optim.AdamW(each.parameters(), foreach=False) for each in (plain, model))
    for each, steps in ((plain, before), (model, optimizer)):
        each(X).sum().backward()
        if each is plain:
            steps.step()
    optimizer.load_state_dict(before.state_dict())
    optimizer.step()


def fail_in_a_closure() -> None:
    model = sharded()

    def closure() -> Any:
        loss = model(X).sum() + model.blocks[0][0].weight.norm()
        loss.backward()
        return loss

    torch.optim.SGD(model.parameters()).step(closure)


def wrap_in_ddp() -> None:
    nn.parallel.DistributedDataParallel(sharded())


def broadcast() -> None:
    for param in sharded().parameters():
        dist.broadcast(param, 0)


def load_into_a_plain_model() -> None:
    seeded(MLP).load_state_dict(sharded().state_dict())


def write_a_plain_tensor() -> None:
    with torch.no_grad():
        sharded().scale.copy_(torch.zeros(3))


def average_into_a_plain_model() -> None:
    with torch.no_grad():
        for mean, param in zip(seeded(MLP).parameters(), sharded().parameters(), strict=True):
            mean.lerp_(param, 0.1)


def print_a_norm() -> None:
    print(f"{sharded().scale.norm():.3f}")


MISTAKES: dict[Callable[[], None], str] = {
    penalized_loss: "the loss is a DTensor: .* penalty = weight.norm\\(\\).full_tensor\\(\\)",
    clip_with_a_forgotten_root: "sharded and unsharded gradients: parameters of the MLP .* \\['scale'\\].* Call fully",
    clip_over_two_meshes: "gradients on several meshes.*get_total_norm.*clip_grads_with_norm_",
    run_out_of_memory: "ran out of memory.*fullshard fit",
    sum_rows: "Rows steps on DTensors, .* such as AdamW",
    load_plain_state: "the state 'exp_avg' of AdamW is a plain tensor",
    fail_in_a_closure: "the loss is a DTensor",
    wrap_in_ddp: "DistributedDataParallel was given a sharded model",
    broadcast: "a collective was given a sharded parameter",
    load_into_a_plain_model: "the model that loads it is not sharded.*full_state_dict=True",
    write_a_plain_tensor: "are DTensors, of which each rank has a part.*summon_full_params",
    average_into_a_plain_model: "are DTensors, of which each rank has a part.*summon_full_params",
    print_a_norm: "tensor.full_tensor\\(\\)",
}


@ranks(2)
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_the_advice_fits_the_mistake(world: World, mistake: Callable[[], None]) -> None:
    with pytest.raises((RuntimeError, NotImplementedError, TypeError)) as raised:
        mistake()
    advice = raw_errors.explain(raised.value)
    assert advice is not None, raised.value
    assert re.search(MISTAKES[mistake], advice), advice


@ranks(2)
def test_a_penalty_as_advised_trains_like_unsharded(world: World) -> None:
    model, plain = sharded(), seeded(MLP)
    for step in range(2):
        x = torch.randn(world.size, 2, 6, generator=torch.Generator().manual_seed(step))
        penalty = sum(param.norm() for param in model.parameters()).full_tensor()
        (model(x[world.rank]).square().mean() + penalty).backward()
        losses = plain(x.flatten(0, 1)).square().mean()
        (losses + sum(param.norm() for param in plain.parameters())).backward()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert expected.grad is not None
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad)


@ranks(2)
def test_the_advice_is_printed_with_the_error_that_ends_the_program(world: World) -> None:
    printed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "excepthook", lambda *error: printed.append("".join(traceback.format_exception(*error))))
        patch.setattr(watch, "_watch", None)
        watch._follow_errors()
        for function in (write_a_plain_tensor, lambda: int("no number")):
            with pytest.raises((RuntimeError, ValueError)) as raised:
                function()
            sys.excepthook(raised.type, raised.value, raised.tb)
    refused, other = printed
    assert refused.index("mixed torch.Tensor and DTensor") < refused.index("fullshard: between uses, the parameters")
    assert other.endswith("'no number'\n")


@ranks(2)
def test_an_error_of_all_ranks_is_printed_whole_by_one(world: World) -> None:
    printed: list[BaseException] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "excepthook", lambda kind, error, trace: printed.append(error))
        patch.setattr(watch, "_watch", None)
        watch._follow_errors()
        with pytest.raises(ValueError, match="do not shard the same") as raised:
            fullshard.fully_shard(nn.Linear(4, 4 + world.rank))
        sys.excepthook(raised.type, raised.value, raised.tb)
    assert len(printed) == (world.rank == 0)
