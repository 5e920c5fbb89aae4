"""Training on a simulated accelerator equals training unsharded, and every access to memory is ordered.

`pytest --all tests/parity -k "W2-checked or W2-late"` runs all of the parity tests so; these are the ways of
communicating, and the ways to train that the quick lane takes on all transports.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard.buffer import slots
from fullshard.comm.backends import BACKENDS
from fullshard.device import CPU, current_stream, streams_of
from fullshard.group import comm_context
from fullshard.group.gradient_buffer import WholeViews
from tests.fully_shard.cases import groups_of
from tests.group import test_extension
from tests.harness import World, ranks
from tests.harness.compare import Precision, Training, adamw, compare, each_block, sgd
from tests.harness.models import MLP, random_batch, seeded
from tests.harness.wrapper import wrap_blocks
from tests.parity import (
    test_accumulation,
    test_composition,
    test_finalization,
    test_gradient_dtypes,
    test_kept_storage,
    test_parameters,
    test_precision,
    test_settings,
    test_sharding,
    test_stages,
    test_stale_reads,
    test_wires,
    test_wrapper_flat,
    test_wrapper_original,
    test_wrapper_strategies,
)
from tests.simulated import simulated


def a_hook_on_a_stream_of_its_own(world: World) -> None:
    def shard(fsdp: ModuleType, model: Any) -> None:
        each_block()(fsdp, model)
        streams = streams_of(CPU)
        assert streams is not None
        stream = streams.make(CPU)
        for module in (*model.blocks, model):
            module.set_all_reduce_hook(lambda gradients: gradients.mul_(2), stream=stream)

    compare(world, Training(build=partial(seeded, MLP), shard=shard, batch=random_batch(4, 6), divisor=world.size / 2))


def an_event_after_the_optimizer(world: World) -> None:
    def tell(model: Any, micro: int) -> None:
        if hasattr(model, "set_post_optim_event"):
            model.set_post_optim_event(current_stream(CPU).record_event())

    training = Training(build=partial(seeded, MLP), shard=each_block(), batch=random_batch(4, 6), set_up_micro=tell)
    compare(world, training)


def an_extension_beside_groups_that_stay(world: World) -> None:
    """What the first layer gathered is freed while the third takes memory of its own: its slot tells no order."""
    model = test_extension.of_kind(test_extension.Kept, rows=40)
    for layer, reshard in ((model[0], True), (model[2], False), (model, True)):
        fullshard.fully_shard(layer, reshard_after_forward=reshard)
    model.set_prefetch_limit(0)  # type: ignore[operator]
    expected = test_extension.losses(world, test_extension.of_kind(None, rows=40), alone=True)
    assert test_extension.losses(world, model) == pytest.approx(expected, rel=1e-5)


def zero_copy_parameters(world: World) -> None:
    """Weights move where they lie, beside a message of biases; gradients stay where autograd made them meanwhile."""

    def set_up(model: Any, micro: int) -> None:
        model.set_requires_gradient_sync(micro == 1)

    def train(world: World, **changes: Any) -> None:
        defaults: dict[str, Any] = {"shard": each_block(), "batch": random_batch(4, 128)}
        compare(world, Training(build=lambda: seeded(lambda: MLP((128,) * 4)), **defaults, **changes))

    with mock.patch.dict(BACKENDS, gloo=BACKENDS["gloo"]._replace(launches_together=True)):
        train(world)
        train(world, micro_batches=2, set_up_micro=set_up)


class Wide(nn.Module):
    """Blocks of two large parameters and six small ones of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 192), nn.Tanh(), nn.LayerNorm(192), nn.Linear(192, 128))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def gradients_cast_into_slots(world: World) -> None:
    """One launch casts those of a group, also where others wait from an earlier micro-batch."""
    precision = Precision(torch.bfloat16, torch.float32)
    cast: list[bool] = []

    def set_up(model: Any, micro: int) -> None:
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(micro != 1)
            cast.extend(type(group.gradients.buffer.views) is WholeViews for group in groups_of(model.blocks))

    with mock.patch.dict(BACKENDS, gloo=BACKENDS["gloo"]._replace(launches_together=True)):
        how: dict[str, Any] = {"shard": each_block(precision=precision), "precision": precision}
        for count in (1, 3):
            build = partial(seeded, Wide)
            compare(
                world,
                Training(build=build, batch=random_batch(4, 128), micro_batches=count, set_up_micro=set_up, **how),
            )
    assert cast[3:6] == [True] * 3  # the layout is made when gradients come first


