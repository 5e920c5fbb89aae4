"""What a forward takes and returns: its caller's containers stay the same objects, and nothing shows other groups."""

from __future__ import annotations

from collections import UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

import fullshard
from tests.fully_shard.cases import assert_close, environment, first_of, inputs
from tests.harness import World, ranks
from tests.harness.compare import each_block
from tests.harness.models import seeded, shard_each
from tests.harness.slow import slow


@dataclass
class Context:
    x: Tensor
    losses: list[Tensor] = field(default_factory=list)
    seen: dict[str, Any] = field(default_factory=dict)


class Collecting(nn.Module):
    """A block that appends its auxiliary loss to a list, wherever its caller keeps that list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, given: Any, *, losses_of: Callable[[Any], Any], x_of: Callable[[Any], Tensor]) -> Tensor:
        y = torch.tanh(self.linear(x_of(given)))
        losses_of(given).append(y.square().mean())
        return y


class Stack(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any], losses_of: Any, x_of: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Collecting() for _ in range(3))
        self.make, self.access = make, {"losses_of": losses_of, "x_of": x_of}

    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        for block in self.blocks:
            given = self.make(x)
            x = block(given, **self.access)
            assert len(self.access["losses_of"](given)) == 1
            losses += self.access["losses_of"](given)
        return x.square().mean() + sum(losses)  # type: ignore[no-any-return]


class Cache:
    """As caches of models are: registered with pytree, and made of plain objects."""

    def __init__(self, x: Tensor) -> None:
        self.layers = [UserDict(x=x, losses=[])]


torch.utils._pytree.register_pytree_node(
    Cache, lambda cache: ([cache.layers[0]["x"]], None), lambda values, _: Cache(next(iter(values)))
)
CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Any, Any]] = {
    "list": (lambda x: [x, []], lambda given: given[1], lambda given: given[0]),
    "dict": (lambda x: {"x": x, "aux": []}, lambda given: given["aux"], lambda given: given["x"]),
    "nested": (lambda x: ({"in": [x]}, {"aux": []}), lambda given: given[1]["aux"], lambda given: given[0]["in"][0]),
    "deque": (lambda x: deque([x, []]), lambda given: given[1], lambda given: given[0]),
    "dataclass": (Context, lambda given: given.losses, lambda given: given.x),
    "cache": (Cache, lambda given: given.layers[0]["losses"], lambda given: given.layers[0]["x"]),
}


@ranks(2)
@pytest.mark.parametrize("precision", [torch.float64, *slow(None)], ids=str)
def test_what_a_forward_adds_to_its_arguments_arrives(world: World, precision: Any) -> None:
    for kind, container in CONTAINERS.items():
        model, reference = (seeded(lambda c=container: Stack(*c)) for _ in range(2))  # type: ignore[misc]
        policy = fullshard.MixedPrecisionPolicy(param_dtype=precision)
        shard_each(*model.blocks, model, mp_policy=policy)
        found, expected = model(inputs().requires_grad_()), reference(inputs())
        found.backward()
        expected.backward()
        assert_close(found.float(), expected, f"loss with {kind}")
        for block, other in zip(model.blocks, reference.blocks, strict=True):
            assert_close(block.linear.weight.grad.full_tensor(), other.linear.weight.grad, f"gradient with {kind}")


@ranks(2)
def test_the_callers_containers_are_as_they_were(world: World) -> None:
    block = Collecting()
    fullshard.fully_shard(block)
    x = inputs().requires_grad_()
    given = [x, []]
    block(given, losses_of=lambda each: each[1], x_of=lambda each: each[0]).sum().backward()
    assert given[0] is x
    assert x.grad is not None


class Distribution(nn.Module):
    """A block whose result hides views of its parameters in a plain object."""

    def __init__(self, hide: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.mu, self.std = nn.Linear(6, 6), nn.Parameter(torch.rand(6) + 0.5)
        self.hide = hide

    def forward(self, x: Tensor) -> Any:
        mu = self.mu(x)
        return mu, self.hide(Normal(mu, self.std.expand_as(mu)))


class Distributions(nn.Module):
    def __init__(self, hide: Callable[[Any], Any] = lambda each: each) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Distribution(hide) for _ in range(4))

    def forward(self, x: Tensor) -> list[Any]:
        found = []
        for block in self.blocks:
            x, hidden = block(x)
            found.append(hidden)
        return found


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


#: How a block hides a distribution, and what shows its scale.
HIDDEN: list[tuple[Callable[[Any], Any], Callable[[Any], Tensor]]] = [
    (lambda normal: normal, lambda found: found.scale),
    (lambda normal: Holder((normal, [normal.scale])), lambda found: found.held[1][0]),
    (lambda normal: {normal.scale}, lambda found: next(iter(found))),
]


@ranks(2)
@pytest.mark.parametrize("transport", ["shm", "p2p"])
@pytest.mark.parametrize("with_grad", [True, False])
def test_a_view_of_a_parameter_in_an_object_keeps_its_values(world: World, transport: str, with_grad: bool) -> None:
    for hide, show in HIDDEN:
        with environment(FULLSHARD_TRANSPORT=transport), torch.set_grad_enabled(with_grad):
            model, reference = (seeded(lambda h=hide: Distributions(h)) for _ in range(2))  # type: ignore[misc]
            each_block()(fullshard, model)
            for _ in range(2):
                for found, expected in zip(model(inputs()), reference(inputs()), strict=True):
                    assert_close(show(found), show(expected), "scale")


@ranks(2)
@first_of("transport", "shm", "p2p", "collective", quick=2)
def test_a_write_to_a_parameter_that_was_kept_is_refused_by_name(world: World, transport: str) -> None:
    with environment(FULLSHARD_TRANSPORT=transport):
        model: Any = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        shard_each(*model, model)
        kept: list[Tensor] = []
        model[0].register_forward_pre_hook(lambda module, args: kept.append(module.weight))

        @torch.no_grad()
        def write(*_: object) -> None:
            kept[0].mul_(0)

        handle = model[2].register_forward_hook(write)
        with pytest.raises(RuntimeError, match=r"parameters \['0.weight'\] were written while they were sharded"):
            model(inputs()).sum().backward()
        handle.remove()
        model.reset_iter_state()
        model(inputs()).sum().backward()
