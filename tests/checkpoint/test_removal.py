"""Which checkpoints a save removes: none that somebody reads, and none that is broken."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from torch import nn

from fullshard import checkpoint
from fullshard.checkpoint import LatestN
from fullshard.checkpoint.manifest import name_of
from fullshard.checkpoint.removal import remove_older


def saved(directory: Path, steps: int) -> list[Path]:
    """Checkpoints of steps 1, 2 and so on."""
    model = nn.Linear(2, 2)
    for step in range(1, steps + 1):
        checkpoint.save(directory, model, step=step)
    return [directory / name_of(step) for step in range(1, steps + 1)]


def left(directory: Path) -> list[int]:
    """The steps of the checkpoints that are there."""
    return sorted(int(path.name.removeprefix("step-")) for path in directory.glob("step-*"))


def test_the_newest_are_kept_and_newer_ones_are_not_touched(tmp_path: Path) -> None:
    saved(tmp_path, 4)
    for of, keep, steps in ((4, 9, [1, 2, 3, 4]), (4, 3, [2, 3, 4]), (3, 1, [3, 4]), (4, 1, [4])):
        remove_older(tmp_path, name_of(of), [LatestN(keep)])
        assert left(tmp_path) == steps
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_what_is_not_whole_is_no_checkpoint_that_is_kept_and_stays_unless_it_is_a_replica(tmp_path: Path) -> None:
    _, broken, *_ = saved(tmp_path, 5)
    next(broken.glob("*.distcp")).unlink()
    remove_older(tmp_path, name_of(4), [LatestN(2)])
    assert left(tmp_path) == [2, 3, 4, 5]
    remove_older(tmp_path, name_of(4), [LatestN(2)], replicas=True)
    assert left(tmp_path) == [3, 4], "newer replicas are removed too"


def test_directories_of_other_programs_among_replicas_stay(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    for step, manifest in ((1, "damaged"), (8, "of another program"), (9, "")):
        (tmp_path / name_of(step)).mkdir(exist_ok=True)
        head = (tmp_path / name_of(2) / "manifest.json").read_text()[:64] if step == 1 else ""
        (tmp_path / name_of(step) / "manifest.json").write_text(head + manifest)
    (tmp_path / ".step-00000007.partial").mkdir()
    remove_older(tmp_path, name_of(2), [LatestN(1)], replicas=True)
    assert left(tmp_path) == [2, 8, 9]
    checkpoint.forget_replicas(tmp_path)
    assert left(tmp_path) == [8, 9]
    assert (tmp_path / ".step-00000007.partial").exists()


def test_a_link_is_not_removed(tmp_path: Path) -> None:
    first, second = saved(tmp_path, 2)
    first.rename(tmp_path / "elsewhere")
    first.symlink_to(tmp_path / "elsewhere")
    remove_older(tmp_path, second.name, [LatestN(1)])
    assert left(tmp_path) == [1, 2]
    assert checkpoint.load(first, nn.Linear(2, 2)) == {"step": 1}


def test_what_cannot_be_removed_is_told_and_the_next_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _, newest = saved(tmp_path, 3)
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path == first:
            raise PermissionError(1, "Operation not permitted")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.warns(UserWarning, match=f"{first} could not be removed: Operation not permitted"):
        remove_older(tmp_path, newest.name, [LatestN(1)])
    assert left(tmp_path) == [1, 3]


def test_a_save_below_a_step_that_remains_warns_once(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    text = f"step 5 is saved, but {tmp_path} has step 10, which a resumed run would load"
    checkpoint.save(tmp_path, model, step=10)
    with pytest.warns(UserWarning, match=text):
        checkpoint.save(tmp_path, model, step=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.save(tmp_path, model, step=6)


def test_a_newer_step_that_is_not_whole_is_no_reason_to_warn(tmp_path: Path) -> None:
    *_, broken = saved(tmp_path, 4)
    next(broken.glob("*.distcp")).unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.save(tmp_path, nn.Linear(2, 2), step=3, keep_last=1)
    with pytest.warns(UserWarning, match=f"step 2 is saved, but {tmp_path} has step 3, which"):
        checkpoint.save(tmp_path, nn.Linear(2, 2), step=2)
