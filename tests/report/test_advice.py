"""What is advised about how a model is sharded, and where nothing is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from fullshard import MixedPrecisionPolicy
from fullshard.report.advice import Advice, _are, _few, advise
from fullshard.report.explain import explain
from fullshard.report.facts import ModelFacts

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
        "'blocks.1' is smaller than 1 MiB: its exchanges cost more than they move. Let the module around it shard its "
        "parameters, or shard several together: fully_shard([a, b])."
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


def test_names_are_written_for_a_sentence() -> None:
    assert [_few(list(names)) for names in ("a", "ab", "abc", "abcd")] == [
        "'a'", "'a' and 'b'", "'a', 'b' and 1 more", "'a', 'b' and 2 more",
    ]  # fmt: skip
    assert (_are(["a"]), _are(["a", "b"])) == ("'a' is", "'a' and 'b' are each")
    assert str(Advice("A problem", "Do this")) == "A problem. Do this."
