"""Training on an accelerator that only pretends is as training unsharded, and every access to memory has its order.

`pytest --all tests/parity -k "checked or late"` runs all of the parity tests so; these are the ways of communicating.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from tests.harness import World, ranks
from tests.harness.compare import adamw, sgd
from tests.parity import (
    test_accumulation,
    test_composition,
    test_finalization,
    test_kept_storage,
    test_precision,
    test_settings,
    test_sharding,
    test_wrapper_strategies,
)
from tests.pretend import pretended

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
    "hook": test_accumulation.test_all_reduce_hook_sees_each_group_once_a_step,
    "recomputation": partial(
        test_composition.test_sharded_blocks_inside_checkpoints, checkpointing="non-reentrant", reshard=True
    ),
    "offload": partial(test_composition.test_cpu_offload, optimizer=adamw, reshard=True),
    "offload, accumulated": test_composition.test_cpu_offload_over_micro_batches,
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
