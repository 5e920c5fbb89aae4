"""`fullshard explain` and `fullshard fit`: their arguments, how they find the function, and their exit status."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fullshard.report.commands import (
    _above_0,
    _count,
    _from_0,
    _function,
    _RefusedOptions,
    _value,
    add_explain,
    add_fit,
)

BUILD = """
import torch
from torch import nn

class Reads(nn.Linear):
    def forward(self, x):
        rows = x[x[:, 0] > 0]
        return super().forward(rows) * int(x.sum())

def read():
    return Reads(8, 8), torch.ones(4, 8)

def only(at):
    return read()[at]

def reads():
    return only(0)

def batch():
    return only(1)

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


def explain(*arguments: str, add: Callable[[argparse.ArgumentParser], None] = add_explain) -> int:
    parser = argparse.ArgumentParser()
    add(parser)
    options = parser.parse_args(arguments)
    return int(options.call(options))


@pytest.mark.parametrize("where", ["models_to_explain.py", "models_to_explain"])
def test_a_function_is_found_in_a_file_or_a_module(program: Path, where: str) -> None:
    assert len(_function(f"{where}:build")()) == 2  # type: ignore[arg-type]
    for name in ("name", "missing"):
        with pytest.raises(_RefusedOptions, match=f"{where} has no function '{name}'"):
            _function(f"{where}:{name}")


def test_an_explanation_is_printed(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(f"{program}:build", "--ranks", "4", "--rank", "3") == 0
    out = capsys.readouterr().out
    assert "Sequential over 4 ranks, seen from rank 3" in out
    assert "wait for communication" not in out
    assert f"fullshard rehearse --ranks 4 --rank 3 --bandwidth RATE {program}" in out
    numbers = ("--bandwidth", "45e9", "--peak-flops", "1e15", "--tokens", "5")
    assert explain(f"{program}:build", "--ranks", "4", "--device", "cuda", *numbers) == 0
    out = capsys.readouterr().out
    assert "Memory of a rank on a device" in out
    assert f"fullshard rehearse --ranks 4 --bandwidth 45GB/s {program}" in out


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
    ("picture", "says"),
    [
        pytest.param("no/such/directory.svg", "cannot be drawn", marks=pytest.mark.slow),
        ("groups.xyz", "cannot be drawn: Format 'xyz'"),
        ("groups.svg", "is not drawn: it needs matplotlib: pip install 'fullshard[report]'"),
    ],
)
def test_a_picture_that_cannot_be_drawn_does_not_keep_the_explanation(
    program: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, picture: str, says: str
) -> None:
    if picture == "groups.svg":
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert explain(f"{program}:build", "--ranks", "1", "--picture", picture) == 2
    printed = capsys.readouterr()
    assert " over 1 rank, seen from rank 0: " in printed.out
    assert printed.err.startswith(f"fullshard explain: {picture} {says}")


@pytest.mark.parametrize("command", [pytest.param("fit", marks=pytest.mark.slow), "explain"])
def test_what_a_forward_reads_may_be_given(program: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    add, given = add_fit, [f"{program}:read", "--ranks", "2", "--memory", "1GiB"]
    if command == "explain":
        add, given = add_explain, [f"{program}:reads", "--ranks", "2", "--batch", f"{program}:batch"]
    rows, number = (f"models_to_explain.py:{at}" for at in (7, 8))
    assert explain(*given, "--values", f"{rows}=3", "--values", f"{number}=1", add=add) == 0
    capsys.readouterr()
    if command == "explain":
        assert explain(*given, "--values", "2", add=add) == 0
        capsys.readouterr()
    assert explain(*given, "--values", f"{rows}=3", add=add) == 2
    says = f"fullshard {command}: it reads the value of a tensor at {number} (return super().forward(rows) * int(x.sum("
    assert capsys.readouterr().err.startswith(says)
    assert explain(*given, "--values", "2", "--values", f"{rows}=3", add=add) == 2
    assert "--values takes one number for all lines, or" in capsys.readouterr().err


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
        (_value, "model.py=3", "a number or FILE.py:LINE=NUMBER"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=f"expected {what}, got '{text}'"):
            read(text)


TIMING = "--bandwidth", "1e10", "--node-bandwidth", "1e8", "--peak-flops", "1e12", "--tokens", "1"


def test_a_table_has_a_row_for_each_number_of_hosts(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = "--hosts", "2", "64", "--ranks-per-node", "2"
    assert explain("models_to_explain:build", *hosts, *TIMING) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[-2:]] == [["2", "2"], ["64", "2"]]
    assert lines[-4].split()[:6] == ["hosts", "ranks", "on", "each", "a", "host"]
    assert explain("models_to_explain:build", *hosts, *TIMING, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [(each["hosts"], each["ranks_per_host"]) for each in found] == [(2, 2), (64, 2)]
    assert found[0]["by_host"] < found[1]["by_host"]
    assert explain("models_to_explain:build", "--ranks", "4", "--hosts", "2", *TIMING, "--json") == 0
    assert json.loads(capsys.readouterr().out)["estimate"]["by_host"] == found[0]["by_host"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hosts", "2"], "--ranks is missing, or --hosts and --ranks-per-node"),
        (["--hosts", "2", "4", "--ranks", "8"], "several numbers of --hosts need --ranks-per-node"),
        (["--hosts", "2", "4", "--ranks-per-node", "2"], "needs --bandwidth and --peak-flops and --tokens"),
        (["--hosts", "3", "--ranks", "8"], "hosts=3 must divide ranks=8"),
    ],
)
def test_hosts_that_make_no_sense_are_refused(
    program: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain("models_to_explain:build", *arguments) == 2
    assert said in capsys.readouterr().err
