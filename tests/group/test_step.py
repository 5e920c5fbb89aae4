"""The passes of a step, which of them may follow which, and how steps of optimizers are counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fullshard.group.step import BEGIN, END, FINALIZE, Kind, Log, Pass, Step
from fullshard.schedule.schedule import Schedule


class Dropped:
    """Stands for an optimizer."""


def begin_pass(step: Step, kind: Kind) -> None:
    """Begin a pass of a tree without groups."""
    tree: Any = SimpleNamespace(step=step, log=Log(), groups=())
    Schedule.begin_pass(tree, kind)


def test_passes_nest_as_a_backward_inside_of_a_forward_does() -> None:
    seen = [Step().now]
    order: list[tuple[dict[tuple[Pass, Kind], Pass], Kind]]
    order = [(BEGIN, "forward"), (BEGIN, "backward"), (END, "backward"), (END, "forward")]
    for table, kind in order:
        seen.append(table[seen[-1], kind])
    assert seen == [Pass.NONE, Pass.FORWARD, Pass.NESTED, Pass.FORWARD, Pass.NONE]


def test_a_pass_that_may_not_begin_is_an_error() -> None:
    wrong: list[tuple[Pass, Kind]] = [
        (Pass.FORWARD, "forward"),
        (Pass.BACKWARD, "backward"),
        (Pass.NESTED, "forward"),
    ]
    for now, kind in wrong:
        step = Step()
        step.now = now
        with pytest.raises(KeyError):
            begin_pass(step, kind)


def test_what_a_pass_says_of_itself_fits_what_may_follow() -> None:
    for (before, kind), after in BEGIN.items():
        assert getattr(after, f"has_{kind}")
        assert not getattr(before, f"has_{kind}")
    for (_, kind), after in END.items():
        assert not getattr(after, f"has_{kind}")
    for before, after in FINALIZE.items():
        assert after.has_backward
        assert after.has_forward == before.has_forward


def test_optimizers_that_take_turns_between_passes_are_one_step() -> None:
    """A dash is an optimizer that is dropped after its step: the next one may get its address."""
    cases = {"a": 1, "abc": 1, "aa": 2, "aab": 2, "abab": 2, "aabbb": 3, "a--": 1}
    for optimizers, steps in cases.items():
        step, each = Step(), {name: Dropped() for name in "abc"}
        for _ in range(2):
            before = step.optimizer_steps
            for name in optimizers:
                step.count_step(each.get(name) or Dropped())
            assert step.optimizer_steps - before == steps, optimizers
            begin_pass(step, "forward")
            assert step.steps_before == step.optimizer_steps
            begin_pass(step, "backward")
            step.now = Pass.NONE


def test_steps_inside_of_a_pass_do_not_change_what_came_before_it() -> None:
    step = Step()
    begin_pass(step, "backward")
    step.count_step(self := Dropped())
    step.now = END[step.now, "backward"]
    assert (step.optimizer_steps, step.steps_before) == (1, 0)
    begin_pass(step, "forward")
    step.count_step(self)
    assert (step.optimizer_steps, step.steps_before) == (2, 1)


def test_the_base_of_logs_keeps_nothing() -> None:
    log = Log()
    assert log("gather", object()) is None
    assert log.listeners == []
