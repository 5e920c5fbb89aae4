"""Plans and explanations look for tensors that a program keeps. In a process of tests that is far more than in one of
users: only what the tests themselves hold is searched here."""

from __future__ import annotations

import sys

import pytest

from fullshard.report import snapshot


@pytest.fixture(autouse=True)
def only_tests_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {name.partition(".")[0] for name in sys.modules} - {"tests", "__main__"}
    monkeypatch.setattr(snapshot, "_SKIPPED", snapshot._SKIPPED | packages)