def hybrid_accumulation(world: World) -> None:
    test_accumulation.test_hybrid_micro_batches(world, 2, test_accumulation.before_all_reduce, None)


def memory_given_back(world: World) -> None:
    """All slots go back to the allocator when a forward or a step ends, as large ones do."""
    with mock.patch.object(comm_context, "LARGE", 0), mock.patch.object(slots, "LARGE", 0):
        test_sharding.test_mlp_of_odd_sizes(world, optimizer=adamw)
        test_sharding.test_ways_to_group_and_to_run(world, way="two forwards")
        hybrid_accumulation(world)


#: Of test_sharding.
SHARDED = (
    "groups inside groups",
    "two forwards",
    "a block that runs twice",
    "prefetch by hand",
    "gathered by hand",
    "members of a list that run apart",
    "evaluation",
)
WAYS: dict[str, Callable[[World], None]] = {
    "blocks": partial(test_sharding.test_mlp_of_odd_sizes, optimizer=adamw),
    "left unsharded": partial(test_sharding.test_reshard_after_forward, reshard=False),
    "hybrid": partial(test_sharding.test_hybrid, replicas=2, optimizer=sgd),
    **{way: partial(test_sharding.test_ways_to_group_and_to_run, way=way) for way in SHARDED},
    "memory given back": memory_given_back,
    "accumulation": partial(test_accumulation.test_micro_batches, communicates="all but one"),
    "one block accumulates": partial(test_accumulation.test_micro_batches, communicates="a block, the last"),
    "hybrid accumulation": hybrid_accumulation,
    "hook on a stream": a_hook_on_a_stream_of_its_own,
    "event after the optimizer": an_event_after_the_optimizer,
    "hook": test_accumulation.test_all_reduce_hook_sees_each_group_once_a_step,
    "recomputation": partial(
        test_composition.test_sharded_blocks_inside_checkpoints, checkpointing="non-reentrant", reshard=True, region=1
    ),
    "recomputation inside": partial(
        test_composition.test_checkpoints_inside_sharded_blocks, checkpointing="non-reentrant"
    ),
    "columns": partial(test_parameters.test_parameters_that_do_not_divide, case="columns"),
    **{
        case: partial(test_parameters.test_parameters, case=case)
        for case in ("tied apart, micro-batches", "frozen among trained", "dtypes computed in one")
    },
    "gradient penalty": partial(
        test_stale_reads.test_a_gradient_penalty, loss=test_stale_reads.whole_step, frozen=True
    ),
    "penalty through a list": test_stale_reads.test_a_penalty_through_a_later_module_of_a_list,
    "offload": partial(test_composition.test_cpu_offload, micro_batches=1, reshard=True),
    "offload, accumulated": partial(test_composition.test_cpu_offload, micro_batches=3, reshard=True),
    "low gradients with a hook": partial(test_gradient_dtypes.test_all_low_gradients_travel_so, library="fullshard"),
    "extensions": partial(
        test_extension.test_what_was_gathered_is_saved_for_backward,
        build=test_extension.of_kind,
        kind=test_extension.Kept,
        transport="collective",
    ),
    "extensions beside groups that stay": an_extension_beside_groups_that_stay,
    "zero-copy parameters": zero_copy_parameters,
    "gradients cast into slots": gradients_cast_into_slots,
    **{
        f"wires, {name}": partial(
            test_wires.test_training_is_the_same_as_with_what_arrives, transport="collective", name=name
        )
        for name in test_wires.POLICIES
    },
    **{
        f"wires, {case}": partial(test_wires.test_ways_to_train, transport="collective", case=case)
        for case in ("micro-batches", "offloaded", "unused")
    },
    "wires, bf16": partial(
        test_wires.test_mixed_precision, transport="collective", reduce_dtype=torch.bfloat16, name="int8"
    ),
    "finalization": partial(
        test_finalization.test_one_reduction_after_several_backwards, async_op=True, reshard=True, precision=Precision()
    ),
    "kept storage": partial(test_kept_storage.test_training_is_as_without, reshard=True),
    "bf16": partial(test_precision.test_bf16_parameters_reduced_in_fp32, optimizer=sgd, micro_batches=1),
    "reductions in flight": partial(
        test_settings.test_several_reductions_in_flight_over_a_group_of_their_own, buffers=2
    ),
    "not gathered in backward": test_settings.test_embedding_that_is_not_gathered_in_backward,
    "shared communication": test_settings.test_two_roots_that_share_their_communication,
    "stage 0": partial(test_stages.test_stages, stage="0"),
    "stage 0, accumulated": partial(test_stages.test_micro_batches, stage="0", set_up=test_stages.accumulating),
    "stage 0, large gradients": partial(
        test_stages.test_gradients_are_added_up_where_autograd_made_them,
        precision=Precision(),
        set_up=test_stages.accumulating,
    ),
    "stage 1, accumulated": partial(test_stages.test_micro_batches, stage="1", set_up=test_stages.accumulating),
    "wrapper": partial(test_wrapper_strategies.test_strategies, strategy="FULL_SHARD", original=True),
    "wrapper, two forwards": partial(
        test_wrapper_original.test_two_forwards_before_one_backward, units=wrap_blocks, strategy="FULL_SHARD"
    ),
    "flat": partial(test_wrapper_strategies.test_strategies, strategy="FULL_SHARD", original=False),
    "flat padding": test_wrapper_flat.test_the_padding_of_a_gradient_is_zero,
    "wrapper, offload": partial(test_wrapper_strategies.test_cpu_offload, strategy="SHARD_GRAD_OP", original=True),
}


