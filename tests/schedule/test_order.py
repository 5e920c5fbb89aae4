"""Which group follows which: recorded in one step, and used in the next."""

from __future__ import annotations

from fullshard.schedule.order import Order


def forward(order: Order[str], groups: str) -> list[str]:
    """A forward of these groups; returns what each was told that follows."""
    order.begin_forward()
    found = []
    for group in groups:
        order.entered.append(group)
        found.append("".join(order.next_in_forward()))
        order.finished.append(group)
    return found


def backward(order: Order[str], groups: str) -> list[str]:
    return ["".join(order.next_in_backward(group)) for group in groups]


def test_the_first_step_knows_nothing_and_the_next_one_all() -> None:
    order = Order[str]()
    assert forward(order, "abc") == ["", "", ""]
    assert forward(order, "abc") == ["bc", "c", ""]


def test_another_order_is_followed_as_long_as_it_is_the_same() -> None:
    order = Order[str]()
    forward(order, "abcd")
    assert forward(order, "abdc") == ["bcd", "cd", "", ""]
    assert forward(order, "abdc") == ["bdc", "dc", "c", ""]


def test_a_group_that_runs_twice_has_two_places() -> None:
    order = Order[str]()
    forward(order, "aba")
    assert forward(order, "aba") == ["ba", "a", ""]


def test_a_forward_that_entered_nothing_forgets_nothing() -> None:
    order = Order[str]()
    forward(order, "ab")
    order.begin_forward()
    assert forward(order, "ab") == ["b", ""]


def test_backward_goes_back_through_this_forward() -> None:
    order = Order[str]()
    forward(order, "abc")
    assert backward(order, "cba") == ["ba", "a", ""]
    assert not order.finished


def test_the_last_use_of_a_group_goes_first() -> None:
    order = Order[str]()
    forward(order, "abab")
    assert backward(order, "ba") == ["aba", "ba"]
    assert list(order.finished) == ["a", "b"]


def test_a_group_that_has_not_run_has_none_before_it() -> None:
    order = Order[str]()
    forward(order, "ab")
    assert backward(order, "x") == [""]
    assert list(order.finished) == ["a", "b"]
