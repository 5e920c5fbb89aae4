"""What a forward may return, and what happens if a tensor is hidden where nobody can find it."""

from __future__ import annotations

import collections
import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import fullshard
from fullshard.group.full_buffer import RELEASED
from fullshard.schedule.states import IDLE
from fullshard.schedule.unit import schedule_of, unit_of, units_in
from tests.fully_shard.cases import assert_close, groups_of, inputs, twins
from tests.harness import World, ranks
from tests.harness.compare import OURS, kept
from tests.harness.models import seeded
from tests.harness.slow import some
from tests.harness.wrapper import wrap_blocks


@ranks(2)
def test_the_units_of_a_model_are_found_by_their_modules(world: World) -> None:
    first, second, third = (nn.Linear(4, 4) for _ in range(3))
    model = nn.Sequential(first, second, third)
    fullshard.fully_shard([first, second])
    assert unit_of(first) is unit_of(second)
    assert unit_of(third) is None
    with pytest.raises(ValueError, match="expects a root that was sharded or wrapped, got Sequential"):
        schedule_of(model, "profile()")
    fullshard.fully_shard(model)
    assert units_in(model) == [unit_of(model), unit_of(first)]
    assert schedule_of(model, "profile()").units == [unit_of(model), unit_of(first)]


@dataclass
class Data:
    value: Tensor
    note: str = ""


@dataclass(frozen=True)
class Frozen:
    value: Tensor


class Named(NamedTuple):
    value: Tensor
    other: int


class Registered:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Unknown:
    def __init__(self, value: Tensor) -> None:
        self.value = value


pytree.register_pytree_node(Registered, lambda node: ([node.value], None), lambda values, _: Registered(*values))

#: How a tensor is packed into a container, and found in it again.
KINDS: dict[str, tuple[Any, Any]] = {
    "tuple": (lambda x: (x, 1), lambda y: y[0]),
    "list": (lambda x: [x], lambda y: y[0]),
    "dict": (lambda x: {"a": {"b": x}}, lambda y: y["a"]["b"]),
    "ordered dict": (lambda x: collections.OrderedDict(a=x), lambda y: y["a"]),
    "default dict": (lambda x: collections.defaultdict(list, a=x), lambda y: y["a"]),
    "dataclass": (Data, lambda y: y.value),
    "frozen dataclass": (Frozen, lambda y: y.value),
    "named tuple": (lambda x: Named(x, 1), lambda y: y.value),
    "registered": (Registered, lambda y: y.value),
    "deep": (lambda x: ({"a": [Data(x)]},), lambda y: y[0]["a"][0].value),
}


