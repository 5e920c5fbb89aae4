"""What pytest needs to run marked tests on ranks: the mark's meaning, and one pool of ranks for the whole session.

The mark is written `@ranks(...)`; see `tests.harness` for what a test may expect of it. The pool starts with the
first test that needs it, so a run without such tests costs nothing.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.register_assert_rewrite("tests.harness")

# Only a first import is rewritten, so this one has to follow.
from tests.harness import RankPool, failure_report  # noqa: E402
from tests.harness.compare import WITH_TORCH  # noqa: E402
from tests.harness.lanes import covering  # noqa: E402
from tests.harness.rank import SIMULATED, run_test  # noqa: E402

#: A store of torch looks up the names of its clients, once for each connection. Where the name server loses a request,
#: each costs 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
#: Tests of Triton's kernels, which need it, and a GPU or its interpreter (`make frameworks`, `make gpu`).
_RUNS_KERNELS = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = [] if _RUNS_KERNELS and find_spec("triton") else ["test_fused.py"]
_RANKS = 4
#: Folders of tests of which the quick lane takes every case: what they prove, others build on.
_WHOLE = ("buffer", "comm")
#: Tests of which it takes so many cases that each value is met.
_EACH_VALUE = re.compile(r"^tests/(wrapper|checkpoint|optim|parity/test_wrapper_|test_interop)")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which lane, how many random programs tests/fuzz runs, and which."""
    parser.addoption("--all", action="store_true", help="the long lane: everything; see tests.harness")
    group = parser.getgroup("fuzz", "random programs, see tests.fuzz")
    group.addoption("--programs", type=int, default=24, help="how many random programs to run")
    parser.addoption("--kills", type=int, help="at how many points of saves ranks are killed")
    group.addoption("--first-seed", type=int, default=0, help="the seed of the first random program")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marks, and let ranks know the lane."""
    config.addinivalue_line("markers", "ranks(*sizes, timeout=60): run the test's body on ranks; see tests.harness")
    config.addinivalue_line(
        "markers", "everywhere: in the quick lane too with all cases, world sizes and real transports"
    )
    if config.getoption("--all") or config.getoption("markexpr") not in ("", "not slow"):
        os.environ[WITH_TORCH] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let tests of a file follow each other by the number of their ranks: process groups are kept for the next one.

    Mark as slow, so that the long lane alone has it, what runs torch's own library alone (it proves the tests, and not
    ours), and of each test the cases whose values meet in other cases of it. Without ``--all`` and ``-m`` deselect what
    is slow, except tests that the command names: each of these runs, all of its cases if all are slow.
    """
    files = {item.path: number for number, item in reversed(list(enumerate(items)))}
    items.sort(key=lambda item: (files[item.path], _ranks_of(item)))
    chosen = set(map(id, _cases([item for item in items if not (_is_slow(item) or _runs_torch(item))])))
    for item in items:
        if id(item) not in chosen and not _is_slow(item):
            item.add_marker(pytest.mark.slow)
    if not config.getoption("--all") and not config.getoption("markexpr"):
        for name in (argument for argument in config.args if "::" in argument):
            named = [item for item in items if _is_named(item, name, config.invocation_params.dir)]
            if not chosen.intersection(map(id, named)):
                chosen.update(map(id, named))
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
        items[:] = [item for item in items if id(item) in chosen]


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def _is_named(item: pytest.Item, name: str, directory: Path) -> bool:
    """Whether an argument such as ``tests/test_x.py::test_y``, with or without a case in brackets, names a test."""
    file, _, inside = name.partition("::")
    found = item.nodeid.partition("::")[2]
    is_there = found == inside or found.startswith((f"{inside}[", f"{inside}::"))
    return is_there and item.path == (directory / file).resolve()


def pytest_collection_finish() -> None:
    """Keep what was imported and collected out of each collection of garbage that a test asks for."""
    gc.freeze()


def _ranks_of(item: pytest.Item) -> int:
    """How many ranks a test runs on; 0 for one without."""
    world = item.callspec.params.get("world") if hasattr(item, "callspec") else None
    return world[0] if isinstance(world, tuple) else 0


