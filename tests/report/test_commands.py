"""`fullshard explain`: its arguments, how it finds the function, and with which status it ends."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

from fullshard.report.commands import _above_0, _count, _from_0, _function, _Refused, add_explain

BUILD = """
from torch import nn

def build():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

name = "no function"
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "models_to_explain.py"
    path.write_text(BUILD)
    return path


def explain(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_explain(parser)
    options = parser.parse_args(arguments)
    return int(options.call(options))


@pytest.mark.parametrize("where", ["models_to_explain.py", "models_to_explain"])
def test_a_function_is_found_in_a_file_or_a_module(program: Path, where: str) -> None:
    assert len(_function(f"{where}:build")()) == 2  # type: ignore[arg-type]
    for name in ("name", "missing"):
        with pytest.raises(_Refused, match=f"{where} has no function '{name}'"):
            _function(f"{where}:{name}")


def test_an_explanation_is_printed(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(f"{program}:build", "--ranks", "4", "--rank", "3") == 0
    out = capsys.readouterr().out
    assert "Sequential over 4 ranks, seen from rank 3" in out
    assert "wait for communication" not in out


def test_numbers_for_an_estimate_add_one(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = ("--bandwidth", "1e9", "--peak-flops", "1e12", "--tokens", "5", "--latency", "1e-5")
    assert explain(f"{program}:build", "--ranks", "4", *numbers) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "each rank processes 5 tokens, computes at 100 % of 1 TFLOP/s and sends 1 GB/s" in printed
    assert "takes W - 1 steps (ring) of 10 us" in printed
    assert explain(f"{program}:build", "--ranks", "4", "--json", *numbers) == 0
    found = json.loads(capsys.readouterr().out)
    given = {"bandwidth": 1e9, "peak_flops": 1e12, "count": 5, "unit": "tokens", "latency": 1e-5}
    assert found["estimate"]["given"].items() >= given.items()
    assert found["ranks"] == 4
    assert explain(f"{program}:build", "--ranks", "4", "--json", "--optimizer-bytes", "0") == 0
    assert "estimate" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--bandwidth", "1e9"], "an estimate needs --peak-flops and --tokens too"),
        (["--rank", "4"], "--rank 4 is not one of 4 ranks, which are 0 to 3"),
        (["--rank", "-1"], "--rank -1 is not one of 4 ranks"),
    ],
)
def test_wrong_use_ends_with_2_and_says_what_is_wrong(
    program: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert explain(f"{program}:build", "--ranks", "4", *arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"fullshard explain: {says}")


@pytest.mark.parametrize(
    ("picture", "says"),
    [("no/such/directory.svg", "cannot be drawn"), ("groups.xyz", "cannot be drawn"),
     ("groups.svg", "is not drawn: it needs matplotlib: pip install 'fullshard[report]'")],
)  # fmt: skip
def test_a_picture_that_cannot_be_drawn_does_not_keep_the_explanation(
    program: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, picture: str, says: str
) -> None:
    if picture == "groups.svg":
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert explain(f"{program}:build", "--ranks", "1", "--picture", picture) == 2
    printed = capsys.readouterr()
    assert " over 1 rank, seen from rank 0: " in printed.out
    assert printed.err.startswith(f"fullshard explain: {picture} {says}")


@pytest.mark.parametrize("function", ["build", "missing.py:build", "no_such_module:build", "models_to_explain.py:x"])
def test_a_function_that_is_not_there_ends_with_2(
    program: Path, capsys: pytest.CaptureFixture[str], function: str
) -> None:
    assert explain(function, "--ranks", "4") == 2
    assert capsys.readouterr().err.startswith(f"fullshard explain: {function} names no function: ")


def test_numbers_are_read_in_their_bounds() -> None:
    assert (_above_0("1e9"), _count("5"), _from_0("0")) == (1e9, 5, 0.0)
    for read, text, what in (
        (_above_0, "0", "a number above 0"),
        (_above_0, "nan", "a number above 0"),
        (_count, "0", "a whole number above 0"),
        (_count, "1.5", "a whole number above 0"),
        (_from_0, "-1", "a number of 0 or more"),
        (_from_0, "x", "a number of 0 or more"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=f"expected {what}, got '{text}'"):
            read(text)
