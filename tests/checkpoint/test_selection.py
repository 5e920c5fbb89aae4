"""Which part of a checkpoint is loaded, and under which names."""

from __future__ import annotations

import logging
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, get_state_dict

from fullshard import checkpoint
from fullshard.checkpoint import CheckpointError
from fullshard.checkpoint.selection import Selection
from tests.checkpoint.cases import assert_same, optimizer_of, train, whole, with_optimizer
from tests.checkpoint.state_dicts import Net
from tests.checkpoint.stores import FaultyStore
from tests.checkpoint.test_save import APIS, sharded
from tests.harness import World, ranks
from tests.harness.models import MLP, seeded
from tests.harness.slow import some

#: Fragments are cut as flat parameters are.
quick_apis = pytest.mark.parametrize("api", some(APIS, ("fully_shard", "flat")))


class Extended(nn.Module):
    """An MLP under the name of a module, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = MLP(), nn.Linear(3, 2)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.encoder.blocks

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(x))
        return out


def values(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, gathered, by their names in the plain model."""
    return {name: whole(each).clone() for name, each in get_model_state_dict(model).items()}


def moments(model: Any, optimizer: Any) -> dict[str, dict[str, Tensor]]:
    state: Any = get_optimizer_state_dict(model, optimizer)["state"]
    return {name: {key: whole(each).clone() for key, each in kept.items()} for name, kept in state.items()}


@ranks(2)
@quick_apis
def test_only_what_a_pattern_matches_is_loaded(world: World, tmp_path: Path, api: str) -> None:
    model = sharded(api, Net)
    train(model, optimizer_of(model, "SGD"), range(2))
    checkpoint.save(tmp_path, model, step=3)
    saved, other = values(model), sharded(api, partial(seeded, Net, 5))
    kept = values(other)
    for only, count in (("blocks.1.*", 7), (("blocks.1.*", "gain", "shift"), 9)):
        assert checkpoint.load(tmp_path, other, only=only) == {"step": 3}
        chosen = {name for name in saved if name.startswith("blocks.1.") or name in only}
        assert len(chosen) == count
        assert_same(values(other), {name: (saved if name in chosen else kept)[name] for name in saved})


@ranks(2)
@quick_apis
@pytest.mark.parametrize("through_dcp", [False, True])
def test_optimizer_state_follows_the_names(world: World, tmp_path: Path, api: str, through_dcp: bool) -> None:
    model, optimizer = with_optimizer(sharded(api), "AdamW", 2)
    folder = tmp_path / "saves"
    if through_dcp:
        both = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(both, checkpoint_id=folder)
    else:
        checkpoint.save(folder, model, optimizer, step=2)
    other = sharded(api, partial(seeded, Extended, 5))
    fresh = torch.optim.AdamW(other.parameters(), lr=0.5)
    train(other, fresh, range(4, 5))
    before, kept = values(other), moments(other, fresh)
    if api == "flat":  # the head and encoder.scale are one flat parameter
        with pytest.raises(CheckpointError, match=r"selects a part of .* one flat parameter with one optimizer state"):
            checkpoint.load(folder, other, fresh, only="encoder.*", rename={"": "encoder."})
        assert_same(values(other), before)
        return
    checkpoint.load(folder, other, fresh, only="encoder.*", rename={"": "encoder."})
    assert fresh.param_groups[0]["lr"] == 0.5
    assert_same(values(other), {**before, **{f"encoder.{name}": each for name, each in values(model).items()}})
    loaded = {f"encoder.{name}": each for name, each in moments(model, optimizer).items()}
    assert len(loaded) == 9
    assert_same(moments(other, fresh), {**kept, **loaded})


@ranks(2)
@quick_apis
def test_a_renamed_model_trains_on_the_same(world: World, tmp_path: Path, api: str) -> None:
    model, optimizer = with_optimizer(sharded(api, Extended), "AdamW", 2)
    checkpoint.save(tmp_path, model, optimizer, step=2)
    expected = train(model, optimizer, range(2, 4))

    def build() -> Extended:
        other = Extended()
        other.add_module("tail", other.head)
        del other.head
        other.forward = lambda x: other.tail(other.encoder(x))  # type: ignore[method-assign, operator]
        return other

    other = sharded(api, partial(seeded, build, 5))
    fresh = torch.optim.AdamW(other.parameters(), lr=0.5, eps=1.0)
    checkpoint.load(tmp_path, other, fresh, rename={"head": "tail"})
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]  # the group has the same parameters
    assert train(other, fresh, range(2, 4)) == expected


def test_the_longest_prefix_renames_and_ends_at_a_dot(tmp_path: Path) -> None:
    saved = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("enc", "encoder")})
    saved["enc"].add_module("deep", nn.Linear(2, 2))
    checkpoint.save(tmp_path, saved, step=1)
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "encoder": nn.Linear(2, 2)})
    checkpoint.load(tmp_path, model, rename={"enc": "a", "enc.deep.": "b."})
    for name, path in {"a": "enc", "b": "enc.deep", "encoder": "encoder"}.items():
        assert torch.equal(model[name].weight, saved.get_submodule(path).weight), name
    one = nn.Linear(2, 2)
    checkpoint.load(tmp_path, one, rename={"enc.weight": "bias_", "encoder.bias": "bias", "encoder.weight": "weight"},
                    only=["weight", "bias"])  # fmt: skip
    assert torch.equal(one.weight, saved["encoder"].weight)
    assert torch.equal(one.bias, saved["encoder"].bias)


