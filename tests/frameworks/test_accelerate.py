"""accelerate, with either of torch's FSDPs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.run import cases, run

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

#: What changes no number, or what torch's cannot do where there are CPUs only.
APART = ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT", "recompute", "offload", "low_memory")
KINDS = {"1": ["FULL", "SHARDED", "LOCAL"], "2": ["FULL", "SHARDED"]}


def test_trains_saves_and_resumes(tmp_path: Path) -> None:
    cases("accelerate", tmp_path, ["1-FULL_STATE_DICT", "2-SHARDED_STATE_DICT"], apart=APART)


@pytest.mark.slow
@pytest.mark.parametrize("version", KINDS)
def test_options(tmp_path: Path, version: str) -> None:
    """Flat parameters are those of the wrapper only; loading on one rank is left to fully_shard on CPUs."""
    options = ["SHARDED_STATE_DICT", "SHARDED_STATE_DICT-recompute-tied", "FULL_STATE_DICT-accumulate"]
    options += ["SHARDED_STATE_DICT-offload"]
    options += [f"{kind}_STATE_DICT-flat" for kind in KINDS["1"]] if version == "1" else ["FULL_STATE_DICT-low_memory"]
    cases("accelerate", tmp_path, [f"{version}-{each}" for each in options], apart=APART)


@pytest.mark.slow
def test_low_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With collectives of the backend, which round as torch's do; without, sums are rounded once."""
    monkeypatch.setenv("FULLSHARD_TRANSPORT", "collective")
    options = ["FULL_STATE_DICT-bf16-accumulate", "FULL_STATE_DICT-bf16-bf16_weights"]
    cases("accelerate", tmp_path, [f"{version}-{each}" for version in KINDS for each in options], apart=APART)


@pytest.mark.slow
@pytest.mark.parametrize("version", KINDS)
def test_compiled(tmp_path: Path, version: str) -> None:
    cases("accelerate", tmp_path, [f"{version}-FULL_STATE_DICT-compile"], apart=APART)


@pytest.mark.slow
def test_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    """What two ranks saved, one reads. All ranks see the same batches, so that their number changes no loss."""
    names = [f"{version}-{kind}_STATE_DICT-same_batches" for version in KINDS for kind in KINDS["2"]]
    two = run("accelerate", tmp_path, *names)
    one = run("accelerate", tmp_path, *names, "resume", ranks=1)
    for name in names:
        for key in ("resumed", "exported"):
            assert one[name][key] == pytest.approx(two[name][key], rel=1e-5), (name, key)
