"""Every optimizer of torch and torchao goes on from a checkpoint like the uninterrupted run, or is refused by name.

The table of ``docs/how-to/checkpoints.md`` says which: a failing test shows the row as it should be.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import checkpoint
from fullshard.checkpoint import CheckpointError, remote
from fullshard.checkpoint.compare import compare
from fullshard.checkpoint.manifest import TensorKind
from fullshard.wrapper.fsdp import FullyShardedDataParallel
from tests.checkpoint import stores  # noqa: F401  (makes faulty:// known)
from tests.checkpoint.cases import CPU, quiet
from tests.checkpoint.test_save import APIS, run
from tests.harness import RankPool, World
from tests.harness.models import seeded, shard_each

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "checkpoints.md"
OF_TORCH = sorted(
    name
    for name in torch.optim.__all__
    if isinstance(kind := getattr(torch.optim, name), type) and kind is not torch.optim.Optimizer
)
OF_TORCHAO = ["Adam4bit", "Adam8bit", "AdamFp8", "AdamW4bit", "AdamW8bit", "AdamWFp8"]
#: Rows of the table, which the quick lane loads on some of the ranks and front ends.
QUICK = ["Adafactor"]
WRAPPED = APIS[1:]

ANY, SAME = "any ranks and front end", "the same ranks and sharding"
REFUSED = {
    "build": "no: its constructor refuses",
    "step": "no: its `step()` raises an error",
    "save": "no: `save` refuses",
}


def build() -> nn.Sequential:
    """The weight in the middle is large enough for torchao to quantize its state, on two ranks and not on three."""
    return nn.Sequential(nn.Linear(6, 128), nn.Linear(128, 128, bias=False), nn.Linear(128, 4))


def sharded(api: str, seed: int) -> Any:
    model: Any = seeded(build, seed)
    if api == "fully_shard":
        return shard_each(*model, model)
    how: dict[str, Any] = {"device_id": CPU, "use_orig_params": api == "fragments"}
    with quiet():
        for at, layer in enumerate(model):
            model[at] = FullyShardedDataParallel(layer, **how)
        return FullyShardedDataParallel(model, **how)


def optimizer_of(model: nn.Module, name: str) -> Any:
    if name in OF_TORCHAO:
        import torchao.optim

        return getattr(torchao.optim, name)(model.parameters(), lr=1e-2)
    params = list(model.parameters())
    if name == "Muon" and isinstance(params[0], DTensor):
        params = [param for param in params if param.ndim == 2]  # as its documentation asks for
    return getattr(torch.optim, name)(params, lr=1e-2)


def train(model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:

        def closure(step: int = step) -> Tensor:
            batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            loss: Tensor = (model(batch) - 1).square().mean()
            loss.backward()
            return loss

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "compile", lambda function, **_: function)  # takes long, for the same values
            if isinstance(optimizer, torch.optim.LBFGS):
                loss = optimizer.step(closure)
            else:
                loss = closure()
                optimizer.step()
        losses.append(loss.item())
    return losses


def prepared(api: str, name: str, seed: int, steps: range) -> tuple[Any, Any] | str:
    """A model and an optimizer after some steps, or what could not be done."""
    model = sharded(api, seed)
    try:
        optimizer = optimizer_of(model, name)
    except ValueError:
        return "build"
    try:
        train(model, optimizer, steps)
    except RuntimeError:
        return "step"
    return model, optimizer


def save_and_go_on(world: World, folder: Path, api: str, name: str) -> list[float] | str:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        made = prepared(api, name, 0, range(2))
    if isinstance(made, str):
        return made
    warned = any(f"{name} sums over whole parameters" in str(each.message) for each in told)
    assert warned == (name in ("Adafactor", "LBFGS") and api in WRAPPED)
    try:
        checkpoint.save(folder, *made, step=2)
    except CheckpointError as error:
        return f"save: {error}"
    return train(*made, range(2, 5))


def load_and_go_on(world: World, folder: Path, api: str, name: str, again: Path) -> list[float] | str:
    with quiet():
        made = prepared(api, name, 3, range(7, 8))
    if isinstance(made, str):
        return made
    try:
        checkpoint.load(folder, *made)
    except CheckpointError as error:
        return f"load: {error}"
    try:
        checkpoint.save(again, *made, step=2)
    except CheckpointError as error:
        return f"save: {error}"
    return train(*made, range(2, 5))


def resumed(pool: RankPool, folder: Path, api: str, name: str, everywhere: bool) -> str:
    """What the table says of an optimizer that was saved by this front end on two ranks."""
    losses = run(pool, save_and_go_on, 2, folder, api, name)[0]
    if isinstance(losses, str):
        stage, _, why = losses.partition(": ")
        assert not why or re.search(r"the state '[\w.]+' of parameter '\d.weight' (has the shape|is a OptimState)", why)
        return REFUSED[stage]
    refused = set()
    others = [each for each in APIS if each != api]
    pairs = product(APIS, (1, 2, 3)) if everywhere else ((api, 2), (others[0], 1), (others[1], 3))
    for reads, size in pairs:
        again = folder / f"{reads}-{size}"
        found = run(pool, load_and_go_on, size, folder, reads, name, again)[0]
        if found[:4] == "load":
            assert re.search(r"has 'optimizer\.state\.\d\.\w+\.\w+', .*for different parts of parameters", found)
            refused.add((reads, size))
        elif found not in ("build", "step"):
            check(folder, again)
            if name == "Adafactor" and reads != api:
                continue  # it computes differently on a flat parameter, of which its first step warns
            how = 1e-3 if name == "Muon" else 1e-6  # Muon computes in bfloat16, whose sums depend on the ranks
            assert found == (losses if (reads, size) == (api, 2) else pytest.approx(losses, rel=how)), (reads, size)
    assert (api, 2) not in refused
    return SAME if refused else ANY


def check(one: Path, other: Path) -> None:
    """Two checkpoints have the same values in everything."""
    first, second = checkpoint.latest(one), checkpoint.latest(other)
    assert first is not None
    assert second is not None
    with first, second:
        found = compare(first, second)
    assert found.pop("equal") > 3
    assert not any(found.values()), found


def rows() -> Iterator[tuple[str, list[str]]]:
    """The names and the cells of the rows of the page's table."""
    text = PAGE.read_text().partition("<!-- begin optimizers -->")[2].partition("<!-- end optimizers -->")[0]
    for line in text.strip().splitlines()[2:]:
        names, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for name in names.split(", "):
            yield name.removeprefix("torchao's "), cells


