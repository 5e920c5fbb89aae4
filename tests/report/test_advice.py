"""What is advised about how a model is sharded, and where nothing is."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from fullshard import MixedPrecisionPolicy
from fullshard.report.advice import Advice, _are, _few, advise
from fullshard.report.explain import explain
from fullshard.report.facts import ModelFacts
from fullshard.text import bytes_text

WIDTH = 2048


class Stack(nn.Module):
    """Blocks of 16 MiB each."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@cache
def facts(ranks: int = 4, by_block: bool = True, **options: Any) -> ModelFacts:
    def build() -> nn.Module:
        model = Stack()
        for block in model.blocks if by_block else ():
            fullshard.fully_shard(block, **options)
        return fullshard.fully_shard(model, **options)

    return explain(build, ranks=ranks).facts


def texts(given: ModelFacts) -> str:
    return "\n".join(map(str, advise(given)))


def test_a_model_that_is_sharded_by_its_blocks_needs_no_advice() -> None:
    assert texts(facts()) == ""


def test_one_group_for_all_blocks_is_too_few() -> None:
    found = texts(facts(by_block=False))
    assert "All parameters are one group" in found
    assert "4 repeated blocks (Linear)" in found
    assert "fully_shard_blocks(model)" in found


def test_what_is_in_no_group_is_named() -> None:
    found = replace(facts(), left_out=("head", "embedding", "norm"))
    assert texts(found).startswith("'head', 'embedding' and 1 more are each in no group: every rank keeps it whole")


def test_small_groups_are_named_if_they_communicate_and_reshard() -> None:
    found = facts()
    small = [replace(each, whole=2**20 - 1) if each.name == "blocks.1" else each for each in found.groups]
    assert texts(replace(found, groups=tuple(small))) == (
        "'blocks.1' is smaller than 1 MiB: exchanges this small cost more than they move. Leave the parameters to the "
        "module around, or shard several modules together: fully_shard([a, b])."
    )
    for change in ({"reshards": False}, {"communicates": False}, {"whole": 2**20}):
        kept = tuple(replace(each, **change) if each.name == "blocks.1" else each for each in small)
        assert "smaller than 1 MiB" not in texts(replace(found, groups=kept)), change


def test_a_group_that_is_most_of_the_model_is_to_be_cut() -> None:
    found = facts()
    large = tuple(replace(each, whole=2**26 + 1) if each.name == "blocks.2" else each for each in found.groups)
    assert "blocks.2 has 57 % of all bytes, and is whole while it runs. Shard its submodules first." in texts(
        replace(found, groups=large)
    )
    exactly = tuple(replace(each, whole=2**26) if each.name == "blocks.2" else each for each in found.groups)
    assert texts(replace(found, groups=exactly)) == ""


def test_padding_is_told_with_the_parameter_that_has_most_of_it() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(WIDTH, 2049, bias=False), nn.Linear(2049, WIDTH, bias=False))
        for layer in model:
            fullshard.fully_shard(layer)
        return fullshard.fully_shard(model)

    found = texts(explain(build, ranks=1000).facts)
    assert "Padding makes the shards of '0' and '1' larger, by 47 % in 1, most of it for '1.weight'" in found
    assert "of shape (2048, 2049), cut along dim 0" in found


@pytest.mark.parametrize(("ranks", "advised"), [(32, False), (64, True)])
def test_sums_in_low_precision_over_many_ranks_are_told(ranks: int, advised: bool) -> None:
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    found = facts(mp_policy=low, ranks=ranks)
    found = replace(found, groups=tuple(replace(each, adds_in_fp32=False) for each in found.groups))
    assert (f"are added up over {ranks} ranks in bfloat16" in texts(found)) is advised


