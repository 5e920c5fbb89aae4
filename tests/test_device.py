"""Parameters move to a device and stay the same objects, whatever the device lets its tensors exchange."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

from fullshard.device import CPU, META, Streams, move_to_device
from fullshard.report import watching
from fullshard.torch_private import set_data


def test_a_parameter_moves_to_a_device_that_refuses_its_data() -> None:
    """As the devices of others do; meta refuses it too."""
    model = nn.Linear(2, 2)
    weight = model.weight
    weight.note, weight.grad = "kept", torch.ones(2, 2)
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        nn.Parameter(torch.ones(2)).data = torch.ones(2, device=META)
    model.bias.requires_grad_(False)
    move_to_device(model.parameters(), [model], META)
    assert model.weight is weight
    assert {each.device for each in (weight, weight.grad, model.bias)} == {META}
    assert weight.note == "kept"
    assert weight.requires_grad
    assert not model.bias.requires_grad


@pytest.mark.parametrize("refused", [False, True])
def test_a_parameter_that_holds_other_data_trains_on(refused: bool) -> None:
    param = nn.Parameter(torch.zeros(3))
    with mock.patch("torch._has_compatible_shallow_copy_type", return_value=not refused):
        set_data(param, torch.full((2,), 5.0))
    param.square().sum().backward()
    assert type(param) is nn.Parameter
    assert param.tolist() == [5.0, 5.0]
    assert param.grad is not None
    assert param.grad.tolist() == [10.0, 10.0]


def test_a_time_is_recorded_by_the_event_and_not_by_the_stream() -> None:
    """A stream of a device of others refuses events of a subclass."""
    stream = mock.Mock()
    with mock.patch("torch.Event") as events, mock.patch.object(Streams, "current", return_value=stream):
        clock = watching.Clock(CPU)
        clock.streams = Streams()
        event = clock.now()
    assert event is events.return_value
    event.record.assert_called_once_with(stream)
    stream.record_event.assert_not_called()
