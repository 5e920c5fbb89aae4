"""Where a picture of groups has the parts of each rank."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor import Shard

import fullshard
from fullshard.report import pictures
from fullshard.report.explain import Explanation, explain
from fullshard.report.pictures import _LETTER, _label, _parts


def rows(param: nn.Parameter) -> Shard:
    return Shard(0)


def columns(param: nn.Parameter) -> Shard:
    return Shard(1)


def flat(model: nn.Module) -> nn.Module:
    return fullshard.FullyShardedDataParallel(model, use_orig_params=True, device_id="cpu")


def linear(shard: Callable[[nn.Module], nn.Module], ranks: int = 4) -> Explanation:
    return explain(lambda: shard(nn.Linear(8, 6, bias=False)), ranks=ranks)


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "rows": lambda model: fullshard.fully_shard(model, shard_placement_fn=rows),
    "columns": lambda model: fullshard.fully_shard(model, shard_placement_fn=columns),
    "flat": flat,
}
#: By way, where the parts of rank 1 of 4 begin and how long they are.
OF_RANK_1 = {
    "rows": [(2 / 6, 2 / 6)],  # 6 rows are 2, 2, 2 and 0
    "columns": [((row + 2 / 8) / 6, 2 / 8 / 6) for row in range(6)],
    "flat": [(1 / 4, 1 / 4)],
}


@pytest.mark.parametrize("way", WAYS)
def test_the_parts_of_all_ranks_are_the_parameter(way: str) -> None:
    (group,) = linear(WAYS[way]).groups
    (param,) = group.parameters
    parts = list(_parts(group, param))
    assert [each[1:] for each in parts if each[0] == 1] == [pytest.approx(each) for each in OF_RANK_1[way]]
    end = 0.0
    for _, first, length in sorted(parts, key=lambda each: each[1]):
        assert first == pytest.approx(end)
        end = first + length
    assert end == pytest.approx(1)


def test_a_parameter_that_each_rank_has_whole_is_drawn_as_this_ranks() -> None:
    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(nn.Linear(1, 1).weight.detach().reshape(()))

    (group,) = explain(lambda: fullshard.fully_shard(Gain()), ranks=4, rank=2).groups
    assert list(_parts(group, group.parameters[0])) == [(2, 0, 1)]


def test_each_part_has_the_number_of_its_rank_in_its_middle_and_all_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure))
    linear(WAYS["rows"], ranks=3).picture(tmp_path / "groups.png")
    (axes,) = drawn[0].axes
    numbers = {text.get_text(): text.get_position() for text in axes.texts if text.get_text().isdecimal()}
    assert [x for x, _ in numbers.values()] == pytest.approx([1 / 6, 3 / 6, 5 / 6])
    assert [*numbers] == ["0", "1", "2"]
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    for bar in axes.patches:
        assert left <= bar.get_x() <= bar.get_x() + bar.get_width() <= right
        assert bottom <= bar.get_y() <= bar.get_y() + bar.get_height() <= top


class Named(nn.Module):
    """A parameter with a name that needs two lines, a frozen one, and one that is too narrow for a name."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"query_key_and_value": nn.Linear(10, 20, bias=False)})
        self.mlp = nn.Linear(80, 8)
        self.mlp.weight.requires_grad_(False)


def test_names_say_the_module_and_frozen_parameters_look_different(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure))
    explain(lambda: fullshard.fully_shard(Named()), ranks=2).picture(tmp_path / "groups.png")
    (figure,) = drawn
    (axes,) = figure.axes
    texts = [text.get_text() for text in axes.texts]
    assert "attention.\nquery_key_and_value.weight\n20 x 10" in texts
    assert "mlp.weight\n8 x 80" in texts
    assert "too narrow for a name: mlp.bias (8)" in texts
    of_bias = [bar for bar in axes.patches if bar.get_width() < _LETTER]
    assert [(bar.get_linewidth(), bar.get_hatch()) for bar in of_bias] == [(0, None)] * 2, "they look like padding"
    looks = {(bar.get_facecolor(), bar.get_hatch()) for bar in axes.patches}
    (legend,) = figure.legends
    patches = dict(zip((text.get_text() for text in legend.texts), legend.get_patches(), strict=True))
    assert list(patches) == ["trained", "frozen", "part of rank 0", "part of rank 1", "padding"]
    assert {(patch.get_facecolor(), patch.get_hatch()) for patch in patches.values()} <= looks
    assert len({(patch.get_facecolor(), patch.get_hatch()) for patch in patches.values()}) == len(patches)


def test_names_break_only_after_dots_and_have_their_shape_where_it_fits() -> None:
    name = "self_attn.q_proj.weight"
    assert _label(name, "64 x 64", 30) == f"{name}\n64 x 64"
    assert _label(name, "64 x 64", 18) == "self_attn.q_proj.\nweight\n64 x 64"
    assert _label(name, "64 x 64", 11) == "self_attn.\nq_proj.\nweight"
    assert _label(name, "64 x 64", 9) == ""


def test_all_colours_are_distinct_in_grey_or_have_another_hatch() -> None:
    for looks in (pictures.STATES, pictures.MEMORY, dict(enumerate(pictures.RANKS))):
        for one, other in combinations(looks.values(), 2):
            assert one.hatch != other.hatch or abs(lightness(one) - lightness(other)) > 0.1


def lightness(look: pictures.Look) -> float:
    """From 0 for black to 1 for white."""
    from matplotlib.colors import to_rgb  # a second of each test run's begin

    red, green, blue = to_rgb(look.color)
    return 0.299 * red + 0.587 * green + 0.114 * blue
