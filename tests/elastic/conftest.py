"""Jobs of one process, in that of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fullshard.elastic import Elastic


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment in which a launcher starts one process."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
        monkeypatch.setenv(name, value)


@pytest.fixture
def alone(launched: None) -> Iterator[Elastic]:
    """A job of one process."""
    elastic = Elastic(replicas=1)
    yield elastic
    elastic.close()
