"""A copy on meta has what the model has, and takes no memory."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import torch
from torch import nn

from fullshard.report.meta_copy import on_meta


class Awkward(nn.Module):
    """A model with attributes that cannot be copied, also in containers, and with tensors that are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.lock = nn.Linear(4, 4), threading.Lock()
        self.inner.found = {"numbers": (number for number in range(3))}
        self.table = torch.ones(4)
        self.aside = SimpleNamespace(tables=[torch.ones(4)])


def test_what_cannot_be_copied_is_shared() -> None:
    model = Awkward()
    copied = on_meta(model)
    assert copied.inner is not model.inner
    assert all(param.is_meta for param in copied.parameters())
    assert next(model.inner.found["numbers"]) == 0, "nothing was taken from it"


def test_tensors_that_are_no_parameters_are_not_copied() -> None:
    model = Awkward()
    copied = on_meta(model)
    assert copied.table is model.table
    assert copied.aside.tables[0] is model.aside.tables[0]
