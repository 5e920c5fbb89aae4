"""Snapshots that these tests take leave out what a test run imports."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from fullshard.report import snapshot

_WHOLE = snapshot._SKIPPED, snapshot._is_skipped


#: Their objects lead from a test's mark to all tests.
_OF_TESTS = {"_pytest", "pytest", "pluggy", "hypothesis", "xdist", "execnet"}


def _is_skipped(value: Any) -> bool:
    cls = type(value)
    if issubclass(cls, ModuleType):
        name = str(vars(value).get("__name__"))
        if name.startswith("tests.") and not name.startswith("tests.report."):
            return True
    return str(cls.__module__).partition(".")[0] in _OF_TESTS or _WHOLE[1](value)


@pytest.fixture(scope="package", autouse=True)
def small_snapshots() -> Iterator[None]:
    """All modules of all tests, and pytest's own, are 400,000 objects: a walk over them takes seconds."""
    imported = {name.partition(".")[0] for name in sys.modules} - {"__main__", "tests"}
    with mock.patch.multiple(snapshot, _SKIPPED=_WHOLE[0] | imported, _is_skipped=_is_skipped):
        yield


@pytest.fixture
def whole_snapshots(small_snapshots: None) -> Iterator[None]:
    """A snapshot of all that the process has imported, as users have it."""
    with mock.patch.multiple(snapshot, _SKIPPED=_WHOLE[0], _is_skipped=_WHOLE[1]):
        yield
