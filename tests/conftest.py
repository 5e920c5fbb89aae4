"""What pytest needs to run marked tests on ranks: the mark's meaning, and one pool of ranks for the whole session.

The mark is written `@ranks(...)`; see `tests.harness` for what a test may expect of it. The pool starts with the
first test that needs it, so a run without such tests costs nothing.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.harness")

# Only a first import is rewritten, so this one has to follow.
from tests.harness import RankPool, failure_report  # noqa: E402
from tests.harness.rank import run_test  # noqa: E402

_POOL = pytest.StashKey[RankPool]()
_RANKS = 4


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark, and make the pool, whose processes do not exist yet."""
    config.addinivalue_line("markers", "ranks(*sizes, timeout=60): run the test's body on ranks; see tests.harness")
    where = ["--rootdir", str(config.rootpath), "--import-mode", config.getoption("importmode")]
    if config.inipath is not None:
        where += ["-c", str(config.inipath)]
    config.stash[_POOL] = RankPool(_RANKS, where)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the ranks, as processes end, so that their coverage is saved."""
    config.stash[_POOL].close()


@pytest.fixture
def rank_pool(pytestconfig: pytest.Config) -> RankPool:
    """The session's pool, for a test that wants to look at the outcomes of ranks that fail."""
    return pytestconfig.stash[_POOL]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each world size of the mark."""
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is not None:
        metafunc.parametrize("world", mark.args, ids=[f"W{size}" for size in mark.args])


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body of a marked test on the ranks instead of here."""
    mark = pyfuncitem.get_closest_marker("ranks")
    if mark is None:
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments: dict[str, Any] = {name: value for name, value in pyfuncitem.funcargs.items() if name in names}
    size = arguments.pop("world")
    pool = pyfuncitem.config.stash[_POOL]
    outcomes = pool.run(run_test, size, pyfuncitem.obj, arguments, timeout=mark.kwargs["timeout"])
    if any(outcome.kind not in ("returned", "skipped") for outcome in outcomes):
        pytest.fail(failure_report(outcomes), pytrace=False)
    if skipped := [outcome.summary for outcome in outcomes if outcome.kind == "skipped"]:
        pytest.skip(skipped[0])
    return True
