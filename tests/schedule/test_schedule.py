"""The exact order in which groups are gathered, shown, freed and reduced: what an observer hears of a step."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard.schedule import schedule
from fullshard.schedule.schedule import check_first_forward
from fullshard.schedule.unit import unit_of
from tests.fully_shard.cases import Recorder, groups_of, inputs, shard_mlp
from tests.harness import World, fake_world, ranks
from tests.harness.compare import whole
from tests.harness.models import MLP, Transformer, WithBuffers, seeded, shard_each
from tests.harness.slow import slow


def differentiable() -> Tensor:
    """Inputs whose gradients tell the first group, and the root, that their backward has ended."""
    return inputs().requires_grad_()


def only(events: list[str], *actions: str) -> list[str]:
    return [event for event in events if event.split()[0] in actions]


@ranks(2, transport="p2p")
def test_a_step_without_prefetch(world: World) -> None:
    model = shard_mlp()
    model.set_prefetch_limit(0)
    recorder = Recorder(model)
    output = model(differentiable())
    forward = ["gather root", "unshard root"]
    for block in range(4):
        forward += [f"gather {block}", f"unshard {block}", f"reshard {block}"]
    assert recorder.take() == forward
    output.sum().backward()
    backward = ["reuse 3", "unshard 3", "reduce 3", "reshard 3"]
    for block in (2, 1, 0):
        backward += [f"gather {block}", f"unshard {block}", f"reduce {block}", f"reshard {block}"]
    assert recorder.take() == [*backward, "reduce root", "reshard root"]


@ranks(2, transport="p2p")
def test_a_first_group_whose_inputs_have_no_gradient_is_reduced_too(world: World) -> None:
    model = shard_mlp()
    model(inputs()).sum().backward()
    recorder = Recorder(model, "reduce", "reshard")
    model(inputs()).sum().backward()
    events = recorder.take()
    assert sorted(only(events, "reduce")) == [f"reduce {group}" for group in (0, 1, 2, 3, "root")]
    assert {"reshard 0", "reshard root"} <= set(events)


@ranks(2, transport="p2p")
def test_the_gradients_of_a_head_are_reduced_when_the_first_block_begins(world: World) -> None:
    """Only those of the embedding are left at the end. What accumulates is reduced once."""
    found = list[list[Tensor]]()
    for least in (1, 1 << 40):
        model = seeded(lambda: Transformer(2))
        fullshard.fully_shard_blocks(model)
        recorder = Recorder(model, "reduce")
        with mock.patch.object(schedule, "EARLY", least):
            for micro_batch in range(3):
                model.set_requires_gradient_sync(micro_batch != 1)
                model(torch.arange(8).view(2, 4) + world.rank).sum().backward()
        early = ["reduce root"] if least == 1 else []
        blocks = ["reduce 1", "reduce 0", "reduce root"]
        assert recorder.take() == [*early, *blocks, *blocks]
        found.append([whole(param.grad) for param in model.parameters() if param.grad is not None])
    assert all(map(torch.equal, *found))
    assert len(found[0]) == len([*model.parameters()])


@ranks(2, transport="p2p")
def test_the_first_forward_gathers_nothing_ahead_and_later_ones_one_group(world: World) -> None:
    model = shard_mlp()
    recorder = Recorder(model)
    with torch.no_grad():
        model(inputs())
    expected = ["gather root", "unshard root"]
    for block in range(4):
        expected += [f"gather {block}", f"unshard {block}", f"reshard {block}"]
    assert recorder.take() == expected
    model(inputs()).sum().backward()
    recorder.take()
    with torch.no_grad():
        model(inputs())
    expected = ["gather root", "unshard root", "gather 0"]
    for block in range(3):
        expected += [f"unshard {block}", f"gather {block + 1}", f"reshard {block}"]
    assert recorder.take() == [*expected, "unshard 3", "reshard 3"]


@ranks(2, transport="p2p")
def test_backward_gathers_one_group_ahead(world: World) -> None:
    model = shard_mlp()
    recorder = Recorder(model, "gather", "reuse", "reduce", "reshard")
    output = model(differentiable())
    recorder.take()
    output.sum().backward()
    expected = ["reuse 3"]
    for block in (3, 2, 1):
        expected += [f"gather {block - 1}", f"reduce {block}", f"reshard {block}"]
    assert recorder.take() == [*expected, "reduce 0", "reshard 0", "reduce root", "reshard root"]


@ranks(2, transport="p2p")
@pytest.mark.parametrize("limit", [0, 2, *slow(1, 3)])
def test_as_many_groups_are_gathered_ahead_as_the_limit_says(world: World, limit: int) -> None:
    model = shard_mlp()
    model.set_prefetch_limit(limit)
    model(inputs()).sum().backward()
    recorder = Recorder(model, "gather", "reshard")
    with torch.no_grad():
        model(inputs())
    alive, most = 0, 0
    for event in recorder.take():
        if not event.endswith("root"):
            alive += 1 if event.startswith("gather") else -1
        most = max(most, alive)
    assert (alive, most) == (0, 1 + limit)


@ranks(2, transport="p2p")
@pytest.mark.parametrize("groups", [0, 2.5, *slow(0.9, 1, 99)])
def test_groups_are_gathered_ahead_as_far_as_their_bytes_allow(world: World, groups: float) -> None:
    """Forward and backward gather the same groups at the same places as with the number of groups that fit."""
    events = []
    for name in ("groups", "nbytes"):
        model = seeded(lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(5))))
        for layer in model:
            fullshard.fully_shard(layer, reshard_after_forward=True)
        fullshard.fully_shard(model)
        size = unit_of(model[0]).groups[0].full.buffer.nbytes  # type: ignore[union-attr]
        model.set_prefetch_limit(**{name: int(groups if name == "groups" else groups * size)})
        x = torch.ones(2, 8, requires_grad=True)
        model(x).sum().backward()
        recorder = Recorder(model, "gather", "reshard")
        model(x).sum().backward()
        events.append(recorder.take())
    assert events[0] == events[1]


@ranks(2, transport="p2p")
def test_explicit_lists_replace_the_recorded_order(world: World) -> None:
    model = shard_mlp()
    blocks = model.blocks
    model.set_modules_to_forward_prefetch([blocks[0], blocks[2]])
    blocks[0].set_modules_to_forward_prefetch([blocks[3]])
    blocks[3].set_modules_to_backward_prefetch([blocks[1], blocks[2]])
    recorder = Recorder(model, "gather", "reuse", "unshard")
    output = model(inputs())
    forward = recorder.take()
    expected = ["gather root", "unshard root", "gather 0", "gather 2", "unshard 0", "gather 3"]
    assert forward[: len(expected)] == expected
    assert forward.count("gather 2") == forward.count("gather 3") == 1
    output.sum().backward()
    backward = [event.split()[1] for event in recorder.take()]
    assert backward.index("3") < backward.index("1") < backward.index("2") < backward.index("0")


@ranks(2, transport="p2p")
def test_empty_lists_bring_the_recorded_order_back(world: World) -> None:
    model = shard_mlp()
    model.set_modules_to_forward_prefetch([model.blocks[2]])
    model.set_modules_to_forward_prefetch([])
    model(inputs()).sum().backward()
    recorder = Recorder(model, "gather", "reshard")
    model(inputs())
    assert recorder.take()[:4] == ["gather root", "gather 0", "gather 1", "reshard 0"]


@ranks(2, transport="p2p")
def test_without_reshard_after_forward_backward_gathers_nothing(world: World) -> None:
    model = shard_mlp(reshard_after_forward=False)
    recorder = Recorder(model)
    output = model(differentiable())
    assert only(recorder.take(), "reshard") == []
    output.sum().backward()
    events = recorder.take()
    assert only(events, "gather", "reuse", "unshard") == []
    assert events == [f"{action} {group}" for group in (3, 2, 1, 0, "root") for action in ("reduce", "reshard")]


@ranks(4, transport="p2p")
def test_an_int_rests_after_forward_and_gathers_again(world: World) -> None:
    model = shard_mlp(reshard_after_forward=2)
    model.set_prefetch_limit(0)
    recorder = Recorder(model, "rest", "reshard", "gather")
    output = model(differentiable())
    assert only(recorder.take(), "rest", "reshard") == [f"rest {group}" for group in (0, 1, 2, 3, "root")]
    output.sum().backward()
    events = recorder.take()
    assert only(events, "gather") == [f"gather {group}" for group in ("root", 3, 2, 1, 0)]
    assert only(events, "reshard") == [f"reshard {group}" for group in (3, 2, 1, 0, "root")]


@ranks(2, transport="p2p")
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_recomputation_gathers_each_group_once(world: World, kind: Any, is_nested: bool) -> None:
    model = seeded(lambda: Transformer(layers=3, checkpointing=kind))
    for block in model.blocks:
        if is_nested:
            fullshard.fully_shard(block.attention)
        fullshard.fully_shard(block)
    fullshard.fully_shard(model)
    for _ in range(2):
        output = model(torch.arange(6).view(2, 3))
        recorder = Recorder(model, "gather", "reuse", "reshard", "reduce")
        output.sum().backward()
        events = recorder.take()
        recorder.stop()
        for group in ("0", "1", "2", *(["0.attention", "1.attention"] if is_nested else [])):
            mine = [event for event in events if event.split()[1] == group]
            assert len(only(mine, "gather", "reuse")) == 1, events
            assert only(mine, "reduce") == [f"reduce {group}"], events
            assert is_nested or only(mine, "reshard") == [f"reshard {group}"], events


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = MLP((6, 5, 3))
        self.outer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x))


@ranks(2, transport="p2p")
def test_nested_groups_open_from_outside_and_close_from_inside(world: World) -> None:
    model = seeded(Nested)
    shard_each(*model.inner.blocks, model.inner, model)
    model.set_prefetch_limit(0)
    recorder = Recorder(model, "unshard", "reshard", "reduce")
    output = model(differentiable())
    assert recorder.take() == [
        "unshard root",
        "unshard inner",
        "unshard inner.0",
        "reshard inner.0",
        "unshard inner.1",
        "reshard inner.1",
        "reshard inner",
    ]
    output.sum().backward()
    assert recorder.take() == [
        "unshard inner",
        "unshard inner.1",
        "reduce inner.1",
        "reshard inner.1",
        "unshard inner.0",
        "reduce inner.0",
        "reshard inner.0",
        "reduce inner",
        "reshard inner",
        "reduce root",
        "reshard root",
    ]


@ranks(2, transport="p2p")
def test_a_list_of_modules_is_one_gather_and_one_reduction(world: World) -> None:
    model = seeded(lambda: MLP((6, 7, 5, 3)))
    fullshard.fully_shard(list(model.blocks)[:2])
    fullshard.fully_shard(model.blocks[2])
    fullshard.fully_shard(model)
    recorder = Recorder(model, "gather", "reshard", "reduce")
    model(inputs()).sum().backward()
    events = recorder.take()
    group = "0, 1"
    assert events.count(f"reduce {group}") == 1
    assert events.index(f"gather {group}") < events.index("gather 2")
    assert events.index(f"reshard {group}") < events.index("reduce 2")


@ranks(2, transport="p2p")
def test_events_tell_pass_and_step(world: World) -> None:
    model = shard_mlp()
    recorder = Recorder(model)
    for _ in range(2):
        model(inputs()).sum().backward()
    events = recorder.events
    assert {event.step for event in events} == {1, 2}
    assert {event.during for event in events if event.action == "reduce"} == {"backward"}
    first = [(event.action, event.during) for event in events if event.step == 1 and event.group == "blocks.1"]
    assert first[0] == ("gather", "forward")
    assert ("unshard", "backward") in first


@ranks(2, transport="p2p")
def test_checkpointing_inside_a_block_does_not_gather_it_again(world: World) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = checkpoint(lambda x: self.second(torch.tanh(self.first(x))), x, use_reentrant=False)
            assert isinstance(y, Tensor)
            return y

    model = seeded(lambda: nn.Sequential(Checkpointed(), Checkpointed()))
    shard_each(*model, model)
    output = model(inputs())
    recorder = Recorder(model, "gather", "reuse")
    output.sum().backward()
    assert sorted(event.split()[1] for event in recorder.take()) == ["0", "1"]


def test_a_forward_after_its_process_group_was_destroyed_is_refused() -> None:
    with fake_world(2):
        model = shard_mlp()
        model(inputs())
    with pytest.raises(RuntimeError, match=r"was destroyed .*: shard the model again after init_process_group"):
        model(inputs())


def test_a_buffer_on_meta_is_named_before_the_first_forward() -> None:
    with torch.device("meta"):
        model = WithBuffers()
    with pytest.raises(RuntimeError, match=r"buffers are still on the meta device: \['saved', 'inner.table'\]"):
        check_first_forward([model], [])
    check_first_forward([WithBuffers()], [])


@ranks(2)
def test_ranks_that_sharded_in_another_order_are_told(world: World) -> None:
    model = shard_mlp()
    groups = groups_of(model)
    check_first_forward([], groups)
    if world.rank:
        groups[0].tag, groups[1].tag = groups[1].tag, groups[0].tag
    with pytest.raises(ValueError, match="did not shard their modules in the same order: rank 0 has the group"):
        check_first_forward([], groups)
