"""The pytest plugin in the test process: runs each marked test on ranks, in place of here, and tells how it ended.

pytest selects, orders and reports tests as ever. What is replaced of a marked test is its set-up, its call and its
tear-down: the ranks do all three (:mod:`fullshard.testing.session`). Only fixtures of a scope wider than a class, and
``tmp_path``, are made here, once, and their values are sent.
"""

from __future__ import annotations

import pickle
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from fullshard.testing.pool import Conditions, RankPool, failure_report, failures
from fullshard.testing.pytest_private import scopes, skip, value_of
from fullshard.testing.rank import Outcome
from fullshard.testing.session import run_item
from fullshard_pytest import ONLY_HERE, check_mark, plugins_of_ranks

#: Fixtures of narrow scope that are made here all the same: ranks share the folder.
_SHARED = ("tmp_path", "tmpdir")
_WIDE = ("module", "package", "session")


class RanksPlugin:
    """Runs marked tests on the ranks of one pool."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._debugs_failed: bool = config.getoption("--ranks-pdb")
        self._debugged_rank: int | None = config.getoption("--ranks-pdb-rank")
        if (self._debugs_failed or self._debugged_rank is not None) and hasattr(config, "workerinput"):
            raise pytest.UsageError("--ranks-pdb needs the terminal, which tests do not have with -n: leave out -n")
        self.pool = RankPool(session=_session(config))
        self._next: pytest.Item | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sort the tests of a file by the number of their ranks: the next one takes over a process group."""
        files = {item.path: number for number, item in reversed(list(enumerate(items)))}
        items.sort(key=lambda item: (files[item.path], world_size(item)))
        for item in items:
            if world_size(item):
                item.setup = types.MethodType(_set_up, item)  # type: ignore[method-assign]
                item.runtest = types.MethodType(lambda item: self._run(item), item)  # type: ignore[method-assign]
                item.teardown = lambda: None  # type: ignore[method-assign]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Any:
        """Remember which test follows: ranks keep what it needs."""
        self._next = nextitem
        return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtestloop(self) -> Any:
        """End the ranks with the last test, before the coverage that they write when they end is counted."""
        try:
            return (yield)
        finally:
            self.pool.close()

    def _run(self, item: pytest.Item) -> None:
        """Run a test on its ranks; raise what pytest makes a failure, a skip or an expected failure of."""
        size, conditions = world_size(item), self._conditions(item)
        if conditions.device != "cpu" and not torch.get_device_module(conditions.device).is_available():
            raise skip(f"no {conditions.device} device is available")
        if self._debugged_rank is not None:
            outcomes = self._debugged(item, conditions, self._debugged_rank)
        else:
            outcomes = self._on_ranks(item, conditions)
            if self._debugs_failed and (failed := failures(outcomes, conditions.ends)):
                outcomes = self._debugged(item, conditions, failed[0].rank)
        for outcome in outcomes:
            for title, text in outcome.printed:
                what, when = title.removeprefix("Captured ").rsplit(" ", 1)
                item.add_report_section(when, f"{what} of rank {outcome.rank}", text)
        _warn_of_what_is_left(item, outcomes)
        if failures(outcomes, conditions.ends):
            pytest.fail(failure_report(outcomes, conditions.ends), pytrace=False)
        if said := [outcome.summary for outcome in outcomes if outcome.kind == "skipped"]:
            raise skip(said[0])
        if said := [outcome.summary for outcome in outcomes if outcome.kind == "xfailed"]:
            pytest.xfail(said[0])
        assert len(outcomes) == size

    def _conditions(self, item: pytest.Item) -> Conditions:
        mark = item.get_closest_marker("ranks")
        assert mark is not None
        asked: dict[str, Any] = {**mark.kwargs}
        if asked.get("timeout") is None:
            asked["timeout"] = self._config.getoption("--ranks-timeout") or float(self._config.getini("ranks_timeout"))
        return Conditions(**asked, seed=self._config.getoption("--ranks-seed"))

    def _on_ranks(self, item: pytest.Item, conditions: Conditions) -> list[Outcome]:
        size = world_size(item)
        follows = self._next is not None and world_size(self._next) >= size
        following = self._next.nodeid if self._next is not None and follows else None
        values: Mapping[str, bytes] = item.stash.get(_values, {})
        return self.pool.run(run_item, size, item.nodeid, str(item.path), values, following, conditions=conditions)

    def _debugged(self, item: pytest.Item, conditions: Conditions, rank: int) -> list[Outcome]:
        """Run a test while one rank has the terminal."""
        if rank >= world_size(item):
            pytest.fail(f"rank {rank} is to be debugged, but {item.nodeid} has {world_size(item)} ranks", pytrace=False)
        capture = self._config.pluginmanager.getplugin("capturemanager")
        capture.suspend(in_=True)
        try:
            print(f"\n{item.nodeid}: rank {rank} of {world_size(item)} has the terminal", flush=True)
            return self._on_ranks(item, replace(conditions, debug=rank))
        finally:
            capture.resume()


_values = pytest.StashKey[Mapping[str, bytes]]()


def world_size(item: pytest.Item) -> int:
    """The number of ranks that a test runs on; 0 for a test without the mark."""
    mark = item.get_closest_marker("ranks")
    if mark is None:
        return 0
    chosen = getattr(item, "callspec", None)
    if chosen is not None and "world" in chosen.params:
        return int(chosen.params["world"])
    sizes = check_mark(item.nodeid, mark)
    if len(sizes) > 1:
        pytest.fail(f"{item.nodeid} is a method of unittest, which is made once: give it one world size", pytrace=False)
    return sizes[0]


def _set_up(item: pytest.Item) -> None:
    """Make the fixtures of a test that ranks share, and keep those values that can be sent; ranks make the others."""
    assert isinstance(item, pytest.Function)
    values = {}
    for name, scope in scopes(item).items():
        if (scope in _WIDE or name in _SHARED) and not name.startswith(("_xunit", "_unittest")):
            value = value_of(item, name)
            with suppress(Exception):  # what cannot be pickled is made on each rank
                values[name] = pickle.dumps(value)
    item.stash[_values] = values


def _warn_of_what_is_left(item: pytest.Item, outcomes: Sequence[Outcome]) -> None:
    """Warn of process groups that a test made and did not destroy. They were destroyed after it."""
    ranks: dict[str, list[int]] = {}
    for outcome in outcomes:
        for left in outcome.left:
            ranks.setdefault(left, []).append(outcome.rank)
    for left, of in ranks.items():
        item.warn(
            pytest.PytestWarning(
                f"the test left {left} behind on rank{'s' * (len(of) > 1)} {', '.join(map(str, of))}: "
                f"destroy it with torch.distributed.destroy_process_group(group)"
            )
        )


def _session(config: pytest.Config) -> dict[str, Any]:
    """The arguments and options with which a rank starts pytest: those of this process, where they can be pickled."""
    arguments = ["--rootdir", str(config.rootpath), "--import-mode", config.getoption("importmode"), "-o", "addopts="]
    arguments += ["--capture", config.getoption("capture")]
    if config.inipath is not None:
        arguments += ["-c", str(config.inipath)]
    for plugin in (*config.option.plugins, *(f"no:{name}" for name in ONLY_HERE)):
        arguments += ["-p", plugin]
    plugins = plugins_of_ranks(config)
    options = {}
    for name, value in vars(config.option).items():
        try:
            pickle.dumps(value)
        except Exception:
            continue
        options[name] = value
    options |= {"collectonly": False, "usepdb": False}
    return {"arguments": arguments, "options": options, "plugins": plugins}