@pytest.mark.parametrize(
    ("exact", "ranks", "says"),
    [(True, 100, "gives the same sums"), (False, 8, "rounds each sum 7 times more"), (False, 9, "")],
)
def test_gradients_that_travel_in_more_bytes_than_they_need_are_told(exact: bool, ranks: int, says: str) -> None:
    wide = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = facts(mp_policy=wide, ranks=ranks)
    found = replace(found, groups=tuple(replace(each, adds_in_fp32=exact) for each in found.groups))
    assert ("computed in bfloat16 and travel in float32" in texts(found)) is bool(says)
    assert says in texts(found)
    assert "are added up over" not in texts(found)  # they travel in fp32
    if says:
        more = sum(each.gradient * (ranks - 1) // ranks for each in found.groups if each.elements) // 2
        assert f"float32: {bytes_text(more)} more in a step" in texts(found)


def test_names_are_written_for_a_sentence() -> None:
    assert [_few(list(names)) for names in ("a", "ab", "abc", "abcd")] == [
        "'a'", "'a' and 'b'", "'a', 'b' and 1 more", "'a', 'b' and 2 more",
    ]  # fmt: skip
    assert (_are(["a"]), _are(["a", "b"])) == ("'a' is", "'a' and 'b' are each")
    assert str(Advice("A problem", "Do this")) == "A problem. Do this."


def with_root(whole: int, places: int = 1, share: float = 0.5, **change: Any) -> ModelFacts:
    """A model whose root has a group that stays whole, of these bytes and this share of all."""
    found = facts()
    block = found.groups[1]
    head = replace(
        block.parameters[0], name="inner.head.weight", places=("inner.head.weight", "tokens.weight")[:places]
    )
    rest = round(whole / share) - whole
    root = replace(block, name="", reshards=False, whole=whole, parameters=(head,), **change)
    blocks = tuple(replace(block, name=f"blocks.{number}", whole=rest // 2) for number in range(2))
    return replace(found, groups=(root, *blocks))


def test_a_root_that_stays_whole_is_told_with_its_largest_parameter() -> None:
    found = texts(with_root(2**24))
    assert "The root's group has 50 % of all bytes, mostly 'inner.head.weight', and stays whole" in found
    assert "fully_shard(model.inner.head)" in found


def test_a_root_that_is_tied_may_have_to_stay_whole() -> None:
    assert "It is tied and needed at both ends, so this may be what you want" in texts(with_root(2**24, places=2))


def test_a_root_that_is_small_or_a_small_share_is_not_told() -> None:
    for given in (
        with_root(2**24 - 2),
        with_root(2**24, share=0.099),
        with_root(2**24, communicates=False),
    ):
        assert "The root's group" not in texts(given)
    assert "The root's group" in texts(with_root(2**24, share=0.1))


@pytest.mark.parametrize(
    ("share", "padding", "told"), [(0.031, 2**20 + 1, True), (0.03, 2**20 + 1, False), (0.5, 2**20, False)]
)
def test_padding_is_told_above_its_bounds(share: float, padding: int, told: bool) -> None:
    found = facts()
    padded = replace(found.groups[1], padding=padding, content=round(padding / share))
    assert padded.padding_share == pytest.approx(share, rel=1e-3)
    groups = (found.groups[0], padded, *found.groups[2:])
    assert ("Padding makes" in texts(replace(found, groups=groups))) is told


def test_a_group_of_many_bytes_is_not_told_where_it_is_a_small_share() -> None:
    found = facts()
    groups = tuple(replace(each, whole=2**27) if each.elements else each for each in found.groups)
    assert "has 25 % of all bytes" not in texts(replace(found, groups=groups))


def test_a_parameter_that_is_tied_to_another_group_is_told_where_the_group_is_much_larger() -> None:
    found = facts()
    at = next(number for number, each in enumerate(found.groups) if each.name == "blocks.1")
    group = found.groups[at]
    tied = replace(group.parameters[0], places=("blocks.1.weight", "head.weight"))

    def told(whole: int, name: str = "head.weight") -> str:
        param = replace(tied, places=("blocks.1.weight", name))
        groups = [*found.groups]
        groups[at] = replace(group, parameters=(param,), whole=whole)
        return texts(replace(found, groups=tuple(groups)))

    much = 8 * tied.numel
    assert "'blocks.1.weight' is also 'head.weight', so all of blocks.1 is gathered for that module too" in told(
        much + 1
    )
    assert "is also" not in told(much)
    assert "is also" not in told(much + 1, "blocks.1.inner.weight")


def test_the_first_block_is_the_one_that_is_named() -> None:
    found = replace(facts(by_block=False), blocks=("layers.0", "layers.1"))
    assert "2 repeated blocks (layers.0)" in texts(found)
