"""Ends the processes that programs of frameworks run in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("tests.frameworks.run")

# Only a first import is rewritten, so this one has to follow.
from tests.frameworks.run import end_launchers  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def launchers() -> Iterator[None]:
    """What runs programs, with the frameworks that they imported."""
    yield
    end_launchers()
