"""Which cases the quick lane takes, and which tests a command runs."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.conftest import pytest_collection_modifyitems
from tests.harness.lanes import covering

ROOT = Path(__file__).parent.parent.parent


def product(*sizes: int) -> list[dict[str, int]]:
    return [dict(zip("abcdef", values, strict=False)) for values in itertools.product(*map(range, sizes))]


def test_one_or_two_parameters_are_taken_whole() -> None:
    for sizes in ((5,), (3, 4)):
        cases = product(*sizes)
        assert covering(cases) == list(range(len(cases)))


def test_every_two_values_meet_in_few_cases() -> None:
    cases = product(4, 2, 2, 2, 3)
    chosen = [cases[number] for number in covering(cases)]
    for one, other in itertools.combinations("abcde", 2):
        assert {(case[one], case[other]) for case in chosen} == {(case[one], case[other]) for case in cases}
    assert 12 <= len(chosen) <= 16


def test_values_that_never_meet_are_not_asked_for() -> None:
    cases = [case for case in product(2, 2, 2) if case["a"] != case["b"]]
    assert covering(cases) == [0, 1, 2, 3]


def test_every_value_is_met_in_fewer_cases() -> None:
    cases = product(4, 2, 3)
    chosen = [cases[number] for number in covering(cases, together=1)]
    assert [{case[name] for case in chosen} for name in "abc"] == [{0, 1, 2, 3}, {0, 1}, {0, 1, 2}]
    assert len(chosen) == 4


def test_a_test_without_parameters_is_taken() -> None:
    assert covering([{}]) == [0]


class Item:
    """A collected test, as far as the lanes look at it."""

    def __init__(self, nodeid: str, *marks: str, **params: Any) -> None:
        self.nodeid, self.path, self.parent = nodeid, ROOT / nodeid.partition("::")[0], "a module"
        self.name = nodeid.partition("::")[2]
        self.originalname = self.name.partition("[")[0]
        self.callspec = SimpleNamespace(params=params)
        self.marks = set(marks)

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None

    def add_marker(self, mark: Any) -> None:
        self.marks.add(mark.name)


def selected(*args: str, markexpr: str = "", every: bool = False) -> tuple[list[str], list[str]]:
    """The names of the tests that a command runs, and of those that are slow for pytest."""
    items: Any = [
        Item("tests/x/test_a.py::test_quick"),
        Item("tests/x/test_a.py::test_slow[1]", "slow", n=1),
        Item("tests/x/test_a.py::test_slow[2]", "slow", n=2),
        *(Item(f"tests/x/test_a.py::test_mixed[{n}]", *(["slow"] if n else []), n=n) for n in range(2)),
        *(Item(f"tests/x/test_a.py::test_library[{name}]", library=name) for name in ("fullshard", "torch")),
    ]
    deselected: list[Any] = []
    config: Any = SimpleNamespace(
        getoption={"--all": every, "markexpr": markexpr}.__getitem__,
        args=list(args),
        invocation_params=SimpleNamespace(dir=ROOT),
        hook=SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items)),
    )
    every_item = [*items]
    pytest_collection_modifyitems(config, items)
    assert len(items) + len(deselected) == len(every_item)
    return [each.name for each in items], [each.name for each in every_item if "slow" in each.marks]


def test_a_plain_run_is_the_quick_lane() -> None:
    ran, slow = selected("tests")
    assert ran == ["test_quick", "test_mixed[0]", "test_library[fullshard]"]
    assert slow == ["test_slow[1]", "test_slow[2]", "test_mixed[1]", "test_library[torch]"]


def test_with_all_or_an_expression_of_marks_nothing_is_left_out_here() -> None:
    """pytest itself selects by the expression, and every test of the long lane has the mark."""
    for ran, slow in (selected("tests", every=True), selected(markexpr="slow"), selected(markexpr="not slow")):
        assert len(ran) == 7
        assert len(slow) == 4


def test_a_test_that_is_named_runs_though_it_is_slow() -> None:
    for args, runs in {
        ("tests/x/test_a.py::test_slow",): ["test_slow[1]", "test_slow[2]"],
        ("tests/x/test_a.py::test_slow[2]",): ["test_slow[2]"],
        (str(ROOT / "tests/x/test_a.py") + "::test_slow[1]",): ["test_slow[1]"],
        ("tests/x/test_a.py::test_library[torch]", "tests/x/test_a.py::test_slow[1]"): [
            "test_slow[1]",
            "test_library[torch]",
        ],
    }.items():
        quick = selected("tests")[0]
        assert sorted(selected(*args)[0]) == sorted([*quick, *runs]), args


def test_of_a_test_that_is_named_the_quick_cases_run_where_it_has_some() -> None:
    assert selected("tests/x/test_a.py::test_mixed")[0] == selected("tests")[0]
    assert "test_mixed[1]" in selected("tests/x/test_a.py::test_mixed[1]")[0]
    assert "test_slow[1]" not in selected("tests/x/test_a.py::test_slo", "tests/y/test_a.py::test_slow")[0]
