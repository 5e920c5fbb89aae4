"""What stands for the tensors of a caller."""

from __future__ import annotations

import torch

from fullshard.comm.routes import alias


def test_an_alias_follows_the_memory_and_counts_its_own_versions() -> None:
    tensor = torch.zeros(3)
    other = alias(tensor)
    other.fill_(5)
    assert tensor.tolist() == [5] * 3
    assert tensor._version == 0
    tensor.untyped_storage().resize_(0)
    assert other.untyped_storage().nbytes() == 0
