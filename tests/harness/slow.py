"""Values of a parameter that the long lane alone has."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """Cases with the mark `slow`. A tuple is one value."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def some(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """All values, of which those that are not `quick` are slow."""
    return [value if value in quick else slow(value)[0] for value in values]
