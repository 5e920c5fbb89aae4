"""Training on an accelerator that only pretends is as training unsharded, and every access to memory has its order.

`pytest --all tests/parity -k "checked or late"` runs all of the parity tests so; these are the ways of communicating.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

from fullshard.device import CPU, current_stream, streams_of
from tests.fully_shard import test_extensions
from tests.harness import World, ranks
from tests.harness.compare import Training, adamw, compare, each_block, sgd
from tests.harness.models import MLP, random_batch, seeded
from tests.parity import (
    test_accumulation,
    test_composition,
    test_finalization,
    test_gradient_dtypes,
    test_kept_storage,
    test_precision,
    test_settings,
    test_sharding,
    test_wrapper_strategies,
)
from tests.pretend import pretended


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


WAYS: dict[str, Callable[[World], None]] = {
    "blocks": partial(test_sharding.test_mlp_of_odd_sizes, optimizer=adamw),
    "left unsharded": partial(test_sharding.test_reshard_after_forward, reshard=False),
    "hybrid": partial(test_sharding.test_hybrid_on_two_ranks, shape=(2, 1)),
    "prefetch by hand": test_sharding.test_explicit_prefetch,
    "gathered by hand": test_sharding.test_parameters_gathered_by_hand,
    "a list": test_sharding.test_members_of_a_list_run_apart,
    "evaluation": test_sharding.test_a_step_after_evaluation_is_seen_by_the_next_forward,
    "accumulation": test_accumulation.test_some_micro_batches_communicate,
    "hybrid accumulation": partial(
        test_accumulation.test_hybrid_accumulated_before_all_reduce_on_two_ranks, shape=(2, 1)
    ),
    "hook on a stream": a_hook_on_a_stream_of_its_own,
    "event after the optimizer": an_event_after_the_optimizer,
    "hook": test_accumulation.test_all_reduce_hook_sees_each_group_once_a_step,
    "recomputation": partial(
        test_composition.test_sharded_blocks_inside_checkpoints, checkpointing="non-reentrant", reshard=True
    ),
    "offload": partial(test_composition.test_cpu_offload, optimizer=adamw, reshard=True),
    "offload, accumulated": test_composition.test_cpu_offload_over_micro_batches,
    "low gradients with a hook": partial(test_gradient_dtypes.test_all_low_gradients_travel_so, library="fullshard"),
    "extensions": partial(
        test_extensions.test_a_subclass_may_keep_what_was_gathered, transport="collective", swaps=True
    ),
    "finalization": partial(test_finalization.test_one_reduction_after_several_backwards, async_op=True),
    "kept storage": partial(test_kept_storage.test_training_is_as_without, swaps=True, reshard=True),
    "bf16": partial(test_precision.test_bf16_parameters_reduced_in_fp32, optimizer=sgd),
    "reductions in flight": partial(
        test_settings.test_several_reductions_in_flight_over_a_group_of_their_own, buffers=2
    ),
    "not gathered in backward": test_settings.test_embedding_that_is_not_gathered_in_backward,
    "shared communication": test_settings.test_two_roots_that_share_their_communication,
    "wrapper": partial(test_wrapper_strategies.test_strategies, strategy="FULL_SHARD", original=True),
    "flat": partial(test_wrapper_strategies.test_strategies, strategy="FULL_SHARD", original=False),
    "wrapper, offload": partial(test_wrapper_strategies.test_cpu_offload, strategy="SHARD_GRAD_OP", original=True),
}


@ranks(2, timeout=90)
@pytest.mark.parametrize("kind", ["checked", "late"])
def test_every_way_to_train(world: World, kind: str) -> None:
    for way, train in WAYS.items():
        torch.manual_seed(0)
        try:
            with pretended(kind):
                train(world)
        except Exception as error:
            error.add_note(f"in the way that is called {way!r}")
            raise


@ranks(4, timeout=120)
def test_parameters_that_rest_on_a_smaller_mesh(world: World) -> None:
    with pretended("checked"):
        test_sharding.test_reshard_after_forward_to_a_smaller_group(world)