class Packing(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList([PackingBlock(6, 7, kind), PackingBlock(7, 5, kind)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = KINDS[self.kind][1](block(x))
        return x


class PackingBlock(nn.Linear):
    def __init__(self, columns: int, rows: int, kind: str) -> None:
        super().__init__(columns, rows)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return KINDS[self.kind][0](torch.tanh(super().forward(x)))


@ranks(2)
@pytest.mark.parametrize("kind", some(KINDS, ("tuple", "dict", "frozen dataclass", "registered", "deep")))
def test_outputs_may_be_nested_in(world: World, kind: str) -> None:
    pair = twins(world, lambda: seeded(lambda: Packing(kind)), reshard_after_forward=True)
    for _ in range(2):
        pair.step()
    block = PackingBlock(6, 5, kind)
    expected = block(inputs())
    fullshard.fully_shard(block, mp_policy=fullshard.MixedPrecisionPolicy(output_dtype=torch.float64))
    found = block(inputs())
    assert type(found) is type(expected)
    assert KINDS[kind][1](found).dtype is torch.float64, "every tensor is found and cast"


class Hiding(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return Unknown(super().forward(x))


class Half(Hiding):
    """Returns one tensor where it is seen and another in a closure."""

    def forward(self, x: Tensor) -> Any:
        y = nn.Linear.forward(self, x)
        return y.detach().requires_grad_(), lambda: y


@ranks(2)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_an_output_hidden_behind_another_is_an_error(world: World, requires_grad: bool) -> None:
    block = Half(6, 5)
    model = nn.Sequential(nn.Linear(6, 6), block)
    fullshard.fully_shard(block, reshard_after_forward=True)
    fullshard.fully_shard(model, reshard_after_forward=True)
    loss = model(inputs().requires_grad_(requires_grad))[1]().sum()
    with pytest.raises(RuntimeError, match=str(RELEASED)):
        loss.backward()


@ranks(2)
def test_after_a_hidden_output_the_model_can_be_reset(world: World) -> None:
    model = seeded(lambda: Half(6, 5))
    fullshard.fully_shard(model, reshard_after_forward=True)
    with pytest.raises(RuntimeError):
        model(inputs().requires_grad_())[1]().sum().backward()
    model.reset_iter_state()
    with torch.no_grad():
        assert_close(model(inputs())[0], seeded(lambda: nn.Linear(6, 5))(inputs()), "output")


@ranks(2)
def test_a_hidden_output_is_no_error_where_parameters_are_there(world: World) -> None:
    model, reference = seeded(lambda: Hiding(6, 5)), seeded(lambda: Hiding(6, 5))
    fullshard.fully_shard(model)  # the root stays unsharded
    weight = model.weight
    model(inputs()).value.sum().backward()
    reference(inputs()).value.sum().backward()
    assert_close(kept(weight.grad), reference.weight.grad, "gradient")


class ReturnsView(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, 1:7]


class InPlace(nn.Module):
    """Changes the outputs of its blocks in place, which may be views."""

    def __init__(self, kind: type[nn.Linear], rows: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind(6, rows), kind(6, rows)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x += 1
            x.mul_(2)
        return x


@ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(("kind", "rows"), [(ReturnsView, 8), (nn.Linear, 6)], ids=["view", "all"])
def test_an_operation_in_place_on_an_output_that_is_a_view(
    world: World, reshard: bool, kind: type[nn.Linear], rows: int
) -> None:
    pair = twins(world, lambda: seeded(lambda: InPlace(kind, rows)), reshard_after_forward=reshard)
    for _ in range(3):
        pair.step()


class Takes(nn.Linear):
    """Takes tensors in containers and keyword arguments, and returns several."""

    def forward(self, a: dict[str, Tensor], *, b: list[Tensor]) -> tuple[Tensor, Tensor]:
        y = super().forward(a["x"] + b[0])
        return torch.tanh(y), y.exp()


class Passes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6), Takes(6, 5)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.blocks[0](x)
        return self.blocks[1]({"x": y}, b=[y.exp()])


@ranks(2)
@pytest.mark.parametrize("used", [0, 1])
def test_only_one_of_several_outputs_is_used(world: World, used: int) -> None:
    pair = twins(world, lambda: seeded(Passes), reshard_after_forward=True)
    for _ in range(2):
        pair.step(lr=1e-3, loss=lambda model, x: model(x)[used].sum())


class Fails(nn.Linear):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.fails:
            self.fails = False
            raise ValueError("one forward fails")
        return y


class Catches(nn.Module):
    """Runs a block again, or goes on without it, if it raises."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.blocks, self.again = nn.ModuleList([nn.Sequential(Fails(6, 6), Fails(6, 6)) for _ in range(2)]), again

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            try:
                x = block(x)
            except ValueError:
                x = block(x) if self.again else x
        return x


@ranks(2)
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_forward_whose_error_the_model_caught_is_over(world: World, again: bool, wrapped: bool) -> None:
    pair = twins(world, lambda: seeded(lambda: Catches(again)))
    model = wrap_blocks()(OURS["fullshard"], seeded(lambda: Catches(again))) if wrapped else pair.sharded
    for trains in (False, True, False):
        for each in (model, pair.whole):
            next(module for module in each.modules() if isinstance(module, Fails)).fails = True
        with torch.set_grad_enabled(trains):
            assert_close(model(inputs()), pair.whole(inputs()), "output")
        assert trains or all(not group.full.state.is_unsharded for group in groups_of(model)[1:])
    if not wrapped:
        pair.step()


@ranks(2)
def test_outputs_that_are_leaves_get_no_hooks(world: World) -> None:
    class Latent(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x) + latent, latent

    latent = torch.zeros(5, requires_grad=True)
    model = seeded(lambda: Latent(6, 5))
    fullshard.fully_shard(model, reshard_after_forward=True)
    for _ in range(3):
        sum(output.sum() for output in model(inputs().requires_grad_())).backward()
        assert not latent._backward_hooks
        assert unit_of(model).state is IDLE  # type: ignore[union-attr]


@ranks(2)
def test_two_roots_share_a_trunk(world: World) -> None:
    trunk, heads = nn.Linear(6, 6), [nn.Linear(6, 3), nn.Linear(6, 4)]
    plain = copy.deepcopy([trunk, *heads])
    fullshard.fully_shard(trunk)
    roots = [fullshard.fully_shard(nn.Sequential(trunk, head)) for head in heads]
    references = [nn.Sequential(plain[0], head) for head in plain[1:]]
    weights = [trunk.weight, plain[0].weight]
    for order in ((0, 1), (1, 1), (0, 1)):
        for one, batch in enumerate(order):
            roots[one](inputs(batch + world.rank)).square().sum().backward()
            for rank in range(world.size):
                (references[one](inputs(batch + rank)).square().sum() / world.size).backward()
        assert_close(kept(weights[0].grad), weights[1].grad, "gradient")
        with torch.no_grad():
            for weight in weights:
                weight -= 0.01 * weight.grad  # type: ignore[operator]
