"""Fake tensors stand for the tensors of a model and of a batch."""

from __future__ import annotations

import torch

from fullshard.report.fakes import Fakes
from fullshard.torch_private import FakeTensor


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


def test_integers_of_a_batch_have_values() -> None:
    fakes = Fakes(torch.device("cpu"))
    with fakes.mode:
        lengths = fakes.of_batch(torch.tensor([2, 3]))
        assert isinstance(lengths, FakeTensor)
        assert (lengths.cumsum(0) + 1).tolist() == [3, 6]
