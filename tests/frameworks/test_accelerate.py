"""accelerate, with either of torch's FSDPs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.run import row, run

pytest.importorskip("accelerate")

#: What changes no number, or what torch's cannot do where there are CPUs only.
APART = ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT", "flat", "recompute", "offload", "low-memory")


def accelerate(folder: Path, *options: str) -> None:
    row("accelerate", folder, *options, apart=APART)


@pytest.mark.parametrize("version", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_trains_saves_and_resumes(tmp_path: Path, version: str) -> None:
    accelerate(tmp_path, version, "FULL_STATE_DICT")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize(
    "options",
    [
        ("SHARDED_STATE_DICT",),
        ("SHARDED_STATE_DICT", "recompute", "tied"),
        ("FULL_STATE_DICT", "bf16", "accumulate"),
        ("FULL_STATE_DICT", "bf16", "bf16-weights"),
        ("SHARDED_STATE_DICT", "offload"),
        ("FULL_STATE_DICT", "compile"),
    ],
    ids=" ".join,
)
def test_options(tmp_path: Path, version: str, options: tuple[str, ...]) -> None:
    accelerate(tmp_path, version, *options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"])
def test_flat_parameters(tmp_path: Path, kind: str) -> None:
    accelerate(tmp_path, "1", kind, "flat")


@pytest.mark.slow
def test_loading_on_one_rank(tmp_path: Path) -> None:
    accelerate(tmp_path, "2", "low-memory")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_resumes_on_another_number_of_ranks(tmp_path: Path, version: str, kind: str) -> None:
    """What two ranks saved, one reads. All ranks see the same batches, so that their number changes no loss."""
    two = run("accelerate", tmp_path, version, kind, "same-batches")
    one = run("accelerate", tmp_path, version, kind, "same-batches", "resume", ranks=1)
    assert one["resumed"] == pytest.approx(two["resumed"], rel=1e-5)
    assert one["exported"] == pytest.approx(two["exported"], rel=1e-5)
