"""Gradients that are kept apart (:mod:`fullshard.elastic.gradients`)."""

from __future__ import annotations

import os

import torch
from torch import nn

from fullshard.elastic.gradients import KeptGradients


def made() -> tuple[nn.Module, KeptGradients]:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    return model, KeptGradients([*model.parameters()], [*model.buffers()])


def fill(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator)


def test_the_mean_has_the_bits_of_a_sum_in_the_order_of_replicas_whoever_has_the_terms() -> None:
    model, mine = made()
    other_model, theirs = made()
    terms = []
    for replica, kept, each in ((2, theirs, other_model), (0, mine, model), (1, theirs, other_model)):
        fill(each, replica)
        terms.append((replica, [param.grad.clone() for param in each.parameters() if param.grad is not None]))
        told = kept.keep(7, replica)
        (mine if kept is theirs else theirs).add(told)
    assert mine.has_all(7, range(3))
    assert theirs.replicas_of(7) == [0, 1, 2]
    ordered = [grads for _, grads in sorted(terms, key=lambda each: each[0])]
    for kept, each in ((mine, model), (theirs, other_model)):
        kept.show_mean(7, range(3))
        for index, param in enumerate(each.parameters()):
            a, b, c = (grads[index] for grads in ordered)
            assert torch.equal(param.grad, (a + b + c) / 3)  # type: ignore[arg-type]


def test_gradients_of_some_replicas_only_and_of_none() -> None:
    model, kept = made()
    first, second, *rest = model.parameters()
    kept.begin()
    first.grad = torch.full_like(first, 2.0)
    kept.keep(0, 0)
    kept.begin()
    first.grad, second.grad = torch.full_like(first, 4.0), torch.full_like(second, 6.0)
    kept.keep(0, 1)
    kept.show_mean(0, range(2))
    assert first.grad is not None
    assert second.grad is not None
    assert first.grad.eq(3.0).all()
    assert second.grad.eq(3.0).all()
    assert all(param.grad is None for param in rest)


def test_buffers_are_those_of_the_first_replica_and_each_begins_with_the_same() -> None:
    model, kept = made()
    for replica in (1, 0):
        kept.begin()
        assert model[1].running_mean.eq(0).all()  # type: ignore[index, union-attr]
        model[1].running_mean.fill_(replica + 1.0)  # type: ignore[index, operator]
        kept.keep(0, replica)
    kept.show_mean(0, range(2))
    assert model[1].running_mean.eq(1).all()  # type: ignore[index, union-attr]


def test_what_another_process_kept_lasts_for_one_more_step() -> None:
    model, mine = made()
    _, theirs = made()
    for step in (0, 1):
        fill(model, step)
        theirs.add(mine.keep(step, 0))
    (far,) = theirs.tell_again(0, in_own_memory=False)
    assert far.address.pid == os.getpid()
    assert far == mine._note(0, 0, *mine._of[0, 0]), "in the memory of the process that has them"
    again = theirs.tell_again(0, in_own_memory=True)
    assert again[0].address != far.address
    assert [(kept.step, kept.replica) for kept in again] == [(0, 0)]
    _, third = made()
    third.add(again[0])
    third.add(mine.with_data(mine.keep(1, 1))._replace(host="elsewhere"))
    fill(model, 0)
    expected = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    for view, grad in zip(third._of[0, 0][0].views, expected, strict=False):
        assert torch.equal(view, grad)  # type: ignore[arg-type]
    theirs.forget(0)
    assert theirs.replicas_of(0) == []
    assert theirs.replicas_of(1) == [0]


def test_a_packed_mean_is_shown_elsewhere() -> None:
    model, kept = made()
    fill(model, 5)
    next(model.parameters()).grad = None
    kept.keep(0, 0)
    kept.show_mean(0, [0])
    other, theirs = made()
    theirs.show_packed(*kept.pack_mean())
    for mine, copied in zip(model.parameters(), other.parameters(), strict=True):
        assert (mine.grad is None) == (copied.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, copied.grad)  # type: ignore[arg-type]
