"""Kept memory: taken in turn, grown, and given back."""

from __future__ import annotations

import torch

from fullshard.buffer.sections import ALIGNMENT, align
from fullshard.buffer.slots import Lease, Staging

CPU = torch.device("cpu")


def test_a_buffer_is_used_again() -> None:
    staging = Staging()
    first = staging.lease(100, CPU)
    first.give_back()
    assert staging.lease(80, CPU) is first


def test_two_leases_do_not_share_memory() -> None:
    staging = Staging()
    first, second = staging.lease(64, CPU), staging.lease(64, CPU)
    first.view(torch.uint8, 0, (64,)).fill_(1)
    second.view(torch.uint8, 0, (64,)).fill_(2)
    assert first.view(torch.uint8, 0, (64,)).eq(1).all()


def test_each_exchange_of_a_step_gets_its_buffer_of_the_step_before() -> None:
    staging = Staging()
    steps = []
    for order in ([0, 1], [1, 0], [0, 1]):
        leases = [staging.lease(64, CPU), staging.lease(64, CPU)]
        steps.append([lease.index for lease in leases])
        for which in order:
            leases[which].give_back()
    assert steps == [[0, 1]] * 3


def test_views_stay_right_when_a_buffer_grows_or_was_dropped() -> None:
    staging = Staging()
    lease = staging.lease(64, CPU)
    view = lease.view(torch.float32, 16, (4,))
    lease.give_back()
    assert staging.lease(4096, CPU) is lease
    lease.view(torch.float32, 16, (4,)).fill_(7)
    assert view.tolist() == [7] * 4
    lease.give_back()
    assert staging.nbytes_free == 4096
    assert staging.drop() == 4096
    assert staging.nbytes_free == 0
    assert staging.lease(64, CPU) is lease
    lease.view(torch.float32, 16, (4,)).fill_(8)
    assert view.tolist() == [8] * 4


def test_a_buffer_in_use_is_not_dropped() -> None:
    staging = Staging()
    lease = staging.lease(64, CPU)
    assert staging.drop() == 0
    assert lease.storage.nbytes() == 64


def test_views_may_have_any_shape_and_dtype() -> None:
    lease = Lease(torch.arange(64, dtype=torch.uint8)[8:])
    assert lease.view(torch.uint8, 2, (2, 3)).tolist() == [[10, 11, 12], [13, 14, 15]]
    assert lease.view(torch.int16, 0, (2,)).view(torch.uint8).tolist() == [8, 9, 10, 11]


def test_buffers_are_aligned() -> None:
    lease = Staging().lease(1000, CPU)
    assert lease.storage.data_ptr() % ALIGNMENT == 0
    assert [align(nbytes) for nbytes in (0, 1, 64, 65)] == [0, 64, 64, 128]
