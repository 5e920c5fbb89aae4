"""Jobs of one process, in that of the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

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


@pytest.fixture
def lock_is_free(alone: Elastic) -> Callable[[], bool]:
    """Whether the threads beside training can take the lock of the job."""

    def is_free() -> bool:
        with ThreadPoolExecutor(1) as other:
            is_taken = other.submit(alone._changed.acquire, timeout=5).result()
            other.submit(alone._changed.release).result()
        return is_taken

    return is_free
