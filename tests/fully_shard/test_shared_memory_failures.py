"""What goes wrong with ranks that share memory: one is lost, fails, differs, or has no memory to share."""

from __future__ import annotations

import copy
import os
import signal
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

import fullshard
from fullshard.buffer.shared_memory import Segment
from fullshard.comm.shm import ShmTransport
from tests.fully_shard.cases import EXCHANGED, Twins, assert_close, environment, first_of, groups_of, inputs, shard_mlp
from tests.fully_shard.test_errors_in_step import fail_in_backward, fail_in_forward
from tests.harness import RankPool, World, ranks
from tests.harness.compare import each_block, kept, whole
from tests.harness.models import MLP, seeded


def shared(model: nn.Module) -> list[bool]:
    return [group.shard.shared is not None for group in groups_of(model)]


def lose_rank_1(world: World, where: str) -> None:
    """A good step, and one in which rank 1 is killed."""
    with environment(FULLSHARD_TRANSPORT="shm"):
        model = shard_mlp()
    model(inputs()).sum().backward()

    def die(*args: Any) -> None:
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    if where == "forward":
        model.blocks[2].register_forward_pre_hook(die)
    else:
        model.blocks[2].register_full_backward_hook(die)
    model(inputs()).sum().backward()


@pytest.mark.parametrize(
    ("where", "waits"),
    [
        pytest.param("forward", "the end of a forward", marks=pytest.mark.slow),
        pytest.param(
            "backward",
            "a reduction, to be read by the other ranks, in the backward of step 1 (forward 2), at 'blocks.",
            marks=EXCHANGED,
        ),
    ],
)
def test_a_lost_rank_is_named_by_all_others_at_once(rank_pool: RankPool, where: str, waits: str) -> None:
    outcomes = rank_pool.run(lose_rank_1, 3, where)
    assert [outcome.kind for outcome in outcomes] == ["raised", "died", "raised"]
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.at - outcomes[1].at < 5
        assert f"rank {outcome.rank} waited in {waits}" in outcome.summary
        assert "for rank 1 (process " in outcome.summary
        assert "which has ended" in outcome.summary


@ranks(2, transport="shm")
@pytest.mark.parametrize("fail", [fail_in_forward, fail_in_backward])
@first_of("where", 3, 0)
def test_a_step_after_an_error_is_right_however_late_a_rank_fails(world: World, fail: Any, where: int) -> None:
    pair = Twins(world, shard_mlp(), seeded(MLP))
    for slow in range(world.size):
        pair.step()
        wait = 0.05 if world.rank == slow else 0.0
        time.sleep(wait)
        fail(pair.sharded.blocks[where][1], lambda: pair.sharded(inputs()).sum().backward())
        time.sleep(wait)
        pair.sharded.reset_iter_state()
        pair.sharded.zero_grad()
    for _ in range(2):
        pair.step()


@ranks(2, transport="shm")
@first_of("where", 1, 0, 3)
def test_a_reset_keeps_the_gradients_that_were_there(world: World, where: int) -> None:
    """Each is that of the first backward or of both; what a lost reduction would have written is in none."""
    model = shard_mlp(reshard_after_forward=True)
    parameters = list(model.parameters())
    model(inputs()).sum().backward()
    first = [whole(parameter.grad) for parameter in parameters]
    spoiled = [torch.full((numel,), 1e30) for numel in range(1, 200)]  # for the allocator to hand out again
    del spoiled
    fail_in_backward(model.blocks[where][1], lambda: model(inputs()).sum().backward())
    model.reset_iter_state()
    for parameter, once in zip(parameters, first, strict=True):
        found = whole(parameter.grad)
        assert torch.allclose(found, once) or torch.allclose(found, 2 * once)


@EXCHANGED
@ranks(2, transport="shm")
def test_a_reset_of_one_model_says_what_another_has_lost(world: World) -> None:
    one, other = shard_mlp(), shard_mlp()
    parameters = list(one.parameters())
    one.set_is_last_backward(False)
    one(inputs()).sum().backward()
    fail_in_backward(other.blocks[3][1], lambda: other(inputs()).sum().backward())
    other.reset_iter_state()
    one.set_is_last_backward(True)
    with pytest.raises(RuntimeError, match=r"was lost when reset_iter_state\(\) was called .* in another model"):
        one(inputs()).sum().backward()
    one.reset_iter_state()
    one.zero_grad()
    one(inputs()).sum().backward()
    reference = seeded(MLP)
    reference(inputs()).sum().backward()
    for parameter, expected in zip(parameters, reference.parameters(), strict=True):
        assert_close(kept(parameter.grad), expected.grad, "gradient")  # type: ignore[arg-type]


