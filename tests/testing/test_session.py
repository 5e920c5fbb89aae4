"""pytest's session on a rank."""

from __future__ import annotations

import pytest

from fullshard.testing import World
from fullshard.testing.session import RankSession
from tests.harness import ranks

MADE: list[str] = []


@pytest.fixture(scope="module")
def unpicklable() -> object:
    """Is made on each rank, once for all tests of the file."""
    MADE.append("unpicklable")
    return lambda: 3


@ranks(2)
@pytest.mark.parametrize("time", [1, 2])
def test_a_wide_fixture_that_cannot_be_sent_is_made_once_a_rank(world: World, unpicklable: object, time: int) -> None:
    assert MADE == ["unpicklable"]


@ranks(2)
def test_there_is_one_session_in_a_process(world: World, request: pytest.FixtureRequest) -> None:
    assert RankSession.current is not None
    assert request.config.pluginmanager.getplugin("fullshard-rank") is RankSession.current
    assert not request.config.pluginmanager.hasplugin("terminal")
