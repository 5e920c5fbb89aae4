"""Two tensors in one memory: sharding would part them, and is refused; what only lies in one storage is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import fullshard
from fullshard.overlaps import refuse_overlaps
from tests.harness import World, ranks
from tests.harness.wrapper import wrap


def test_strides_that_pass_each_other_share_no_byte() -> None:
    module = nn.Module()
    memory = torch.zeros(8)
    module.even, module.odd = nn.Parameter(memory[::2]), nn.Parameter(memory[1::2])
    assert {each.name for each in refuse_overlaps([module], {module.even})} == {"even"}
    module.both = nn.Parameter(memory[:2])
    with pytest.raises(ValueError, match="'even' and 'both' are two tensors in one memory"):
        refuse_overlaps([module], set())


class Tied(nn.Module):
    """An embedding and a head, in modules of their own, each with as many elements."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"embedding": nn.Embedding(6, 4), "middle": nn.Linear(4, 4)})
        self.head = nn.Linear(4, 6, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.inner["middle"](self.inner["embedding"](tokens)))
        return out


def by_data(model: Any) -> None:
    model.head.weight = nn.Parameter(model.inner.embedding.weight.data)


def frozen_beside_trained(model: Any) -> None:
    model.head.weight = nn.Parameter(model.inner.embedding.weight.data, requires_grad=False)


def by_loading(model: Any) -> None:
    state = dict.fromkeys(["inner.embedding.weight", "head.weight"], torch.randn(6, 4))
    model.load_state_dict(state, strict=False, assign=True)


def a_view(model: Any) -> None:
    model.head.weight = nn.Parameter(model.inner.embedding.weight.detach()[2:].t())


def a_buffer(model: Any) -> None:
    model.head.register_buffer("codes", model.inner.embedding.weight.data)


def crossing_columns(model: Any) -> None:
    whole = torch.randn(6, 8)
    model.inner.embedding.weight, model.head.weight = nn.Parameter(whole[:, :4]), nn.Parameter(whole[:, 3:7])


def as_one(model: Any) -> Any:
    return fullshard.fully_shard(model)


def apart(model: Any) -> Any:
    fullshard.fully_shard(model.inner.embedding)
    fullshard.fully_shard(model.head)
    return fullshard.fully_shard(model)


def the_first_only(model: Any) -> Any:
    fullshard.fully_shard(model.inner.embedding)
    return fullshard.fully_shard(model)


def wrapped(model: Any) -> Any:
    return wrap(fullshard, model, original=False)


def wrapped_apart(model: Any) -> Any:
    model.inner["embedding"] = wrap(fullshard, model.inner.embedding)
    model.head = wrap(fullshard, model.head)
    return wrap(fullshard, model)


@ranks(2)
@pytest.mark.parametrize("shard", [as_one, apart, the_first_only, wrapped, wrapped_apart])
def test_two_tensors_in_one_memory_are_refused_and_named(world: World, shard: Callable[[Any], Any]) -> None:
    named = r"'(inner\.embedding|head)\.\w+' and '(inner\.embedding|head)\.\w+'.*clone"
    for overlap in (by_data, frozen_beside_trained, by_loading, a_view, a_buffer, crossing_columns):
        model = Tied()
        overlap(model)
        with pytest.raises(ValueError, match=named):
            shard(model)


def tied(model: Any) -> None:
    model.head.weight = model.inner.embedding.weight


def both_frozen(model: Any) -> None:
    by_data(model)
    model.requires_grad_(False)


def from_one_vector(model: Any) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()).detach(), model.parameters())


def columns(model: Any) -> None:
    whole = torch.randn(6, 8)
    model.inner.embedding.weight, model.head.weight = map(nn.Parameter, whole.chunk(2, 1))


def a_buffer_of_one_value(model: Any) -> None:
    model.register_buffer("one", torch.ones(()).expand(6, 4))
    model.head.register_buffer("same", model.one)


@ranks(2)
@pytest.mark.parametrize("shard", [as_one, apart, wrapped_apart])
def test_what_shares_no_element_that_is_trained_is_sharded(world: World, shard: Callable[[Any], Any]) -> None:
    for share in (tied, both_frozen, from_one_vector, columns, a_buffer_of_one_value):
        model = Tied()
        share(model)
        expected = model(torch.arange(6))
        torch.testing.assert_close(shard(model)(torch.arange(6)), expected)


class Pair(nn.Module):
    def __init__(self, one: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.one, self.other = one, other

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.one(tokens) - self.other(tokens)
        return out


@ranks(2)
def test_a_model_that_shared_memory_before_it_was_sharded_is_a_model_of_its_own_after(world: World) -> None:
    student, teacher = Tied(), Tied()
    teacher.load_state_dict(student.state_dict(), assign=True)
    pairs = [Pair(apart(each), copy.deepcopy(each)) for each in (student, teacher)]
    for pair in pairs:
        assert not fullshard.fully_shard(pair)(torch.arange(6)).any()
