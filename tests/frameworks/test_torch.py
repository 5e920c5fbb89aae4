"""torch alone: its state dicts, and what else of torch works beside its FSDPs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.run import compare, row, run

#: What changes no number.
APART = ("full", "sharded", "flat", "recompute", "compile")


def test_trains_saves_and_resumes(tmp_path: Path) -> None:
    row("torch", tmp_path, "2", "sharded", apart=APART)


@pytest.mark.slow
@pytest.mark.parametrize("options", [("1", "sharded", "flat"), ("2", "full", "recompute", "compile")], ids=" ".join)
def test_options(tmp_path: Path, options: tuple[str, ...]) -> None:
    row("torch", tmp_path, *options, apart=APART)


@pytest.mark.slow
def test_replicas(tmp_path: Path) -> None:
    theirs = run("torch", tmp_path / "torch", "2", "sharded", "hybrid", "train-only", library="torch", ranks=4)
    ours = run("torch", tmp_path, "2", "sharded", "hybrid", ranks=4)
    compare(ours, theirs)
    assert ours["resumed"] == ours["uninterrupted"]


@pytest.mark.slow
@pytest.mark.parametrize(("saved_by", "kind"), [("torch", "full"), ("fullshard", "sharded")])
def test_one_library_goes_on_where_the_other_stopped(tmp_path: Path, saved_by: str, kind: str) -> None:
    saved = run("torch", tmp_path, "2", kind, library=saved_by)
    loaded = run("torch", tmp_path, "2", kind, "resume", library="fullshard" if saved_by == "torch" else "torch")
    assert (loaded["resumed"], loaded["exported"]) == (saved["uninterrupted"], saved["exported"])


@pytest.mark.slow
def test_pipelines(tmp_path: Path) -> None:
    theirs = run("pipeline", tmp_path / "torch", "Schedule1F1B", "train-only", library="torch", ranks=4)
    ours = run("pipeline", tmp_path, "Schedule1F1B", ranks=4)
    compare(ours, theirs)
    assert ours["resumed"] == ours["uninterrupted"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("later",)], ids=" ".join)
def test_the_memory_tracker_counts_the_bytes_of_parameters_and_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    """Shards and their gradients are torch's to the byte. Unsharded ones are what the slots of our pools have."""
    monkeypatch.setenv("FULLSHARD_TRANSPORT", "collective")
    theirs = run("memory", tmp_path / "torch", *options, library="torch")
    ours = run("memory", tmp_path, *options)
    assert ours["losses"] == theirs["losses"]
    assert ours["modules"].keys() == theirs["modules"].keys()
    assert ours["peak"].keys() == theirs["peak"].keys()
    for when, kind in (("peak", "Sharded Param"), ("now", "Sharded Param"), ("now", "OptState")):
        assert ours[when][kind] == theirs[when][kind], (when, kind)
    block = 4 * (256 * 512 + 512 + 512 * 256 + 256)
    for name, states in theirs["modules"].items():
        for state, (_, unsharded, _, gradients, unreduced) in states.items():
            mine = ours["modules"][name][state]
            if not state.startswith("Peak"):  # is seen in the middle of something
                assert unsharded <= mine[1] <= 2 * block, (name, state)  # one in use and one gathered ahead
                assert mine[3] == gradients, (name, state)
                assert unreduced // block <= mine[4] // block <= 2, (name, state)  # of autograd, and in a slot
