"""A process that is forked from a rank has the model as it was then, whatever either of them does afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fullshard import fully_shard
from tests.fully_shard.cases import environment, first_of, inputs, shard_mlp
from tests.harness import World, ranks

TRANSPORTS = first_of("transport", "shm", "p2p", "collective")


class Child:
    """A fork of this rank, which looks when it is told to."""

    def __init__(self, look: Callable[[], object]) -> None:
        told, self._tell = os.pipe()
        self._said, saying = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.read(told, 1)
            try:
                said = str(look())
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            os.write(saying, said.encode())
            os._exit(0)
        os.close(told)
        os.close(saying)

    def answer(self) -> str:
        os.write(self._tell, b"!")
        said = os.read(self._said, 1 << 16).decode()
        os.waitpid(self._pid, 0)
        os.close(self._tell)
        os.close(self._said)
        return said


def sums(model: nn.Module) -> list[float]:
    return [parameter.to_local().sum().item() for parameter in model.parameters()]  # type: ignore[attr-defined]


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        model(inputs()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@ranks(2)
@TRANSPORTS
@first_of("before", 2, 0)
def test_a_child_has_what_was_there_when_it_was_forked(world: World, transport: str, before: int) -> None:
    """As of an asynchronous checkpoint by fork. Two children, with steps between."""
    with environment(FULLSHARD_TRANSPORT=transport):
        model = shard_mlp(reshard_after_forward=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, before)
    children, expected = [], []
    for _ in range(3):
        for _ in range(2):
            expected.append(str(sums(model)))
            children.append(Child(lambda: sums(model)))
            with torch.no_grad():
                next(model.parameters()).to_local().data[:1].add_(1.0)  # without a trace
        train(model, optimizer)
    assert [child.answer() for child in children] == expected
    assert len(set(expected)) == len(expected)


@ranks(2)
@TRANSPORTS
def test_what_a_child_writes_reaches_no_rank(world: World, transport: str) -> None:
    with environment(FULLSHARD_TRANSPORT=transport):
        model = shard_mlp(reshard_after_forward=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)

    def spoil() -> list[float]:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().fill_(7)
        return sums(model)

    before = sums(model)
    for child in [Child(spoil) for _ in range(2)]:
        assert child.answer() == str([7.0 * parameter.to_local().numel() for parameter in model.parameters()])
    assert sums(model) == before
    train(model, optimizer)


@ranks(2, transport="shm")
def test_unsharded_parameters_are_there_for_a_child(world: World) -> None:
    """Those of a root that was left whole, and those that were gathered by hand."""
    model = shard_mlp(reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    by_hand = shard_mlp()
    by_hand.blocks[0].unshard()
    model(inputs())
    shown = [*model.parameters(), by_hand.blocks[0][0].weight]
    expected = [parameter.sum().item() for parameter in shown]
    child = Child(lambda: [parameter.sum().item() for parameter in shown])
    model(inputs()).sum().backward()
    optimizer.step()
    train(model, optimizer)
    by_hand.blocks[0].reshard()
    assert child.answer() == str(expected)


@ranks(2, transport="shm")
def test_a_child_that_runs_the_model_is_told(world: World) -> None:
    model = shard_mlp()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = Child(lambda: model(inputs())).answer()
    assert f"was forked from rank {world.rank} (process {os.getpid()}) and is at the beginning of a forward" in found
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


@ranks(2, transport="shm")
def test_many_children_one_after_the_other_share_a_copy_that_does_not_stay(world: World) -> None:
    model = nn.Sequential(nn.Linear(1024, 2048, bias=False), nn.ReLU(), nn.Linear(2048, 1024, bias=False))
    for module in (model[0], model[2], model):
        fully_shard(module)
    x = torch.randn(2, 1024)
    with torch.no_grad():
        model(x)
    before = private_bytes()
    children = [Child(private_bytes) for _ in range(3)]
    copied = private_bytes() - before
    shard = sum(parameter.to_local().nbytes for parameter in model.parameters())  # type: ignore[attr-defined]
    assert shard <= copied < 1.1 * shard + (1 << 20)
    with torch.no_grad():
        model(x)
    assert private_bytes() - before < shard / 2
    assert [int(child.answer()) >= 0 for child in children] == [True] * 3


def private_bytes() -> int:
    with open("/proc/self/smaps_rollup") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("Anonymous:"))


@ranks(2, transport="shm")
def test_a_fork_in_the_middle_of_a_pass(world: World) -> None:
    model = shard_mlp(reshard_after_forward=True)
    seen: list[Child] = []
    expected: list[str] = []

    def fork(module: nn.Module, args: Any) -> None:
        expected.append(str(module.weight.sum().item()))  # type: ignore[operator,union-attr]
        seen.append(Child(lambda: module.weight.sum().item()))  # type: ignore[operator,union-attr]

    handle = model.blocks[1][0].register_forward_pre_hook(fork)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 1)
    handle.remove()
    train(model, optimizer)
    assert [child.answer() for child in seen] == expected
