"""How sizes, values and tables are printed, and that what comes from a file does no harm to a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fullshard import checkpoint
from fullshard.checkpoint import Checkpoint
from fullshard.checkpoint.display import _shown, print_json, print_lines, print_table, progress, value_of


def test_values_are_shown_as_json_can_hold_them(tmp_path: Path) -> None:
    deep: object = 0
    for _ in range(70):
        deep = [deep]
    state = {"plain": {1: (2, 3), None: 4}, "long": "x" * 70_000, "number": 2**300, "deep": deep}
    checkpoint.save(tmp_path, nn.Linear(1, 1), step=1, state=state)
    saved = Checkpoint(checkpoint.list_checkpoints(tmp_path)[0])
    found = {name: value_of(saved, f"state.{name}.0") for name in state}
    assert found["plain"] == {1: (2, 3), "None": 4}
    assert found["long"].endswith(" KiB)")
    assert found["number"] == hex(2**300)
    assert found["deep"].endswith(" in one another)")


def test_values_are_shown_that_are_nested_64_deep_and_no_deeper_and_have_few_parts() -> None:
    wraps: list[Callable[[Any], Any]] = [lambda value: [value], lambda value: (value,), lambda value: {"a": value}]
    for wrap in wraps:
        value: Any = 5
        for _ in range(64):
            value = wrap(value)
        assert _shown(value) == value
        with pytest.raises(RecursionError):
            _shown(wrap(value))
    assert _shown([None] * 65_535) == [None] * 65_535  # with the list itself
    with pytest.raises(RecursionError):
        _shown([None] * 65_536)


def test_a_value_that_cannot_be_read_is_described(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, nn.Linear(1, 1), step=1, state={"n": 1})
    path = checkpoint.list_checkpoints(tmp_path)[0]
    saved = Checkpoint(path)
    stored = saved.manifest.objects["state.n.0"]
    data = bytearray((path / stored.file).read_bytes())
    data[stored.start] ^= 1
    (path / stored.file).write_bytes(data)
    assert "not what was written" in value_of(saved, "state.n.0")


def test_a_table_is_aligned_and_has_no_escape_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["name", "size"], "lr", [["a\x1b[31m", 5], ["long name\nof two lines", None], ["", 1234]])
    assert capsys.readouterr().out.splitlines() == [
        "name                      size",
        "----------------------  ------",
        "a?[31m                       5",
        "long name of two lines       -",
        "                          1234",
    ]


def test_lines_and_json_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_lines("a\x1b", 5)
    print_json({"path": Path("a"), "n": [1]})
    first, second, *rest = capsys.readouterr().out.splitlines()
    assert (first, second) == ("a?", "5")
    assert json.loads("".join(rest)) == {"path": "a", "n": [1]}


def test_only_in_a_terminal_progress_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with progress("reading", 10) as advance:
        advance(5)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with progress("reading", 10) as advance:
        advance(10)
    assert "reading" in capsys.readouterr().err
