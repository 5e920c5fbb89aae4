"""Which cases the quick lane takes."""

from __future__ import annotations

import itertools

from tests.harness.lanes import covering


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
