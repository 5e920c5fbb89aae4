"""The pytest plugin of ``fullshard.testing``, as pytest finds it: options, the mark ``ranks``, the fixture ``world``.

pytest loads this file in every project whose environment has fullshard. So it imports neither torch nor fullshard: the
plugin itself, :mod:`fullshard.testing.plugin`, is imported when a collected file speaks of ranks.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest

import fullshard_rank_server

#: Options of the mark: fields of :class:`fullshard.testing.Conditions`, which has their defaults.
OPTIONS = ("timeout", "device", "hosts", "env", "ends", "fresh", "init")
#: Plugins that would do their work once more on each rank: report, distribute, measure, or run a test again.
ONLY_HERE = (
    "cacheprovider",
    "terminal",
    "junitxml",
    "xdist",
    "xdist.looponfail",
    "pytest_cov",
    "rerunfailures",
    "html",
)
_IMPORTED = re.compile(r"^\s*(?:from|import)\s+(torch\.distributed[\w.]*|fullshard[\w.]*)", re.MULTILINE)
_MARK = (
    "ranks(*sizes, timeout=60, device='cpu', hosts=1, env={}, ends={}, fresh=False, init=True): "
    "run the test on so many ranks, once for each size; see fullshard.testing"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("ranks", "tests on several ranks (fullshard)")
    group.addoption("--ranks-pdb", action="store_true", help="run a failed test again, with the failed rank under pdb")
    group.addoption(
        "--ranks-pdb-rank",
        type=int,
        metavar="RANK",
        help="run tests with this rank under pdb: breakpoint() works there",
    )
    group.addoption("--ranks-seed", type=int, default=0, help="seed of the random numbers on every rank (default: 0)")
    group.addoption("--ranks-timeout", type=float, help="seconds that a rank may be silent (default: 60)")
    parser.addini("ranks_timeout", "seconds that a rank may be silent", default="60")
    parser.addini("ranks_preload", "modules that ranks have imported before they start", type="args", default=[])


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark."""
    config.addinivalue_line("markers", _MARK)


def plugins_of_ranks(config: pytest.Config) -> dict[str, str]:
    """The plugins of installed packages that ranks have too: the module of each by its name."""
    manager = config.pluginmanager
    found = {manager.get_name(plugin): plugin for plugin, _ in manager.list_plugin_distinfo()}
    return {
        name: plugin.__name__
        for name, plugin in found.items()
        if name is not None and name not in ONLY_HERE and hasattr(plugin, "__name__")
    }


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    """Start the plugin for the first file that speaks of ranks, before pytest imports it.

    Not for each file that pytest looks at: it looks at all files of a folder to find one.
    """
    config = collector.config
    if not isinstance(collector, pytest.Module) or collector.path.suffix != ".py" or _is_rank(config):
        return (yield)
    text = collector.path.read_text(errors="replace")
    if "ranks" not in text and "world" not in text:
        return (yield)
    if not config.option.collectonly:
        # What a rank would import, each for itself. Modules of plugins are imported there without their rewriting.
        fullshard_rank_server.start(
            [
                "pytest",
                *plugins_of_ranks(config).values(),
                *sorted({*_IMPORTED.findall(text)}),
                *config.getini("ranks_preload"),
            ]
        )
    with fullshard_rank_server.imports_kept():
        if not config.pluginmanager.hasplugin("fullshard-ranks"):
            plugin = importlib.import_module("fullshard.testing.plugin").RanksPlugin(config)
            config.pluginmanager.register(plugin, "fullshard-ranks")
        return (yield)


def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> None:
    """Give a marked test the fixture ``world``, through which it is made for each world size."""
    marks = [*getattr(obj, "pytestmark", []), *collector.iter_markers("ranks")]
    is_marked = any(mark.name == "ranks" for mark in marks)
    if is_marked and callable(obj) and not isinstance(obj, type) and not _asks_for_world(obj):
        pytest.mark.usefixtures("world")(obj)


def _asks_for_world(obj: object) -> bool:
    marks = getattr(obj, "pytestmark", [])
    return any(mark.name == "usefixtures" and "world" in mark.args for mark in marks)


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each world size of the mark; 2 ranks where a test takes ``world`` and has no mark."""
    mark = metafunc.definition.get_closest_marker("ranks")
    if "world" not in metafunc.fixturenames or (mark is None and not _is_ours(metafunc)):
        return
    sizes = check_mark(metafunc.definition.nodeid, mark) if mark is not None else (2,)
    marks = () if mark is not None else (pytest.mark.ranks(2),)
    cases = [pytest.param(size, id=f"W{size}", marks=marks) for size in sizes]
    metafunc.parametrize("world", cases, indirect=True)


def check_mark(nodeid: str, mark: pytest.Mark) -> tuple[int, ...]:
    """The world sizes of a mark. Fails, and names the test, if the mark cannot be meant so."""
    sizes = mark.args
    if not sizes or not all(isinstance(size, int) and size >= 1 for size in sizes):
        problem = f"has the sizes {sizes}; write for example @pytest.mark.ranks(2) or @pytest.mark.ranks(2, 4)"
    elif unknown := mark.kwargs.keys() - set(OPTIONS):
        problem = f"does not know {', '.join(sorted(unknown))}; it takes {', '.join(OPTIONS)}"
    elif any(size % mark.kwargs.get("hosts", 1) for size in sizes):
        problem = f"has {mark.kwargs['hosts']} hosts, over which {sizes} ranks cannot be spread evenly"
    elif wrong := set(mark.kwargs.get("ends", {}).values()) - {"died", "hung"}:
        problem = f"expects that ranks have {', '.join(map(repr, wrong))}; expected 'died' or 'hung'"
    else:
        return sizes
    pytest.fail(f"{nodeid}: the mark ranks {problem}", pytrace=False)


def _is_ours(metafunc: pytest.Metafunc) -> bool:
    """Whether the fixture ``world`` of a test is that of this file, and not one of the project's own."""
    found: Any = getattr(metafunc, "_arg2fixturedefs", {}).get("world")
    return bool(found) and getattr(found[-1].func, "__module__", "") == __name__


def _is_rank(config: pytest.Config) -> bool:
    return config.pluginmanager.hasplugin("fullshard-rank")


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Any:
    """This rank and the number of ranks, a :class:`fullshard.testing.World`."""
    if not _is_rank(request.config):
        raise pytest.UsageError(f"{request.node.nodeid} takes world, which is known on a rank: mark it ranks(2)")
    return importlib.import_module("fullshard.testing.rank").current_world()


@pytest.fixture(scope="session")
def rank_pool(request: pytest.FixtureRequest) -> Any:
    """The session's :class:`fullshard.testing.RankPool`, for tests that run functions on several numbers of ranks."""
    plugin = request.config.pluginmanager.getplugin("fullshard-ranks")
    return plugin.pool
