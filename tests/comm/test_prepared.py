"""What was prepared for tensors is found again, and forgotten with them."""

from __future__ import annotations

import gc

import torch

from fullshard.comm.prepared import PreparedCache, alias


def test_what_was_prepared_is_found_until_a_tensor_is_gone() -> None:
    cache: PreparedCache[str] = PreparedCache()
    first, second = torch.zeros(3), torch.zeros(3)
    cache.put((id(first), id(second)), "both", [first, second])
    assert cache.get((id(first), id(second))) == "both"
    assert cache.get((id(second), id(first))) is None
    del second
    gc.collect()
    assert len(cache) == 0


def test_views_in_the_cache_do_not_keep_their_tensor() -> None:
    cache: PreparedCache[torch.Tensor] = PreparedCache()
    tensor = torch.zeros(3)
    cache.put(id(tensor), alias(tensor)[1:], [tensor])
    del tensor
    gc.collect()
    assert len(cache) == 0


def test_an_alias_follows_the_memory_and_counts_its_own_versions() -> None:
    tensor = torch.zeros(3)
    other = alias(tensor)
    other.fill_(5)
    assert tensor.tolist() == [5] * 3
    assert tensor._version == 0
    tensor.untyped_storage().resize_(0)
    assert other.untyped_storage().nbytes() == 0
