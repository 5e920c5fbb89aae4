"""Transforms of `torch.func`, forward-mode AD, and inputs that a unit writes in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.autograd import functional
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import fullshard
from tests.fully_shard.cases import assert_close, inputs, twins
from tests.harness import World, ranks
from tests.harness.compare import OURS
from tests.harness.models import MLP, seeded
from tests.harness.slow import some
from tests.harness.wrapper import wrap_blocks


def total(model: Any, x: Tensor) -> Tensor:
    return model(x).square().sum()


def vector_jacobian(model: Any, x: Tensor) -> Any:
    """The pull-back is called after the transform has ended."""
    y, pull = vjp(model, x)
    return y, pull(torch.ones_like(y))


def dual(model: Any, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.cos())))


TRANSFORMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "jvp": lambda model, x: jvp(model, (x,), (x.cos(),)),
    "vjp": vector_jacobian,
    "vmap": lambda model, x: vmap(model)(x),
    "grad": lambda model, x: grad(partial(total, model))(x),
    "vmap of grad": lambda model, x: vmap(grad(partial(total, model)))(x),
    "grad of vmap": lambda model, x: grad(partial(total, vmap(model)))(x),
    "jvp of grad": lambda model, x: jvp(grad(partial(total, model)), (x,), (x.cos(),)),
    "jacrev": lambda model, x: jacrev(model)(x),
    "jacfwd": lambda model, x: jacfwd(model)(x),
    "hessian": lambda model, x: hessian(partial(total, model))(x),
    "forward AD": dual,
    "jacobian": lambda model, x: functional.jacobian(model, x, create_graph=True),
}


@ranks(2)
@pytest.mark.parametrize("transform", some(TRANSFORMS, ("vjp", "vmap of grad", "forward AD")))
def test_a_model_trains_through_a_transform(world: World, transform: str) -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        found = pytree.tree_leaves(TRANSFORMS[transform](model, x))
        return torch.stack([each.sin().sum() for each in found]).sum() + 0 * model(x).sum()

    pair = twins(world, reshard_after_forward=True)
    for _ in range(2):
        pair.step(loss=loss)


@pytest.mark.slow
@ranks(2)
def test_transforms_of_a_wrapped_model_give_the_values_of_the_unsharded_one(world: World) -> None:
    reference = seeded(MLP)
    for transform in TRANSFORMS.values():
        model = wrap_blocks()(OURS["fullshard"], seeded(MLP))
        found, expected = (pytree.tree_leaves(transform(each, inputs())) for each in (model, reference))
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, "value")


class Forces(nn.Module):
    """Differentiates a part of itself in its forward."""

    def __init__(self, of: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks, self.head, self.of = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 1)]), nn.Linear(6, 6), of

    def energy(self, x: Tensor) -> Tensor:
        return torch.sin(self.blocks[1](torch.tanh(self.blocks[0](x)))).sum()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.of(self.energy, x))


def by_autograd(energy: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(energy(x), x, create_graph=True)[0]


def by_transforms(energy: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return vmap(grad(energy))(x)


@ranks(2)
@pytest.mark.parametrize("of", [by_autograd, by_transforms])
def test_a_backward_in_a_forward_leaves_it_its_parameters(world: World, of: Any) -> None:
    pair = twins(world, lambda: seeded(lambda: Forces(of)))
    for _ in range(2):
        pair.step()


@ranks(2)
def test_a_trace_that_would_keep_memory_in_place_of_values_is_refused(world: World) -> None:
    model = seeded(MLP)
    fullshard.fully_shard(model)
    with pytest.raises(RuntimeError, match="FSDPMLP is traced by make_fx"):
        linearize(model, inputs())
    assert_close(model(inputs()), seeded(MLP)(inputs()), "output")


class WritesInput(nn.Linear):
    """Begins in place."""

    def forward(self, x: Tensor) -> Tensor:
        x[:, 1:].mul_(2)
        return super().forward(torch.relu_(x))


class Writing(nn.Module):
    def __init__(self, rows: slice) -> None:
        super().__init__()
        self.blocks, self.rows = nn.ModuleList([WritesInput(6, 6), WritesInput(6, 6)]), rows

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            whole = x * 2
            part = whole[self.rows]
            x = torch.cat([block(part) + part, whole])
        return x


@ranks(2)
@pytest.mark.parametrize("rows", [slice(None), slice(1, 3)], ids=["all", "a view"])
def test_a_unit_may_write_to_its_input_in_place(world: World, rows: slice) -> None:
    pair = twins(world, lambda: seeded(lambda: Writing(rows)))
    for _ in range(2):
        pair.step(batch=lambda seed: inputs(seed).requires_grad_())


@ranks(2)
def test_an_input_that_is_a_leaf_is_not_written_without_a_word(world: World) -> None:
    model = seeded(lambda: WritesInput(6, 6))
    fullshard.fully_shard(model)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        model(inputs().requires_grad_())


class Returns(nn.Linear):
    def __init__(self, view: bool) -> None:
        super().__init__(6, 6)
        self.view = view

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x[:, :3] if self.view else x), super().forward(x.clone())


class WritesOutput(nn.Module):
    """Writes to an output that is its block's input."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.blocks, self.scale = nn.ModuleList([nn.Linear(6, 6), Returns(view)]), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        same, y = self.blocks[1](x)
        same += self.scale
        return x + y


@ranks(2)
def test_an_output_that_is_an_input_is_written_as_the_input_or_not_at_all(world: World) -> None:
    twins(world, lambda: seeded(lambda: WritesOutput(view=False))).step()
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        twins(world, lambda: seeded(lambda: WritesOutput(view=True))).step()