def test_the_table_has_every_optimizer_once() -> None:
    assert sorted(name for name, _ in rows()) == sorted(OF_TORCH + OF_TORCHAO)


@pytest.mark.parametrize(
    ("name", "everywhere"),
    [
        *(pytest.param(name, False, id=name) for name in QUICK),
        *(pytest.param(name, True, id=f"{name} everywhere", marks=pytest.mark.slow) for name in OF_TORCH + OF_TORCHAO),
    ],
)
def test_an_optimizer_goes_on_as_the_table_says(
    rank_pool: RankPool, tmp_path: Path, name: str, everywhere: bool
) -> None:
    if name in OF_TORCHAO:
        pytest.importorskip("torchao", reason="torchao is not installed")
    found = {api: resumed(rank_pool, tmp_path / api, api, name, everywhere) for api in APIS}
    assert found["flat"] == found["fragments"]
    assert [found["fully_shard"], found["flat"]] == dict(rows())[name]


def save_split(world: World, url: str, api: str) -> list[float]:
    """Into a store whose objects are so small that each rank's part of a matrix is split into several."""
    with pytest.MonkeyPatch.context() as patch, quiet():
        patch.setattr(remote.ObjectPartial, "largest", 4096.0)
        model, optimizer = prepared(api, "Adafactor", 0, range(2))
        checkpoint.save(url, model, optimizer, step=2)
        return train(model, optimizer, range(2, 5))


def load_split(world: World, url: str, api: str) -> list[float] | str:
    with quiet():
        model, optimizer = prepared(api, "Adafactor", 3, range(7, 8))
        try:
            checkpoint.load(url, model, optimizer)
        except CheckpointError as error:
            return str(error)
        return train(model, optimizer, range(2, 5))


@pytest.mark.slow
@pytest.mark.parametrize("api", WRAPPED)
def test_adafactor_goes_on_from_parts_that_a_store_has_split(rank_pool: RankPool, tmp_path: Path, api: str) -> None:
    url = f"faulty://{tmp_path}/run"
    losses = run(rank_pool, save_split, 2, url, api)[0]
    assert len([*tmp_path.glob("run/*/__0_*.distcp")]) > 4
    assert run(rank_pool, load_split, 2, url, api)[0] == losses
    for size in (1, 3):
        assert "for different parts of parameters" in run(rank_pool, load_split, size, url, api)[0]


def test_parts_that_are_the_halves_of_those_that_were_saved_are_different_parts() -> None:
    """A store has split each rank's two rows into single rows, as four ranks would have them."""
    pieces = [(f"__{row // 2}_{row}.distcp", 32, 0, (row, 0), (1, 8)) for row in range(4)]
    kind = TensorKind(torch.float32, (4, 8), pieces, [[0]] * 4)
    assert kind.parts() == {((0, 0), (2, 8)), ((2, 0), (2, 8))}
