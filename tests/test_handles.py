"""A handle completes its communication once."""

from __future__ import annotations

import pytest

from fullshard.handles import GradientReductionHandle, Handle, UnshardHandle


@pytest.mark.parametrize("kind", [Handle, UnshardHandle, GradientReductionHandle])
def test_a_second_wait_does_nothing(kind: type[Handle]) -> None:
    calls: list[str] = []
    handle = kind(lambda: calls.append("waited"))
    assert handle.returned_if(True) is handle
    assert calls == []
    handle.wait()
    handle.wait()
    assert calls == ["waited"]


def test_without_async_op_the_handle_is_waited_for() -> None:
    calls: list[str] = []
    assert UnshardHandle(lambda: calls.append("waited")).returned_if(False) is None
    assert calls == ["waited"]


def test_a_wait_that_failed_may_be_tried_again() -> None:
    errors = [RuntimeError("not yet")]

    def wait() -> None:
        if errors:
            raise errors.pop()

    handle = GradientReductionHandle(wait)
    with pytest.raises(RuntimeError, match="not yet"):
        handle.wait()
    handle.wait()


def test_a_handle_of_nothing_is_complete() -> None:
    Handle().wait()
