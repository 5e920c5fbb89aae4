"""Tests of pytest on a rank: a session that lives as long as the rank's process, and runs the tests that it is told.

The test process chooses the tests; this session collects their files once, with the same options, and runs a test with
all that pytest does for one: fixtures, ``setUp``, assertions that say what they compared, and capturing. Fixtures of a
scope wider than a class, and ``tmp_path``, have the value that they have in the test process.
"""

from __future__ import annotations

import importlib
import logging
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fullshard.testing.pytest_private import leave_for
from fullshard.testing.rank import Ended, Kind, World, add_printed, debug, end_groups


class RankSession:
    """The plugin of pytest that makes a session serve its rank. There is one in a process."""

    current: RankSession | None = None

    def __init__(self, setup: Mapping[str, Any], serve: Callable[[], None]) -> None:
        self.__name__ = "fullshard-rank"  # by which it is found among the plugins
        self._options: Mapping[str, Any] = setup["options"]
        self._plugins: Mapping[str, str] = setup["plugins"]
        self._serve = serve
        self._session: pytest.Session
        self._nodes: dict[Path, pytest.Collector | pytest.Item] = {}
        self._items: dict[str, pytest.Item] = {}
        self._values: dict[str, Any] = {}
        self._ends: list[Ended] = []

    def pytest_plugin_registered(self, plugin: object, manager: pytest.PytestPluginManager) -> None:
        """Load the plugins that the test process has from packages, without a look at all installed packages."""
        if plugin is self:
            for name, module in self._plugins.items():
                manager.register(importlib.import_module(module), name)

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Take over the options of the test process."""
        vars(config.option).update(self._options)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> bool:
        """Collect nothing before it is known what to run."""
        return True

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Serve the test process in place of running collected tests."""
        RankSession.current, self._session = self, session
        self._serve()
        return True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note that a file could not be collected here, although it was in the test process."""
        if report.failed:
            self._ends.append(Ended("raised", f"{report.nodeid} was not collected on this rank", report.longreprtext))

    @pytest.hookimpl(tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Any:
        """Give a fixture the value that it has in the test process."""
        if (value := self._values.get(fixturedef.argname)) is None:
            return None
        fixturedef.cached_result = (value, fixturedef.cache_key(request), None)  # type: ignore[arg-type]
        return value

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        """Note how a phase of the test ended, and end the process groups of a failed one: peers that wait for this rank
        fail then too."""
        report: pytest.TestReport = yield
        if report.failed:
            error = call.excinfo
            summary = error.exconly().strip() if error is not None else str(report.longrepr)
            self._ends.append(Ended("raised", summary, report.longreprtext))
            if error is not None:
                debug(error.value)
            end_groups()
        elif report.skipped:
            kind: Kind = "xfailed" if hasattr(report, "wasxfail") else "skipped"
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", "")
            self._ends.append(Ended(kind, reason.removeprefix("Skipped: ").removeprefix("reason: ")))
        if report.when == "teardown":
            for title, text in report.sections:
                add_printed(title, text)
        return report

    def run(self, nodeid: str, path: str, values: Mapping[str, bytes], nextitem: str | None) -> None:
        """Run one test, and raise :class:`Ended` unless it passed."""
        self._ends.clear()
        if nodeid not in self._items:
            self._collect(Path(path))
        if nodeid not in self._items:
            raise (
                self._ends[0]
                if self._ends
                else Ended("raised", f"{nodeid} is not among the tests of {path} on this rank")
            )
        item = self._items[nodeid]
        following = self._items.get(nextitem or "")
        self._values = {name: pickle.loads(value) for name, value in values.items()}
        leave_for(item)
        for name in [*logging.root.manager.loggerDict]:
            if name.startswith("c10d-"):  # of torch, which pytest would report for each failed collective
                logging.getLogger(name).disabled = True
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if self._ends:
            raise self._ends[0]

    def _collect(self, file: Path) -> None:
        """Add a file's tests. All files share one tree of nodes: a conftest's fixtures belong to its folder's node."""
        session, root = self._session, self._session.config.rootpath
        folders = [folder for folder in file.parents if folder == root or root in folder.parents]
        for path in (*reversed(folders), file):
            if path in self._nodes:
                continue
            hook = session.gethookproxy(path.parent)
            if (parent := self._nodes.get(path.parent)) is not None:
                found = hook.pytest_make_collect_report(collector=parent).result
            elif path == file:
                found = hook.pytest_collect_file(file_path=path, parent=session)
            else:
                found = [hook.pytest_collect_directory(path=path, parent=session)]
            for node in found:
                self._nodes.setdefault(node.path, node)
        if file in self._nodes:
            self._items.update((item.nodeid, item) for item in session.genitems(self._nodes[file]))


def run_session(setup: Mapping[str, Any], serve: Callable[[], None]) -> None:
    """Start a session of pytest in this process, and serve in it until the test process wants no more."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    pytest.main(setup["arguments"], plugins=[RankSession(setup, serve)])


def run_item(world: World, nodeid: str, path: str, values: Mapping[str, bytes], nextitem: str | None) -> None:
    """Run a test of pytest on this rank; see :meth:`RankSession.run`."""
    assert RankSession.current is not None
    RankSession.current.run(nodeid, path, values, nextitem)