def _cases(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """The cases of each test that the quick lane takes: of most with all pairs of values, of some all.

    Of others cases with all values: four ranks on two cores are dear, and the wrapper and state dicts stand on what
    the tests of `fully_shard` prove with all pairs.
    """
    tests: dict[Any, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault((item.parent, getattr(item, "originalname", item.name)), []).append(item)
    for cases in tests.values():
        if len(cases) == 1 or cases[0].get_closest_marker("everywhere") or cases[0].path.parent.name in _WHOLE:
            yield from cases
        else:
            values = [{name: id(value) for name, value in case.callspec.params.items()} for case in cases]
            together = 1 if _ranks_of(cases[0]) > 3 or _EACH_VALUE.search(cases[0].nodeid) else 2
            yield from (cases[number] for number in covering(values, together))


def _runs_torch(item: pytest.Item) -> bool:
    return hasattr(item, "callspec") and "torch" in [v for v in item.callspec.params.values() if isinstance(v, str)]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Two workers take the files in turns; one of them takes all programs of frameworks, and imports these once."""
    scheduler = importlib.import_module("xdist.scheduler.loadfile").LoadFileScheduling

    class Files(scheduler):  # type: ignore[misc, valid-type]
        def _split_scope(self, nodeid: str) -> str:
            folder = "tests/frameworks/"
            return folder if nodeid.startswith(folder) else str(super()._split_scope(nodeid))

    return Files(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def rank_pool(pytestconfig: pytest.Config) -> Iterator[RankPool]:
    """The session's ranks; asked for by name only by tests that want to look at the outcomes of ranks that fail.

    They end as processes end, and before the test run does, so that their coverage is saved and counted.
    """
    where = ["--rootdir", str(pytestconfig.rootpath), "--import-mode", pytestconfig.getoption("importmode")]
    if pytestconfig.inipath is not None:
        where += ["-c", str(pytestconfig.inipath)]
    with RankPool(_RANKS, where) as pool:
        yield pool


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each world size of the mark, and of those in tests/parity one for each transport.

    A transport that the mark names, or the environment, is the only one. Those that the long lane alone has are marked
    as slow: in the quick lane only tests/simulated runs on simulated accelerators.
    """
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is None:
        return
    transports = [mark.kwargs["transport"]]
    in_parity = metafunc.module.__name__.startswith("tests.parity.") and "FULLSHARD_TRANSPORT" not in os.environ
    if in_parity and transports == [None]:
        transports = ["shm", "p2p", "collective", *SIMULATED]
    named = len(transports) > 1
    worlds = [(size, transport) for size in mark.args for transport in transports]
    if named:
        worlds = [world for world in worlds if world != (1, "shm")]
    if metafunc.definition.get_closest_marker("everywhere"):
        quick = [world for world in worlds if world[1] not in SIMULATED]
    else:
        sizes = (2, 3) if metafunc.module.__name__.startswith(("tests.parity.", "tests.comm.")) else (2,)
        quick = [world for world in worlds if world[0] in sizes and world[1] == transports[0]] or worlds[:1]
    metafunc.parametrize(
        "world",
        [
            pytest.param(
                world,
                id=f"W{world[0]}-{world[1]}" if named else f"W{world[0]}",
                marks=() if world in quick else pytest.mark.slow,
            )
            for world in worlds
        ],
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body of a marked test on the ranks instead of here."""
    mark = pyfuncitem.get_closest_marker("ranks")
    if mark is None:
        return None
    pool = pyfuncitem.funcargs["rank_pool"]
    assert isinstance(pool, RankPool)
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments: dict[str, Any] = {name: value for name, value in pyfuncitem.funcargs.items() if name in names}
    size, transport = arguments.pop("world")
    how = {"timeout": mark.kwargs["timeout"], "fresh": mark.kwargs["fresh"]}
    outcomes = pool.run(run_test, size, pyfuncitem.obj, arguments, transport, **how)
    if any(outcome.kind not in ("returned", "skipped") for outcome in outcomes):
        pytest.fail(failure_report(outcomes), pytrace=False)
    if skipped := [outcome.summary for outcome in outcomes if outcome.kind == "skipped"]:
        pytest.skip(skipped[0])
    return True