#: The ways that the quick lane takes: each has lanes, waits or slots that the others have not.
TELLING = (
    "left unsharded",
    "prefetch by hand",
    "gathered by hand",
    "hybrid accumulation",
    "hook on a stream",
    "event after the optimizer",
    "recomputation",
    "offload",
    "low gradients with a hook",
    "extensions beside groups that stay",
    "zero-copy parameters",
    "wires, int8",
    "stage 0, large gradients",
    "flat",
)
#: Those that it takes late too.
LATE = ("gathered by hand", "hook on a stream", "offload, accumulated", "memory given back", "stage 1, accumulated")


OTHERS = {kind: tuple(way for way in WAYS if way not in some) for kind, some in (("checked", TELLING), ("late", LATE))}


@ranks(2, timeout=240)
@pytest.mark.parametrize(
    ("kind", "ways"),
    [
        ("checked", TELLING),
        ("late", LATE),
        *(pytest.param(kind, rest, marks=pytest.mark.slow) for kind, rest in OTHERS.items()),
    ],
    ids=["checked", "late", "checked, the others", "late, the others"],
)
def test_every_way_to_train(world: World, kind: str, ways: tuple[str, ...]) -> None:
    for way in ways:
        torch.manual_seed(0)
        try:
            with simulated(kind):
                WAYS[way](world)
        except Exception as error:
            error.add_note(f"in the way that is called {way!r}")
            raise


@pytest.mark.slow
@ranks(4, timeout=240)
@pytest.mark.parametrize("kind", ["checked", "late"])
def test_meshes_of_four_ranks(world: World, kind: str) -> None:
    with simulated(kind):
        test_sharding.test_reshard_after_forward_to_a_smaller_group(world)
    with simulated(kind):
        test_accumulation.test_hybrid_micro_batches(world, 2, test_accumulation.before_both, None)
