"""The simulated accelerator finds accesses without an order: a check that finds nothing would be worth nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from fullshard.device import CPU, Done, Lane, current_stream, host_memory, mark_now
from tests.simulated import AccessError, Checker, Late, simulate
from tests.simulated.device import Running, SimulatedStreams


@pytest.fixture
def checked() -> Iterator[SimulatedStreams]:
    with simulate(Checker()) as streams:
        yield streams


def filled(lane: Lane, tensor: torch.Tensor, value: float) -> object:
    """A mark after ``tensor`` was filled in a lane."""
    return lane.run(Done, lambda: tensor.fill_(value))


def test_a_result_that_is_waited_for_may_be_read(checked: SimulatedStreams) -> None:
    lane, tensor = Lane(CPU), torch.zeros(4)
    lane.run(Done, lambda: tensor.fill_(1.0)).wait()
    assert tensor.sum().item() == 4


def test_a_read_before_the_wait_is_an_error(checked: SimulatedStreams) -> None:
    lane, tensor = Lane(CPU), torch.zeros(4)
    filled(lane, tensor, 1.0)
    with pytest.raises(
        AccessError, match=r"a read and a write of the same bytes have no order: aten.sum.default"
    ) as error:
        tensor.sum()
    assert "aten.fill_.Scalar in lane 2" in str(error.value)
    assert str(error.value).count("test_simulated.py") >= 2  # both stacks


def test_a_write_while_another_lane_reads_is_an_error(checked: SimulatedStreams) -> None:
    lane, tensor, copy = Lane(CPU), torch.zeros(4), torch.empty(4)
    lane.run(Done, lambda: copy.copy_(tensor))
    with pytest.raises(AccessError, match="a write and a read of the same bytes"):
        tensor.add_(1)


def test_other_bytes_of_the_same_memory_need_no_order(checked: SimulatedStreams) -> None:
    lane, tensor = Lane(CPU), torch.zeros(8)
    filled(lane, tensor[:4], 1.0)
    assert tensor[4:].sum().item() == 0


def test_memory_that_is_freed_while_another_lane_reads_it_must_not_serve_again(checked: SimulatedStreams) -> None:
    lane, tensor, copy = Lane(CPU), torch.zeros(4), torch.empty(4)
    lane.run(Done, lambda tensor=tensor: copy.copy_(tensor))
    del tensor
    with pytest.raises(AccessError, match=r"memory of lane 1 serves it again while it may still be used by aten.copy_"):
        torch.zeros(4)


def test_memory_that_is_kept_for_a_lane_may_be_freed(checked: SimulatedStreams) -> None:
    lane, tensor, copy = Lane(CPU), torch.zeros(4), torch.empty(4)
    lane.run(Done, lambda tensor=tensor: (copy.copy_(tensor), checked.keep(tensor)))
    del tensor
    torch.zeros(4)


def test_the_host_must_not_read_what_the_device_still_writes(checked: SimulatedStreams) -> None:
    pinned, tensor = host_memory((4,), torch.float32, CPU), torch.ones(4)
    pinned.copy_(tensor, non_blocking=True)
    event = current_stream(CPU).record_event()
    with pytest.raises(AccessError, match="in the host"):
        pinned.sum()
    event.synchronize()
    assert pinned.sum().item() == 4
    assert checked.synchronizations == 1


def test_a_value_that_the_host_waits_for_is_counted(checked: SimulatedStreams) -> None:
    assert isinstance(checked.model, Checker)
    torch.ones(2).sum().item()
    assert len(checked.model.synchronized) == 1


def test_a_late_lane_shows_old_values_until_it_is_waited_for() -> None:
    with simulate(Late()):
        lane, tensor = Lane(CPU), torch.zeros(4)
        mark = lane.run(Done, lambda: tensor.fill_(1.0))
        assert tensor.sum().item() == 0
        mark.wait()
        assert tensor.sum().item() == 4


def test_a_late_lane_waits_for_what_it_was_told_to() -> None:
    with simulate(Late()):
        one, other, tensor, copy = Lane(CPU), Lane(CPU), torch.zeros(4), torch.zeros(4)
        mark = one.run(Done, lambda: tensor.fill_(1.0))
        copied = other.run(Done, lambda: copy.copy_(tensor), after=[mark])
        late = other.run(Done, lambda: copy.add_(1.0), after=[mark_now(CPU)])
        assert copy.sum().item() == 0
        copied.wait()
        assert copy.sum().item() == 4
        late.wait()
        assert copy.sum().item() == 8


def test_a_collective_ends_if_its_process_group_is_aborted_and_else_with_its_error() -> None:
    waits = list[str]()

    class Work:
        def wait(self, _: object) -> None:
            waits.append("wait")
            raise RuntimeError("a time has passed, or a connection was closed")

        def is_completed(self) -> bool:
            return len(waits) > 5

    Running(cast(Any, Work()), lambda: len(waits) == 2).wait()
    assert len(waits) == 2
    with pytest.raises(RuntimeError, match="a connection was closed"):
        Running(cast(Any, Work()), bool).wait()
    assert len(waits) == 6