@ranks(2, transport="shm")
def test_an_error_on_one_rank_after_its_forward(world: World) -> None:
    """Programs that find a bad batch agree to skip it; the forward had ended on all ranks."""
    pair = Twins(world, shard_mlp(), seeded(MLP))
    for step in range(3):
        pair.sharded(inputs(step))
        failed = torch.tensor([float(world.rank == step % 2)])
        dist.all_reduce(failed)
        assert failed.item() == 1
        pair.sharded.reset_iter_state()
        pair.step()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, further: bool) -> torch.Tensor:
        x = self.always(x)
        return self.sometimes(x) if further else x


@EXCHANGED
@ranks(2, transport="shm")
def test_ranks_that_use_different_parameters_of_a_group_are_told_what_to_set(world: World) -> None:
    model, reference = seeded(Branches), seeded(Branches)
    fullshard.fully_shard(model)
    parameters = list(model.parameters())
    for rank in range(world.size):
        (reference(inputs(), rank == 0).sum() / world.size).backward()
    with pytest.raises(RuntimeError, match=r"set_reduce_scatter_unused_params\(True\)"):
        model(inputs(), world.rank == 0).sum().backward()
    model.reset_iter_state()
    model.zero_grad()
    model.set_reduce_scatter_unused_params(True)
    model(inputs(), world.rank == 0).sum().backward()
    for parameter, expected in zip(parameters, reference.parameters(), strict=True):
        assert_close(kept(parameter.grad), expected.grad, "gradient")  # type: ignore[arg-type]


@ranks(2)
def test_ranks_with_different_transports_are_told(world: World) -> None:
    with (
        environment(FULLSHARD_TRANSPORT=("", "p2p")[world.rank]),
        pytest.raises(ValueError, match="rank 0 has FULLSHARD_TRANSPORT='' where rank 1 has FULLSHARD_TRANSPORT='p2p'"),
    ):
        shard_mlp()


@ranks(2, transport="shm")
def test_ranks_of_which_one_is_on_meta_are_told(world: World) -> None:
    model = seeded(MLP)
    each_block()(fullshard, model.to("meta") if world.rank else model)
    with pytest.raises(ValueError, match="on the meta device on all or none of them"):
        model(inputs())
    model.reset_iter_state()
    model.to_empty(device="cpu")
    with torch.no_grad():
        model(inputs())


@ranks(2, 3)
@first_of("before", 2, 0)
def test_where_one_rank_has_no_memory_left_all_exchange_messages(world: World, before: int) -> None:
    """For every group from then on; those that share already go on to."""
    model, reference, opened = shard_mlp(), seeded(MLP), []

    def refuse(*args: Any) -> Any:
        opened.append(args)
        if len(opened) > 2 * before:  # to write and to read
            raise OSError(12, "Cannot allocate memory")
        return open_segment(*args)

    open_segment = Segment.open
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        if world.rank == 1:
            patch.setattr(Segment, "open", refuse)
        assert_close(model(inputs()), reference(inputs()), "output")
    model.reshard()
    assert sum(shared(model)) == before
    pair = Twins(world, model, reference)
    for _ in range(3):
        pair.step()


@EXCHANGED
@ranks(2, transport="shm")
def test_too_little_memory_for_gradients_says_what_to_do(world: World) -> None:
    model = shard_mlp()
    model(inputs())

    def refuse(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    loss = model(inputs()).sum()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.posix_fallocate", refuse)
        with pytest.raises(
            RuntimeError, match=r"shared memory for gradients \(.*No space left on device\): free memory"
        ):
            loss.backward()
    model.reset_iter_state()
    Twins(world, model, seeded(MLP)).step()
    assert all(isinstance(group.reduce_transport, ShmTransport) for group in groups_of(model))


@ranks(2, 3, transport="shm")
def test_a_rank_that_leaves_out_a_backward_is_found_at_the_next_pass(world: World) -> None:
    model = shard_mlp()
    model(inputs()).sum().backward()
    loss = model(inputs()).sum()
    following = partial(model, inputs()) if world.rank == 1 else loss.backward
    with pytest.raises(RuntimeError, match="has left out a forward or a backward"):
        following()
    model.reset_iter_state()
    model(inputs()).sum().backward()


@ranks(2, transport="shm")
@first_of("placement", 1, 0)
def test_another_default_device_changes_nothing(world: World, placement: int) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 3, bias=False)))
    reference = copy.deepcopy(model)
    with torch.device("meta"):
        fullshard.fully_shard(model[0], shard_placement_fn=lambda _: Shard(placement))
        fullshard.fully_shard(model)
        model[0].unshard()
    assert shared(model) == [True, True]
    for _ in range(2):
        assert_close(model(inputs()), reference(inputs()), "output")
