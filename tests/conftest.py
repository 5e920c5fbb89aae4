"""What the tests add to pytest and to the plugin for ranks: lanes, transports, and who runs which file."""

from __future__ import annotations

import gc
import importlib
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.register_assert_rewrite("tests.harness", "fullshard_pytest")

# Only a first import is rewritten, so this one has to follow.
from fullshard.testing.plugin import world_size  # noqa: E402
from tests.harness import HOSTS, SIMULATED, pretended_hosts  # noqa: E402
from tests.harness.compare import WITH_TORCH  # noqa: E402
from tests.harness.lanes import covering  # noqa: E402

pytest_plugins = ["fullshard_pytest"]

#: A store of torch looks up the names of its clients, once for each connection. Where the name server loses a request,
#: each costs 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
#: Tests of Triton's kernels, which need it, and a GPU or its interpreter (`make frameworks`, `make gpu`).
_RUNS_KERNELS = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = [] if _RUNS_KERNELS and find_spec("triton") else ["test_fused.py"]
#: Tests of which it takes so many cases that each value is met.
_EACH_VALUE = re.compile(r"^tests/(wrapper|checkpoint|optim|parity/|comm/|test_interop)")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which lane, how many random programs tests/fuzz runs, and which."""
    parser.addoption("--all", action="store_true", help="the long lane: everything; see tests.harness")
    group = parser.getgroup("fuzz", "random programs, see tests.fuzz")
    group.addoption("--programs", type=int, default=24, help="how many random programs to run")
    parser.addoption("--kills", type=int, help="at how many points of saves ranks are killed")
    group.addoption("--first-seed", type=int, default=0, help="the seed of the first random program")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marks, and let ranks know the lane."""
    config.addinivalue_line("markers", "transport(name): how buffers move on the ranks of the test; see tests.harness")
    config.addinivalue_line(
        "markers", "everywhere: in the quick lane too with all cases, world sizes and real transports"
    )
    if config.getoption("--all") or config.getoption("markexpr") not in ("", "not slow"):
        os.environ[WITH_TORCH] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose what the lane runs.

    Mark as slow, so that the long lane alone has it, what runs torch's own library alone (it proves the tests, and not
    ours), and of each test the cases whose values meet in other cases of it. Without ``--all`` and ``-m`` deselect what
    is slow, except tests that the command names: each of these runs, all of its cases if all are slow.
    """
    extra = (_is_slow, _runs_torch, _is_extra_size)
    chosen = set(map(id, _cases([item for item in items if not any(is_extra(item) for is_extra in extra)])))
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


def _is_extra_size(item: pytest.Item) -> bool:
    """Whether a case has a number of ranks that the long lane alone has."""
    if not (size := world_size(item)) or item.get_closest_marker("everywhere"):
        return False
    mark = item.get_closest_marker("ranks")
    assert mark is not None
    quick = (2, 3) if item.nodeid.startswith(("tests/parity/", "tests/comm/")) else (2,)
    return size not in ([each for each in mark.args if each in quick] or mark.args[:1])


def _cases(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """The cases of each test that the quick lane takes: of most with all pairs of values, of some all.

    Of others cases with all values: four ranks on two cores are dear, the wrapper and state dicts stand on what the
    tests of `fully_shard` prove with all pairs, and random programs (tests/fuzz) mix what parity tests tell apart.
    """
    tests: dict[Any, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault((item.parent, getattr(item, "originalname", item.name)), []).append(item)
    for cases in tests.values():
        if len(cases) == 1 or cases[0].get_closest_marker("everywhere"):
            yield from cases
        else:
            values = [{name: id(value) for name, value in case.callspec.params.items()} for case in cases]
            together = 1 if world_size(cases[0]) > 3 or _EACH_VALUE.search(cases[0].nodeid) else 2
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


@pytest.fixture(autouse=True)
def case_transport(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lets a test's ranks use the transport that its mark or its case names."""
    mark = request.node.get_closest_marker("transport")
    chosen = getattr(request, "param", None) or (mark.args[0] if mark is not None else None)
    if chosen in SIMULATED:
        os.environ["FULLSHARD_TRANSPORT"] = "collective"
        os.environ.pop(WITH_TORCH, None)
        with importlib.import_module("tests.simulated").simulated(chosen):
            yield
        return
    if chosen is not None:
        os.environ["FULLSHARD_TRANSPORT"] = chosen
    with pretended_hosts(HOSTS if chosen == "hosts" else ""):
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make of tests in tests/parity one for each transport, if neither a mark nor the environment names one.

    Those that the long lane alone has are marked as slow: in the quick lane only tests/simulated runs on simulated
    accelerators.
    """
    definition = metafunc.definition
    if (mark := definition.get_closest_marker("ranks")) is None:
        return
    in_parity = metafunc.module.__name__.startswith("tests.parity.")
    if not in_parity or "FULLSHARD_TRANSPORT" in os.environ or definition.get_closest_marker("transport"):
        return
    is_quick = definition.get_closest_marker("everywhere") is not None
    metafunc.parametrize(
        "case_transport",
        [
            pytest.param(name, marks=() if name == "shm" or (is_quick and name not in SIMULATED) else pytest.mark.slow)
            for name in ("shm", "hosts", "p2p", "collective", *SIMULATED)
            if mark.args != (1,) or name not in ("shm", "hosts")
        ],
        indirect=True,
    )