@ranks(2)
def test_what_is_selected_must_fit(world: World, tmp_path: Path) -> None:
    model = sharded("fully_shard")
    checkpoint.save(tmp_path, model, step=1)
    other = sharded("fully_shard", Extended)
    before = values(other)
    for arguments, message in [
        ({"only": "encoder.*"}, r"lacks \['model.encoder.blocks.0.0.bias', .* and 6 more, which the model has"),
        ({"only": "*", "rename": {"": "encoder."}}, r"lacks \['model.head.bias', 'model.head.weight'\], which the"),
        ({"only": ["head.*", "tail.*"], "strict": False}, r"only=\['tail.\*'\] matches no name of a parameter"),
        ({"rename": {"body": "encoder"}}, r"no name in .* begins with \['body'\]"),
        ({"rename": {"blocks.0": "blocks.1"}}, r"rename gives .* of .* the same name 'model.blocks.1.0.weight'"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load(tmp_path, other, **arguments)  # type: ignore[arg-type]
        assert_same(values(other), before)
    with pytest.raises(CheckpointError, match=r"the model lacks \['model.scale_'\], which"):
        checkpoint.load(tmp_path, model, only="scale*", rename={"scale": "scale_"})
    with pytest.raises(ValueError, match="loads nothing"):
        Selection([], None, strict=True)


@ranks(2)
@quick_apis
def test_tensors_of_a_different_shape_are_named_and_kept_if_not_strict(world: World, tmp_path: Path, api: str) -> None:
    model, optimizer = with_optimizer(sharded(api), "AdamW", 2)
    checkpoint.save(tmp_path, model, optimizer, step=2)
    other, fresh = with_optimizer(sharded(api, partial(seeded, partial(MLP, (6, 7, 5, 5, 4)), 5)), "AdamW")
    before = values(other)
    differing = ["scale", "blocks.3.0.weight", "blocks.3.0.bias"]
    with pytest.raises(CheckpointError, match=r"has the shape \(4.*\) here, but \(3.*\) in .* and 0 more|differ, too"):
        checkpoint.load(tmp_path, other)
    assert_same(values(other), before)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        checkpoint.load(tmp_path, other, fresh, strict=False)
    assert_same(values(other), {**values(model), **{name: before[name] for name in differing}})
    told = [str(each.message) for each in warned if "different shapes" in str(each.message)]
    assert len(told) == (world.rank == 0)
    assert all(name in sentence for sentence in told for name in differing)
    expected = {name: each for name, each in moments(model, optimizer).items() if name not in differing}
    found = moments(other, fresh)
    assert_same({name: found[name] for name in expected}, expected)


def test_a_load_says_what_it_left_and_where_the_rest_comes_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = checkpoint.save(tmp_path, seeded(MLP), step=3)
    with caplog.at_level(logging.DEBUG, "fullshard"):
        checkpoint.load(tmp_path, Extended(), only="*.bias", rename={"": "encoder."}, strict=False)
    told = [record.getMessage() for record in caplog.records]
    assert f"step 3 is loaded from {path}; 7 of the model's 11 tensors keep their values" in told
    expected = {f"'encoder.blocks.{n}.0.bias' is loaded from 'model.blocks.{n}.0.bias'" for n in range(4)}
    assert expected == {text for text in told if "is loaded from 'model" in text}


def test_by_default_a_load_prints_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed() -> str:
        checkpoint.load(tmp_path, model)
        return capsys.readouterr().err

    model, log = nn.Linear(2, 2), logging.getLogger("fullshard")
    assert printed() == f"fullshard: nothing is loaded: {tmp_path} has no checkpoint\n"
    path = checkpoint.save(tmp_path, model, step=3)
    assert printed() == f"fullshard: step 3 is loaded from {path}\n"
    for level in (logging.INFO, logging.WARNING):  # it is in the log, or the program does not want it
        log.setLevel(level)
        try:
            assert printed() == ""
        finally:
            log.setLevel(logging.NOTSET)


def test_a_tied_parameter_is_selected_by_any_of_its_names(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
            self.second.weight = self.first.weight

    model, other = Tied(), Tied()
    checkpoint.save(tmp_path, model, step=1)
    checkpoint.load(tmp_path, other, only="second.weight")
    assert torch.equal(other.first.weight, model.first.weight)
    assert not torch.equal(other.first.bias, model.first.bias)


def test_parts_are_loaded_from_object_stores(tmp_path: Path) -> None:
    url, model, other = f"{FaultyStore.protocol}://{tmp_path}/run", seeded(MLP), seeded(Extended, 5)
    checkpoint.save(url, model, step=1)
    checkpoint.load(url, other, only="encoder.*", rename={"": "encoder."})
    assert_same(other.encoder.state_dict(), model.state_dict())
