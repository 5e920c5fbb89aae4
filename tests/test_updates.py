"""A backward after a step of an optimizer: an error if it uses what has changed, on every transport."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.optim
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullshard
from tests.fully_shard.cases import BOTH, Library, assert_close, inputs, shard_mlp
from tests.harness import World, ranks
from tests.harness.compare import kept
from tests.harness.models import MLP, seeded
from tests.harness.wrapper import wrap_blocks


def wrapped(original: bool) -> Any:
    return wrap_blocks(original=original)(fullshard, seeded(MLP))


#: A transport, and a model that is sharded in each way.
UPDATED: dict[str, tuple[str, Callable[[], Any]]] = {
    "resharded": ("p2p", shard_mlp),
    "whole": ("shm", lambda: shard_mlp(reshard_after_forward=False)),
    "replicated": ("collective", lambda: shard_mlp(zero_stage=0)),
    "original": ("p2p", lambda: wrapped(True)),
    "flat": ("shm", lambda: wrapped(False)),
}


def backward_after_a_step(model: Any, how: str) -> None:
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), inputs().requires_grad_()
    if how == "in backward":
        torch.distributed.optim._apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    late = checkpoint(model, x, use_reentrant=False).sum() if how == "recomputed" else model(x).sum()
    if how == "differentiated":
        late = torch.autograd.grad(late, x, create_graph=True)[0].square().sum()
    if how == "retained":
        late.backward(retain_graph=True)
    else:
        model(x).sum().backward()
    if how != "in backward":
        optimizer.step()
    late.backward()


@ranks(2)
@pytest.mark.parametrize("kind", UPDATED)
def test_no_backward_computes_with_what_an_optimizer_made_of_its_forward(world: World, kind: str) -> None:
    os.environ["FULLSHARD_TRANSPORT"], build = UPDATED[kind]
    for how in ("retained", "later", "differentiated", "recomputed", "in backward"):
        with pytest.raises(RuntimeError, match=r"an optimizer has stepped on parameters '.*' .*since the forward"):
            backward_after_a_step(build(), how)


@ranks(2)
@BOTH
def test_a_backward_is_not_stopped_by_a_step_on_what_it_does_not_use(world: World, fsdp: Library) -> None:
    """Two heads of one group, each with its optimizer, as an actor and a critic have them."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Linear(6, 3, bias=False) for _ in "ab")

        def forward(self, x: Tensor, name: str) -> Tensor:
            return getattr(self, name)(x).square()  # type: ignore[no-any-return]

    def gradient(model: nn.Module) -> Tensor:
        first, *rest = model.parameters()
        optimizer = torch.optim.SGD([first], lr=0.1)
        model(inputs(), "a").sum().backward()
        late = model(inputs(), "b").sum()
        optimizer.step()
        late.backward()
        return kept(rest[0].grad)

    assert_close(gradient(fsdp.fully_shard(seeded(Heads))), gradient(seeded(Heads)), "gradient")
