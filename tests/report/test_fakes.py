"""Fake tensors stand for the tensors of a model and of a batch."""

from __future__ import annotations

import torch

from fullshard.report.fakes import Fakes


def test_one_fake_stands_for_one_tensor_and_is_known_while_it_lives() -> None:
    fakes, tensor = Fakes(torch.device("cpu")), torch.ones(2, 3)
    fake = fakes.like(tensor)
    assert fakes.like(tensor) is fake
    assert fakes.left() is fake
    assert fakes.has_made(fake)
    assert not fakes.has_made(Fakes(torch.device("cpu")).like(tensor))
    fakes.made.clear()
    del fake
    assert fakes.left() is None
