"""Memory that a backend brings for its collectives: how it is allocated, and that other ranks learn of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fullshard.comm import backend_memory
from fullshard.comm.backend_memory import BackendMemory, process_group_memory, symmetric_memory
from tests.fully_shard.cases import EXCHANGED

CPU = torch.device("cpu")


class Backend:
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return device == CPU

    def allocate_tensor(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.sizes.append(numel)
        return torch.empty(numel, dtype=dtype, device=device)


def test_a_process_groups_memory_has_the_size_that_is_asked_for() -> None:
    backend = Backend()
    group = SimpleNamespace(_get_backend=lambda device: backend)
    found = process_group_memory(group).allocate((3, 4), torch.bfloat16, CPU)
    assert (found.shape, found.dtype, backend.sizes) == ((3, 4), torch.bfloat16, [12])


def test_a_process_group_without_an_allocator_is_named() -> None:
    group = SimpleNamespace(_get_backend=lambda device: object())
    with pytest.raises(AssertionError, match="has no allocator for cpu"):
        process_group_memory(group).allocate((3,), torch.float32, CPU)


def test_tensors_are_made_known_before_they_are_communicated() -> None:
    done = list[Any]()
    memory = BackendMemory(torch.empty, lambda *tensors: done.append(("known", *map(len, tensors))))

    def collective(output: torch.Tensor, source: torch.Tensor) -> None:
        done.append(("sent", len(output), len(source)))

    assert memory.call(collective, torch.zeros(4), torch.zeros(2)) is None
    assert done == [("known", 4, 2), ("sent", 4, 2)]


def test_only_nccl_has_symmetric_memory() -> None:
    with pytest.raises(ValueError, match="supported with the NCCL backend, got 'gloo'"):
        symmetric_memory(None, "gloo")


@EXCHANGED
def test_symmetric_memory_is_made_known_to_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU with what stands for NCCL's part: the calls are what NCCL needs, in this order."""
    calls = list[Any]()
    stands = SimpleNamespace(
        set_backend=lambda name: calls.append(("backend", name)),
        rendezvous=lambda tensor, group: calls.append(("rendezvous", tensor.numel(), group)),
    )
    monkeypatch.setattr(backend_memory, "symm_mem", stands)
    monkeypatch.setattr(backend_memory.dist, "barrier", lambda group: calls.append(("barrier", group)))
    memory = symmetric_memory("a group")
    memory.make_known(torch.zeros(4), torch.zeros(2))
    assert calls == [
        ("backend", "NCCL"),
        ("barrier", "a group"),
        ("rendezvous", 4, "a group"),
        ("rendezvous", 2, "a group"),
    ]
