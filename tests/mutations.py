"""Deliberate bugs in the library, and which test of the quick lane finds each: `python -m tests.mutations`.

Each is one change of the kind that a mistaken edit makes. A copy of the source gets it, and tests run on that copy
until the first one fails: the one that is known to find it, then those that stand nearest, then the rest of the lane. A
bug that none of them finds would get through.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: The tests that stand nearest to the files that begin so, the most telling ones first.
NEAREST = {
    "device.py": ("tests/simulated",),
    "module.py": ("tests/simulated", "tests/fully_shard"),
    "buffer/plan.py": ("tests/buffer/test_plan.py", "tests/comm/test_rounds.py", "tests/comm/test_transport.py"),
    "buffer/messages.py": (
        "tests/buffer/test_messages.py",
        "tests/group/test_gradient_buffer.py",
        "tests/comm/test_collective.py",
        "tests/comm/test_transport.py",
    ),
    "buffer/": ("tests/buffer", "tests/fully_shard/test_shared_memory.py", "tests/fully_shard/test_forks.py"),
    "group/gradients.py": (
        "tests/parity/test_accumulation.py",
        "tests/fully_shard/test_errors_in_step.py",
        "tests/fully_shard/test_communication.py",
        "tests/parity/test_wrapper_flat.py",
        "tests/parity/test_wrapper_gradients.py",
        "tests/parity/test_parameters.py",
        "tests/parity/test_gradient_dtypes.py",
    ),
    "schedule/": (
        "tests/parity/test_sharding.py",
        "tests/schedule/test_schedule.py",
        "tests/fully_shard/test_decisions.py",
        "tests/schedule/test_unit.py",
        "tests/parity/test_finalization.py",
        "tests/fully_shard/test_shared_memory.py",
    ),
    "comm/shm.py": (
        "tests/comm/test_shm.py",
        "tests/comm/test_transport.py",
        "tests/fully_shard/test_shared_memory.py",
    ),
    "comm/local_ranks.py": (
        "tests/comm/test_local_ranks.py",
        "tests/fully_shard/test_shared_memory.py",
        "tests/fully_shard/test_shared_memory_failures.py",
    ),
    "comm/": ("tests/comm/test_rounds.py", "tests/comm/test_point_to_point.py", "tests/comm/test_transport.py"),
    "watch/": ("tests/watch", "tests/faults"),
    "wrapper/state_dict.py": ("tests/wrapper/test_load_state_dict.py", "tests/wrapper", "tests/checkpoint"),
    "wrapper/optim_": ("tests/wrapper/test_optim_state_odd.py", "tests/wrapper", "tests/checkpoint"),
    "wrapper/flat.py": ("tests/parity/test_wrapper_flat.py", "tests/parity/test_wrapper_original.py", "tests/wrapper"),
    "wrapper/": ("tests/parity/test_wrapper_gradients.py", "tests/wrapper", "tests/parity/test_wrapper_precision.py"),
    "group/": ("tests/simulated", "tests/parity"),
    "checkpoint/": ("tests/checkpoint",),
    "report/": ("tests/report",),
    "optim/": ("tests/optim", "tests/parity/test_wrapper_gradients.py", "tests/wrapper/test_scaled_steps.py"),
    "compat/": ("tests/compat", "tests/test_interop.py", "tests/frameworks/test_torch.py"),
}
#: Bytes that a process of a run may take: some bugs make lists that do not end.
_MOST_MEMORY = 2**33


@dataclass(frozen=True)
class Mutation:
    """In `file`, below `src/fullshard`, `before` stands once and becomes `after`; `test` is one that finds it."""

    file: str
    before: str
    after: str
    test: str


MUTATIONS = (
    # what wires encode and keep
    Mutation(
        "group/feedback.py",
        "chunk.copy_(loaded).mul_(self._group.divisor)",
        "chunk.copy_(loaded)",
        "tests/checkpoint/test_feedback.py::test_the_first_gradients_after_a_load_include_what_was_lost",
    ),
    Mutation(
        "group/feedback.py",
        "if loaded is not None and (replica_parts or data.replicate_rank == 0)",
        "if loaded is not None",
        "tests/checkpoint/test_feedback.py::test_replicas_save_together_what_each_has_lost",
    ),
    Mutation(
        "group/feedback.py",
        "Feedback(self.lost_of(parts, zero_copy), self._was_loaded)",
        "Feedback(self.lost_of(parts, zero_copy))",
        "tests/checkpoint/test_feedback.py::test_the_first_gradients_after_a_load_include_what_was_lost",
    ),
    Mutation(
        "group/feedback.py",
        "        if before is not None:\n",
        "        if before is self:\n",
        "tests/group/test_feedback.py::test_what_was_lost_stays_when_other_parameters_are_frozen",
    ),
    Mutation(
        "encodings.py",
        "is_odd = scales < 0",
        "is_odd = scales < -1",
        "tests/test_encodings.py::test_infinities_and_nan_stay_in_their_places",
    ),
    Mutation(
        "encodings.py",
        '_levels, _scale_dtype, _kernel, _exponent, _fused = 15, torch.float16, "4bit", 14, 1',
        '_levels, _scale_dtype, _kernel, _exponent, _fused = 15, torch.float16, "4bit", 17, 1',
        "tests/test_encodings.py::test_an_error_is_within_the_step_of_its_block",
    ),
    # where parameters lie
    Mutation(
        "buffer/plan.py",
        "length = -(-size // ranks)",
        "length = max(1, size // ranks)",
        "tests/buffer/test_plan.py::test_chunks_are_those_of_torch",
    ),
    Mutation(
        "buffer/plan.py",
        "(length, rest, 0)",
        "(length, length, 0)",
        "tests/buffer/test_plan.py::test_chunks_are_those_of_torch",
    ),
    Mutation(
        "buffer/plan.py",
        "*starts, self.is_kept, self.section, self.part_of)",
        "*starts, self.is_kept)",
        "tests/comm/test_rounds.py::test_every_element_travels_once",
    ),
    Mutation(
        "buffer/plan.py",
        "return same and self.full_numel == self.world_size * self.shard_numel",
        "return same",
        "tests/buffer/test_plan.py::test_rank_major_is_where_the_shards_end_to_end_are_the_full_buffer",
    ),
    Mutation(
        "buffer/plan.py",
        "place = start + first - rank",
        "place = start - rank",
        "tests/buffer/test_plan.py::test_a_part_lies_in_its_place_in_the_shard",
    ),
    Mutation(
        "buffer/plan.py",
        "(min(max(edge - start, 0), numel)",
        "(min(edge - start, numel)",
        "tests/buffer/test_plan.py::test_fragments_of_flat_are_what_the_pieces_say",
    ),
    Mutation(
        "buffer/plan.py",
        "in edges if end < start]",
        "in edges if end > start]",
        "tests/buffer/test_plan.py::test_gaps_are_what_no_parameter_fills",
    ),
    Mutation(
        "buffer/plan.py",
        "end = -(-end // plan.alignment) * plan.alignment",
        "end = +end",
        "tests/buffer/test_plan.py::test_parameters_are_aligned_and_nothing_more_is_added_between_them",
    ),
    Mutation(
        "buffer/plan.py",
        "-(-(end + numel) // alignment) * alignment, initial",
        "end + numel, initial",
        "tests/buffer/test_plan.py::test_parameters_are_aligned_and_nothing_more_is_added_between_them",
    ),
    Mutation(
        "buffer/plan.py",
        "(plan.end,)",
        "(plan.full_numel,)",
        "tests/buffer/test_plan.py::test_flat_is_one_piece_for_each_rank_up_to_the_last_parameter",
    ),
    Mutation(
        "buffer/plan.py",
        "dims = [(stop - first, step, pitch), (outer, row, width)",
        "dims = [(stop - first, step, pitch), (outer, width, width)",
        "tests/buffer/test_plan.py::test_every_element_of_a_parameter_has_one_owner",
    ),
    Mutation(
        "comm/all_reduce.py",
        "scaling = Scaling(before=reduction.divisor)",
        "scaling = Scaling(after=reduction.divisor)",
        "tests/comm/test_all_reduce.py::test_a_sum_in_fp16_does_not_overflow",
    ),
    Mutation(
        "comm/shm.py",
        "mine.copy_(slot)",
        "mine",
        "tests/comm/test_all_reduce.py::test_replicas_get_the_same_where_the_sum_is_rounded",
    ),
    Mutation(
        "group/full_buffer.py",
        "self._versions = tuple(version + 1 for version in self._versions)",
        "self._versions = tuple(version + 0 for version in self._versions)",
        "tests/parity/test_stages.py::test_what_autograd_saved_of_a_replica_is_not_read_after_a_write",
    ),
    Mutation(
        "group/source.py",
        "has[1] != values[1] or not (",
        "not (",
        "tests/group/test_replica.py::test_writes_between_micro_batches_are_seen",
    ),
    Mutation(
        "group/source.py",
        "not (self.accumulates or has[0] == values[0])",
        "has[0] != values[0]",
        "tests/group/test_replica.py::test_a_step_gathers_over_replicas_once_for_all_micro_batches",
    ),
    Mutation(
        "group/source.py",
        "        self._own.release()\n        self._own.start(values)",
        "        self._own.start(values)",
        "tests/group/test_replica.py::test_a_group_that_was_gathered_ahead_and_not_used_is_gathered_again",
    ),
    Mutation(
        "group/reduction.py",
        "part.locals(each, int(each.storage_offset()))",
        "part.locals(each)",
        "tests/parity/test_stages.py::test_micro_batches_of_parameters_of_two_dtypes",
    ),
    Mutation(
        "group/reduction.py",
        "(i, each.clone() if second.lends_memory else each)",
        "(i, each)",
        "tests/parity/test_stages.py::test_micro_batches",
    ),
    Mutation(
        "group/parameter.py",
        "return start + first, start + last",
        "return start + first, stop",
        "tests/parity/test_stages.py::test_every_rank_has_a_part_of_the_parameters_and_the_state",
    ),
    Mutation(
        "group/source.py",
        "self.views = shard_views(self._buffer.memory, group.sections",
        "self._views = shard_views(self._buffer.memory, group.sections",
        "tests/parity/test_stages.py::test_mixed_precision",
    ),
    Mutation(
        "group/strategy.py",
        "ZERO_1 = replace(SHARD_GRAD_OP, without_sync=Placement.REPLICATED)",
        "ZERO_1 = replace(SHARD_GRAD_OP, without_sync=Placement.SHARDED)",
        "tests/group/test_strategy.py::test_parameters_that_stay_whole_are_gathered_once_for_all_micro_batches",
    ),
    Mutation(
        "buffer/plan.py",
        "alike = others[count:]",
        "alike = others[count + 1 :]",
        "tests/buffer/test_plan.py::test_the_pieces_of_all_ranks_are_those_of_each_rank",
    ),
    Mutation(
        "buffer/plan.py",
        "return is_cut and math.prod(self.chunk_shape(0)) * self.shares[-1].ranks.stop == param.numel",
        "return is_cut",
        "tests/buffer/test_plan.py::test_parameters_whose_chunks_differ_are_not_whole",
    ),
    Mutation(
        "buffer/messages.py",
        "row += [(-1, start - end)] * (end < start) + [(at, numel)]",
        "row += [(at, numel)]",
        "tests/buffer/test_messages.py::test_one_operation_fills_messages_and_one_cuts_them",
    ),
    Mutation(
        "buffer/messages.py",
        "[begin - origin for begin in begins] == self._starts and len",
        "len",
        "tests/buffer/test_messages.py::test_shards_are_a_message_where_they_lie_as_in_one",
    ),
    # how gradients are taken and reduced
    Mutation(
        "group/module_parameters.py",
        "            self._train_leaves()\n        self._prepare_updates()",
        "            pass\n        self._prepare_updates()",
        "tests/parity/test_parameters.py::test_parameters",
    ),
    Mutation(
        "group/gradients.py",
        "if index in self._waiting:\n            self.copy_waiting()",
        "if False:\n            self.copy_waiting()",
        "tests/parity/test_composition.py::test_a_weight_in_several_checkpoints",
    ),
    Mutation(
        "group/gradients.py",
        "self._arrived.update(waiting)",
        "self._arrived |= set(list(waiting)[:1])",
        "tests/parity/test_accumulation.py::test_gradients_that_wait_for_one_another",
    ),
    Mutation(
        "group/gradients.py",
        "self._arrived.discard(index)",
        "self._arrived.clear()",
        "tests/wrapper/test_attacks.py::test_an_optimizer_clears_what_waits_of_its_own_parameters_only",
    ),
    Mutation(
        "group/gradients.py",
        "self._dtypes_of.refuse_unknown()",
        "pass",
        "tests/parity/test_gradient_dtypes.py::test_any_dtype_and_unused_parameters_exclude_each_other",
    ),
    Mutation(
        "group/gradients.py",
        "wanted = frozenset(arrived.union(self._partial))",
        "wanted = frozenset(arrived)",
        "tests/parity/test_accumulation.py::test_hybrid_accumulated_where_the_last_micro_batch_leaves_a_block_out",
    ),
    Mutation(
        "group/gradients.py",
        "buffer.views.zero(index)",
        "pass",
        "tests/parity/test_accumulation.py::test_hybrid_accumulated_where_the_last_micro_batch_leaves_a_block_out",
    ),
    Mutation(
        "group/gradients.py",
        "gap.zero_()",
        "pass",
        "tests/parity/test_wrapper_flat.py::test_the_padding_of_a_gradient_is_zero",
    ),
    Mutation(
        "group/gradients.py",
        "self._partial.clear()",
        "pass",
        "tests/fully_shard/test_errors_in_step.py::test_a_reset_forgets_sums_over_some_of_the_ranks",
    ),
    Mutation(
        "group/gradient_buffer.py",
        "memory[end:].zero_()",
        "pass",
        "tests/parity/test_wrapper_flat.py::test_the_padding_of_a_gradient_is_zero",
    ),
    Mutation(
        "group/reduction.py",
        "self._pending if isinstance(self._pending, StillRead) else None",
        "None",
        "tests/fully_shard/test_shared_memory.py::test_gradients_stay_until_a_slow_rank_has_read_them",
    ),
    Mutation(
        "group/reduction.py",
        "local.add_(partial_sums.pop(index))",
        "partial_sums.pop(index)",
        "tests/parity/test_accumulation.py::test_hybrid_micro_batches",
    ),
    Mutation(
        "group/reduction.py",
        "HoldingMark(mark, zero_copy, buffer.slot.give_back)",
        "HoldingMark(mark, (), buffer.slot.give_back)",
        "tests/simulated/test_training.py::test_every_way_to_train",
    ),
    # when each group is gathered and reduced
    Mutation(
        "schedule/schedule.py",
        "group.notice_changes()\n",
        "pass\n",
        "tests/fully_shard/test_decisions.py::test_load_state_dict_by_assignment",
    ),
    Mutation(
        "schedule/schedule.py",
        "step.forwards += 1",
        "pass",
        "tests/parity/test_read_by_others.py::test_parameters_that_every_rank_has_may_be_read_by_any_module",
    ),
    Mutation(
        "schedule/schedule.py",
        "if group.full.state is State.GATHERING:  #",
        "if False:  #",
        "tests/fully_shard/test_decisions.py::test_what_was_gathered_ahead_and_not_used_is_gathered_again",
    ),
    Mutation(
        "schedule/schedule.py",
        'self.passes.end(f"the end of a {kind}")',
        "pass",
        "tests/fully_shard/test_shared_memory.py::test_after_a_backward_autograd_reads_nothing_that_ranks_share",
    ),
    Mutation(
        "schedule/schedule.py",
        "self.comm.reductions.wait_for_oldest()",
        "pass",
        "tests/parity/test_sharding.py::test_mlp_of_odd_sizes",
    ),
    Mutation(
        "schedule/unit.py",
        "forward.is_opaque |= differentiates and not found",
        "pass",
        "tests/parity/test_stale_reads.py::test_blocks_hand_on_what_no_hook_can_replace",
    ),
    Mutation(
        "schedule/unit.py",
        "base.register_hook(mark)",
        "pass",
        "tests/schedule/test_unit.py::test_an_operation_in_place_on_an_output_that_is_a_view",
    ),
    Mutation(
        "schedule/unit.py",
        "        if gathered & {",
        "        if False and gathered & {",
        "tests/fully_shard/test_decisions.py::test_a_forward_may_return_its_own_weight",
    ),
    Mutation(
        "schedule/unit.py",
        "is not IDLE]:\n                group.reshard_after_backward()",
        "is not IDLE] or True:\n                group.reshard_after_backward()",
        "tests/parity/test_parameters.py::test_parameters",
    ),
    Mutation(
        "schedule/order.py",
        "islice(reversed(self.finished), at, None)",
        "islice(self.finished, at, None)",
        "tests/schedule/test_schedule.py::test_backward_gathers_one_group_ahead",
    ),
    Mutation(
        "schedule/step_log.py",
        "said = self.steps, len(self.kind), hash(",
        "said = 0, len(self.kind), hash(",
        "tests/schedule/test_step_log.py::test_a_micro_batch_left_out_is_found",
    ),
    Mutation(
        "schedule/schedule.py",
        "self._backward_began, self._last_forward = True, None",
        "self._backward_began = True",
        "tests/parity/test_finalization.py::test_between_a_forward_and_its_backward_it_is_refused",
    ),
    # the order of what a device with streams does
    Mutation(
        "device.py",
        "            self._stream.wait_stream(current_stream(self._device))\n",
        "            pass\n",
        "tests/simulated/test_training.py::test_every_way_to_train",
    ),
    Mutation(
        "device.py",
        "                for mark in after or ():\n                    mark.wait()\n",
        "                pass\n",
        "tests/simulated/test_training.py::test_every_way_to_train",
    ),
    Mutation(
        "device.py",
        "            stream.wait_event(self.event)\n",
        "            pass\n",
        "tests/simulated/test_training.py::test_every_way_to_train",
    ),
    Mutation(
        "device.py",
        "    return EventMark(stream.record_event(), device, {stream.stream_id})\n",
        "    return PASSED\n",
        "tests/simulated/test_training.py::test_every_way_to_train",
    ),
    Mutation(
        "buffer/slots.py",
        "released = PASSED if self.pool.is_host else mark_released(self.pool.device)",
        "released = PASSED",
        "tests/simulated/test_training.py::test_every_way_to_train",
    ),
    Mutation(
        "buffer/slots.py",
        "made.released = mark_now(self.device)",
        "made.released = PASSED",
        "tests/simulated/test_training.py::test_every_way_to_train",
    ),
    Mutation(
        "buffer/slots.py",
        "kind = device, current_stream(device).stream_id, kind",
        "kind = device, kind",
        "tests/simulated/test_training.py::test_every_way_to_train",
    ),
    Mutation(
        "group/gradient_buffer.py",
        "in_use else self.most - 1, self.most)",
        "in_use else self.most - 1, self.most - 1)",
        "tests/simulated/test_overlap.py::test_the_all_reduces_of_so_many_reductions_may_run",
    ),
    Mutation(
        "group/reduction.py",
        "if slot.pool.is_host:",
        "if True:",
        "tests/simulated/test_overlap.py::test_a_reduction_is_waited_for_when_the_next_buffer_is_written",
    ),
    Mutation(
        "group/gradient_buffer.py",
        "            ready.wait()",
        "            pass",
        "tests/parity/test_accumulation.py::test_micro_batches",
    ),
    Mutation(
        "device.py",
        "    stream.wait_stream(current_stream(device))\n    with",
        "    with",
        "tests/simulated/test_training.py::test_every_way_to_train",
    ),
    Mutation(
        "device.py",
        "    current_stream(device).wait_stream(stream)\n",
        "",
        "tests/simulated/test_training.py::test_every_way_to_train",
    ),
    Mutation(
        "group/full_buffer.py",
        "(ready, source.filled, step.written)",
        "(source.filled, step.written)",
        "tests/simulated/test_training.py::test_every_way_to_train",
    ),
    Mutation(
        "group/full_buffer.py",
        "(ready, source.filled, step.written)",
        "(ready, source.filled)",
        "tests/simulated/test_training.py::test_every_way_to_train",
    ),
    Mutation(
        "group/full_buffer.py",
        "            self._complete()\n            if self.versions_set",
        "            if self.versions_set",
        "tests/simulated/test_training.py::test_every_way_to_train",
    ),
    Mutation(
        "group/full_buffer.py",
        "        super()._cancel()\n        self.source.release()",
        "        super()._cancel()",
        "tests/fully_shard/test_errors_in_communication.py::"
        "test_training_goes_on_after_an_error_at_any_point_of_communication",
    ),
    Mutation(
        "group/comm_context.py",
        "        while len(self._scatters) > keep:\n            self._scatters.popleft().wait()",
        "        while len(self._scatters) > keep:\n            self._scatters.popleft()",
        "tests/simulated/test_training.py::test_every_way_to_train",
    ),
    Mutation(
        "group/comm_context.py",
        "            arrived.synchronize()\n            hand_over()",
        "            hand_over()",
        "tests/simulated/test_training.py::test_every_way_to_train",
    ),
    Mutation(
        "schedule/schedule.py",
        "            self.step.written = EventMark(event, self.device)",
        "            self.step.written = PASSED",
        "tests/simulated/test_training.py::test_every_way_to_train",
    ),
    Mutation(
        "schedule/schedule.py",
        "            self.step.written = mark_now(self.device)",
        "            pass",
        "tests/simulated/test_training.py::test_every_way_to_train",
    ),
    Mutation(
        "schedule/step_log.py",
        "            return self._event.query()",
        "            return True",
        "tests/simulated/test_training.py::test_every_way_to_train",
    ),
    Mutation(
        "group/extension.py",
        "                streams.keep(output)",
        "                pass",
        "tests/simulated/test_training.py::test_every_way_to_train",
    ),
    # what a graph captures
    Mutation(
        "group/comm_context.py",
        "            pool.forget_marks()",
        "            pass",
        "tests/simulated/test_graphs.py::test_a_step_does_the_same_in_every_capture_and_replayed_it_is_training",
    ),
    Mutation(
        "group/comm_context.py",
        "            self.reductions.forget_marks()\n",
        "            pass\n",
        "tests/simulated/test_graphs.py::test_a_capture_begins_while_reductions_are_under_way",
    ),
    Mutation(
        "group/comm_context.py",
        "        if not (before or self._was_captured):",
        "        if not self._was_captured:",
        "tests/simulated/test_graphs.py::test_a_step_does_the_same_in_every_capture_and_replayed_it_is_training",
    ),
    Mutation(
        "schedule/schedule.py",
        "            event = None",
        "            pass",
        "tests/simulated/test_graphs.py::test_a_step_does_the_same_in_every_capture_and_replayed_it_is_training",
    ),
    Mutation(
        "schedule/step_log.py",
        " and not is_capturing(self._device)]",
        "]",
        "tests/simulated/test_graphs.py::test_a_step_does_the_same_in_every_capture_and_replayed_it_is_training",
    ),
    Mutation(
        "schedule/step_log.py",
        "and not is_capturing(self._device) and",
        "and",
        "tests/simulated/test_graphs.py::test_a_step_does_the_same_in_every_capture_and_replayed_it_is_training",
    ),
    Mutation(
        "group/reduction.py",
        "self._reductions.add_sum(HoldingMark(mark, values, second.release))",
        "self._reductions.add_sum(mark)",
        "tests/simulated/test_training.py::test_every_way_to_train",
    ),
    Mutation(
        "module.py",
        "                group.step.written = mark_now(group.device)\n",
        "",
        "tests/simulated/test_training.py::test_every_way_to_train",
    ),
    # hosts with several ranks
    Mutation(
        "comm/hosts.py",
        '        transport.local_ranks.wait(slot.filled, use, "an all-gather", self.tag)\n',
        "",
        "tests/comm/test_hosts.py::test_a_gather_fills_the_slot_that_a_host_shares",
    ),
    Mutation(
        "comm/hosts.py",
        "for event in (number, transport.begin(_WAIT, self.tag, slot.inode)):",
        "for event in (number,):",
        "tests/comm/test_hosts.py::test_ranks_that_wait_for_different_groups_are_told",
    ),
    Mutation(
        "comm/hosts.py",
        "for piece in plan.pieces(owner, section) if not piece.is_kept]",
        "for piece in plan.pieces(owner, section)]",
        "tests/comm/test_hosts.py::test_hosts_train_as_one_rank_alone",
    ),
    Mutation(
        "comm/hosts.py",
        "return 2.0 ** math.ceil(math.log2(abs(divisor))) if torch.float16 in self.dtypes else 1.0",
        "return 1.0",
        "tests/parity/test_precision.py::test_large_gradients_in_fp16",
    ),
    Mutation(
        "buffer/host_slots.py",
        "            self._view.end_use()\n",
        "            pass\n",
        "tests/buffer/test_host_slots.py::test_what_one_rank_writes_for_all_the_others_read_and_what_it_writes_for_itself_nobody_does",
    ),
    # memory that the ranks of a host share
    Mutation(
        "comm/shm.py",
        "self.done.set(reading.number)\n            reading.exchange",
        "reading.exchange",
        "tests/comm/test_shm.py::test_a_slot_may_be_written_once_the_slowest_rank_has_read_it",
    ),
    Mutation(
        "comm/shm.py",
        "        self.done.set(self.ready.value)\n",
        "",
        "tests/comm/test_shm.py::test_ranks_that_reduce_different_groups_are_told_the_tags",
    ),
    Mutation(
        "comm/shm.py",
        "if dropped != self._purged[rank]:",
        "if False:",
        "tests/comm/test_shm.py::test_others_let_go_of_a_slot_at_their_next_reduction",
    ),
    Mutation(
        "comm/shm.py",
        "if (number, tag) != (reading.number, route.tag):",
        "if number != reading.number:",
        "tests/comm/test_shm.py::test_ranks_that_reduce_different_groups_are_told_the_tags",
    ),
    Mutation(
        "comm/shm.py",
        "if subject != route.subject:",
        "if False:",
        "tests/comm/test_shm.py::test_ranks_that_reduce_different_parameters_of_a_group_are_told",
    ),
    Mutation(
        "comm/shm.py",
        "self.ready.note(self.ready.noted(self.local_ranks.rank) + 1)",
        "pass",
        "tests/comm/test_shm.py::test_others_let_go_of_a_slot_at_their_next_reduction",
    ),
    Mutation(
        "comm/shm.py",
        "while self._files and self.done.reached(self._files[0][0]):",
        "while self._files:",
        "tests/comm/test_shm.py::test_a_slot_that_was_freed_is_still_found_by_a_slow_rank",
    ),
    Mutation(
        "comm/local_ranks.py",
        "or look is None or failed:",
        "or look is None:",
        "tests/comm/test_local_ranks.py::test_if_one_rank_cannot_nobody_shares",
    ),
    Mutation(
        "comm/local_ranks.py",
        "(said >> (said // 8 - number)) & 1 != kind",
        "said & 1 != kind",
        "tests/fully_shard/test_shared_memory_failures.py::test_a_reset_of_one_model_says_what_another_has_lost",
    ),
    Mutation(
        "comm/local_ranks.py",
        "self._counters.value // 4 * 4",
        "self._counters.value // 8 * 8",
        "tests/comm/test_local_ranks.py::test_a_gate_keeps_writers_and_readers_apart",
    ),
    Mutation(
        "comm/waits.py",
        "self.begin()",
        "pass",
        "tests/watch/test_start.py::test_the_watch_starts_with_the_first_wait_for_other_ranks",
    ),
    Mutation(
        "watch/watch.py",
        "if self._judged >= self._seen.since:",
        "if self._judged:",
        "tests/watch/test_watch.py::test_a_verdict_is_over_with_the_wait_that_it_was_about",
    ),
    Mutation(
        "watch/watch.py",
        "parting(self._mine, report, self._failed)",
        "parting(self._mine, report)",
        "tests/watch/test_watch.py::test_ranks_that_parted_are_told_once",
    ),
    Mutation(
        "watch/reports.py",
        "if report.host == self._mine.host:\n            return report.written",
        "if report.host:\n            return report.written",
        "tests/watch/test_reports.py::test_the_clocks_of_other_hosts_do_not_count",
    ),
    Mutation(
        "buffer/shared_memory.py",
        "or self._uses % _USES == 0)",
        ")",
        "tests/buffer/test_shared.py::test_a_write_outside_of_any_use_is_found_in_time",
    ),
    Mutation(
        "buffer/shared_memory.py",
        "self.pages.copy_own(other.pages)",
        "pass",
        "tests/comm/test_local_ranks.py::test_if_one_rank_cannot_nobody_shares",
    ),
    # parameters that are not sharded
    Mutation(
        "strangers.py",
        "if param.requires_grad and id(param) not in known and",
        "if param.requires_grad and",
        "tests/test_strangers.py::test_what_is_left_out_on_purpose_is_not_told",
    ),
    Mutation(
        "optim/steps.py",
        "strangers += [param] if param.requires_grad else []",
        "pass",
        "tests/test_strangers.py::test_a_forgotten_root_is_told_once_with_its_parameters_and_the_missing_call",
    ),
    Mutation(
        "group/param_group.py",
        "twin.name, twin._copy_tags = self.name, self._copy_tags",
        "twin.name = self.name",
        "tests/fully_shard/test_copies.py::test_copies_of_copies_have_tags_of_their_own",
    ),
    Mutation(
        "optim/steps.py",
        "    _found.clear()\n",
        "",
        "tests/optim/test_steps.py::test_a_model_that_is_sharded_after_a_step_is_found",
    ),
    Mutation(
        "optim/local_steps.py",
        "every * (k + 1) // fragments % every",
        "0",
        "tests/optim/test_local_steps.py::test_replicas_train_as_in_one_process",
    ),
    Mutation(
        "optim/local_steps.py",
        "fragment.differs = True",
        "pass",
        "tests/optim/test_local_steps.py::test_replicas_that_differ_are_not_saved",
    ),
    Mutation(
        "diverging.py",
        "        checks.append(refuse_uncounted)\n",
        "        pass\n",
        "tests/optim/test_local_steps.py::test_steps_that_nobody_counts_are_refused",
    ),
    Mutation(
        "optim/synchronization.py",
        "Reduction(self._process_group.size())",
        "Reduction()",
        "tests/optim/test_local_steps.py::test_replicas_train_as_in_one_process",
    ),
    Mutation(
        "optim/synchronization.py",
        "        self._mark.wait()\n",
        "",
        "tests/optim/test_local_steps.py::test_synchronizations_are_ordered_on_a_device",
    ),
    Mutation(
        "checkpoint/contents.py",
        "if replica else {}",
        "if False else {}",
        "tests/optim/test_local_steps.py::test_a_resumed_training_goes_on_as_an_uninterrupted_one",
    ),
    Mutation(
        "optim/grad_scaler.py",
        " if group not in apart",
        "",
        "tests/optim/test_local_steps.py::test_a_replica_skips_steps_for_itself",
    ),
    # messages between ranks
    Mutation(
        "comm/point_to_point.py",
        "all(full.dtype.itemsize >= 4 for full in fulls)",
        "True",
        "tests/comm/test_select.py::test_two_hosts_move_small_groups_by_collectives",
    ),
    Mutation(
        "comm/point_to_point.py",
        "foreach_copy(*planned.before)",
        "pass",
        "tests/comm/test_transport.py::test_every_rank_gathers_all_parameters",
    ),
    Mutation(
        "comm/point_to_point.py",
        "failure = error  #",
        "raise  #",
        "tests/comm/test_point_to_point.py::test_an_error_after_arrival_leaves_the_group_usable",
    ),
    Mutation(
        "comm/point_to_point.py",
        "self.lease.give_back()",
        "pass",
        "tests/comm/test_point_to_point.py::test_repeated_exchanges_take_no_new_memory",
    ),
    Mutation(
        "comm/point_to_point.py",
        "large = min(large, capacity, *(",
        "large = min(2 * capacity, 2 * capacity, *(",
        "tests/comm/test_transport.py::test_every_rank_gathers_all_parameters",
    ),
    Mutation(
        "comm/point_to_point.py",
        "2 * wait.tag + (not wait.gathers)",
        "2 * wait.tag",
        "tests/comm/test_point_to_point.py::test_a_gather_and_a_reduction_of_one_group_may_start_in_opposite_order",
    ),
    Mutation(
        "comm/point_to_point.py",
        "self.scratch + number % DEPTH * self._turn for",
        "self.scratch for",
        "tests/comm/test_transport.py::test_every_rank_gathers_all_parameters",
    ),
    Mutation(
        "comm/point_to_point.py",
        "rounds = self._bound.get(lease.index)",
        "rounds = next(iter(self._bound.values()), None)",
        "tests/comm/test_point_to_point.py::test_a_route_takes_whatever_staging_is_free",
    ),
    Mutation(
        "comm/point_to_point.py",
        "foreach_copy(*self._own)",
        "pass",
        "tests/comm/test_transport.py::test_every_rank_gathers_all_parameters",
    ),
    Mutation(
        "comm/point_to_point.py",
        "start += align(leaving.packed_bytes)",
        "start += 0",
        "tests/comm/test_transport.py::test_every_rank_gets_the_mean_of_what_it_owns",
    ),
    Mutation(
        "comm/point_to_point.py",
        "offset += (block.shard_start - piece.shard_start) * self.dtypes[piece.section].itemsize",
        "pass",
        "tests/comm/test_transport.py::test_every_rank_gets_the_mean_of_what_it_owns",
    ),
    Mutation(
        "comm/rounds.py",
        "if piece.is_kept and not with_kept:",
        "if piece.is_kept:",
        "tests/comm/test_rounds.py::test_every_element_travels_once",
    ),
    Mutation(
        "comm/rounds.py",
        "end = align(end + head.numel * itemsize)",
        "end += head.numel * itemsize",
        "tests/comm/test_rounds.py::test_no_round_needs_more_staging_than_there_is",
    ),
    # the wrapper
    Mutation(
        "wrapper/unit.py",
        "super().reset()\n        self.failed = False",
        "super().reset()",
        "tests/wrapper/test_unit.py::test_a_step_that_was_reset_after_an_error_is_not_reset_again",
    ),
    Mutation(
        "wrapper/unit.py",
        "module._buffers[name] = buffer.to(dtype)",
        "pass",
        "tests/parity/test_wrapper_precision.py::test_dtypes_of_buffers",
    ),
    Mutation(
        "wrapper/unit.py",
        "group.options.mp_policy = self.mp_policy",
        "pass",
        "tests/parity/test_wrapper_precision.py::test_full_precision_in_evaluation",
    ),
    Mutation(
        "wrapper/state_dict.py",
        "setattr(each, name, old)",
        "setattr(each, name, True)",
        "tests/parity/test_wrapper_gradients.py::test_a_hook_of_ones_own",
    ),
    Mutation(
        "wrapper/fsdp.py",
        "whole = [param for param in self.parameters() if param not in sharded]",
        "whole: list[nn.Parameter] = []",
        "tests/parity/test_wrapper_gradients.py::test_clipped_gradients_with_parameters_that_are_ignored",
    ),
    Mutation(
        "wrapper/initialise.py",
        "for group in groups:",
        "for group in groups[:1]:",
        "tests/wrapper/test_initialise.py::test_values_reach_every_node",
    ),
    Mutation(
        "wrapper/state_dict.py",
        "device, copy=True, memory_format",
        "device, memory_format",
        "tests/wrapper/test_state_dict.py::test_values_are_those_of_the_plain_module",
    ),
    Mutation(
        "wrapper/optim_state.py",
        "wholes[index].to(dtypes[index])",
        "wholes[index]",
        "tests/wrapper/test_optim_state_odd.py::test_dtypes_that_differ_within_a_unit",
    ),
    Mutation(
        "group/step.py",
        "self.optimizer_steps = max(self.optimizer_steps, count)",
        "self.optimizer_steps += 1",
        "tests/optim/test_steps.py::test_ranks_may_have_different_numbers_of_optimizers",
    ),
    Mutation(
        "schedule/schedule.py",
        "                group.leave_unsharded(was_evaluated=True)",
        "                pass",
        "tests/fully_shard/test_between_passes.py::test_what_is_done_after_an_evaluation_lasts",
    ),
    Mutation(
        "group/module_parameters.py",
        "            chunk.copy_(part)\n",
        "",
        "tests/fully_shard/test_between_passes.py::test_what_is_done_to_whole_parameters_lasts",
    ),
    Mutation(
        "schedule/unit.py",
        "            self._replaced.restore(module)",
        "            pass",
        "tests/fully_shard/test_arguments.py::test_the_callers_containers_are_as_they_were",
    ),
    Mutation(
        "group/full_buffer.py",
        "if private.version_of(leaf) != before}",
        "if private.version_of(leaf) == before}",
        "tests/fully_shard/test_arguments.py::test_a_write_to_a_parameter_that_was_kept_is_refused_by_name",
    ),
    Mutation(
        "assignments.py",
        "set_local(tensor, local_of(data).detach().clone(), spec_of(data))",
        "set_local(tensor, local_of(data).detach(), spec_of(data))",
        "tests/test_assignments.py::test_two_models_exchange_the_data_of_their_parameters",
    ),
    Mutation(
        "waiting_grad.py",
        " and not (shown.was_written and shown.numel()):\n        param.grad = None",
        " and not (shown.was_written and shown.numel()):\n        pass",
        "tests/wrapper/test_attacks.py::test_a_gradient_that_waited_comes_home_in_its_own_dtype",
    ),
    Mutation(
        "waiting_grad.py",
        " and shown.is_blank and not (shown.was_written and shown.numel()):",
        " and shown.is_blank:",
        "tests/parity/test_wrapper_gradients.py::test_what_a_user_writes_while_a_gradient_waits_is_added_to",
    ),
    Mutation(
        "waiting_grad.py",
        '(now is shown and getattr(shown, "was_cleared", False))',
        "bool((now == 0).all())",
        "tests/test_waiting_grad.py::test_a_gradient_that_was_replaced_is_added_to",
    ),
    Mutation(
        "wrapper/flat.py",
        "return grad if grad is None or self.flat_module is None else self.part_in(grad)",
        "return grad",
        "tests/parity/test_wrapper_full_params.py::test_full_gradients_of_flat_parameters",
    ),
    Mutation(
        "wrapper/flat.py",
        "replaced |= not same_memory(shown, shard)",
        "pass",
        "tests/wrapper/test_composition.py::test_another_dtype",
    ),
    # checkpoints
    Mutation(
        "checkpoint/local.py",
        "        force_names(self.path.parent)\n",
        "        pass\n",
        "tests/checkpoint/test_forced.py::test_a_checkpoint_is_forced_to_the_disk_before_it_is_visible_and_its_name_after",
    ),
    Mutation(
        "checkpoint/local.py",
        "        force_names(self.path)\n",
        "        pass\n",
        "tests/checkpoint/test_forced.py::test_a_checkpoint_is_forced_to_the_disk_before_it_is_visible_and_its_name_after",
    ),
    Mutation(
        "checkpoint/blocks.py",
        "force(self._file)",
        "pass",
        "tests/checkpoint/test_forced.py::test_a_checkpoint_is_forced_to_the_disk_before_it_is_visible_and_its_name_after",
    ),
    Mutation(
        "checkpoint/convert.py",
        "    force_names(folder)\n",
        "    pass\n",
        "tests/checkpoint/test_forced.py::test_exported_files_are_forced_to_the_disk_before_they_have_their_names",
    ),
    Mutation(
        "checkpoint/replicas.py",
        "(number + len(in_order) // 2)",
        "(number + 1)",
        "tests/checkpoint/test_replica_choice.py::test_of_many_hosts_each_sends_its_files_half_of_them_away",
    ),
    Mutation(
        "checkpoint/fetch.py",
        "number[0] <= _number(part)[0]:",
        "number[0] < _number(held)[0]:",
        "tests/checkpoint/test_replica_choice.py::test_a_replica_is_stale_once_its_own_step_is_on_the_disk",
    ),
    Mutation(
        "checkpoint/load.py",
        "found[0].step >= step",
        "found[0].step > step",
        "tests/checkpoint/test_replica_choice.py::test_of_equal_steps_what_was_saved_last_is_loaded",
    ),
    Mutation(
        "checkpoint/convert.py",
        " and entry.dtype.itemsize > 1",
        "",
        "tests/checkpoint/test_convert.py::test_an_export_casts_no_values_of_8_bits_and_no_integers",
    ),
    Mutation(
        "checkpoint/preemption.py",
        "self._timer.cancel()",
        "pass",
        "tests/checkpoint/test_preemption.py::test_a_process_that_saved_in_time_is_not_ended_later",
    ),
    # reports
    Mutation(
        "report/profile.py",
        "mine.shifted(offset)",
        "mine.shifted(-offset)",
        "tests/report/test_clocks.py::test_times_of_another_host_are_those_of_the_first",
    ),
    Mutation(
        "report/chrome_trace.py",
        '"ts": when / 1e3',
        '"ts": when / 1e6',
        "tests/report/test_chrome_trace.py::test_memory_stands_where_the_spans_stand_that_began_with_it",
    ),
    Mutation(
        "report/estimate.py",
        '(1 + (during == "backward" and param.is_trainable))',
        '(1 + (during == "backward"))',
        "tests/report/test_estimate.py::test_a_frozen_weight_costs_no_gradient_of_its_own",
    ),
    Mutation(
        "report/environment.py",
        "threads <= cores, text",
        "threads < cores, text",
        "tests/report/test_environment.py::test_ranks_may_have_as_many_threads_as_there_are_cores",
    ),
    # ragged layouts, and optimizers on them
    Mutation(
        "ragged.py",
        "for spec in row if spec.ndim}) <= 1 for",
        "for spec in row if spec.ndim}) == 1 for",
        "tests/test_ragged.py::test_norms_and_clipping_are_those_of_the_whole",
    ),
    Mutation(
        "ragged.py",
        "counts = [max(1, each.shape[0] // size)",
        "counts = [-(-each.shape[0] // size)",
        "tests/optim/test_blocks.py::test_quantized_state_is_that_of_the_whole",
    ),
    Mutation(
        "optim/local_step.py",
        "return value.redistribute(placements=spec.placements)",
        "return value",
        "tests/optim/test_blocks.py::test_state_of_a_model_with_other_cuts_is_cut_again",
    ),
    Mutation(
        "optim/steps.py",
        " and not only_makes_state(optimizer, kwargs)",
        "",
        "tests/optim/test_steps.py::test_a_step_that_only_makes_state_to_save_is_not_counted",
    ),
    # what stands beside the engine
    Mutation(
        "optim/clip.py",
        "p, torch.promote_types(dtype, torch.float32))",
        "p, dtype)",
        "tests/optim/test_clip.py::test_gradients_of_fp16_are_scaled_by_a_norm_that_fp16_cannot_hold",
    ),
    Mutation(
        "compat/patch.py",
        "handler.addFilter(lambda _: not logging.getLogger().handlers)",
        "pass",
        "tests/compat/test_patch.py::test_a_program_runs_unchanged_and_is_told_each_thing_once",
    ),
    # checkpoints in stores
    Mutation(
        "checkpoint/remote.py",
        "if is_cleaned:",
        "if False:",
        "tests/checkpoint/test_remote.py::test_a_save_whose_objects_another_job_has_removed_is_not_published",
    ),
    Mutation(
        "checkpoint/remote.py",
        "if not self._store.create(name, data):",
        "if self._store.put(name, data):",
        "tests/checkpoint/test_remote.py::test_a_save_that_sleeps_past_its_lease_leaves_that_of_another_alone",
    ),
    Mutation(
        "checkpoint/remote.py",
        "if name.startswith(_READING))",
        "if False)",
        "tests/checkpoint/test_beside_a_saver.py::test_what_is_read_is_removed_by_the_save_after",
    ),
    Mutation(
        "checkpoint/remote.py",
        "(*found, newest)",
        "found",
        "tests/checkpoint/test_remote.py::test_late_listings_do_not_hide_the_newest",
    ),
    Mutation(
        "checkpoint/store.py",
        "except (FileNotFoundError, FileExistsError, NotImplementedError):",
        "except Exception:",
        "tests/checkpoint/test_remote.py::test_requests_that_fail_are_repeated",
    ),
    # checkpoints beside another job
    Mutation(
        "checkpoint/local.py",
        "lock(file, shared=True)",
        "pass",
        "tests/checkpoint/test_beside_a_saver.py::test_what_is_read_is_removed_by_the_save_after",
    ),
    Mutation(
        "checkpoint/reader.py",
        "path := untried() or untried()",
        "path := untried() if not tried else None",
        "tests/checkpoint/test_beside_a_saver.py::test_a_listing_that_is_old_when_it_is_used_is_made_again",
    ),
    Mutation(
        "checkpoint/local.py",
        "max(made, default=-1) + 1",
        "0",
        "tests/checkpoint/test_beside_a_saver.py::test_of_one_step_the_save_that_was_made_last_is_kept",
    ),
    Mutation(
        "checkpoint/save.py",
        " and box.names[0] not in self.buffers",
        "",
        "tests/checkpoint/test_save.py::test_buffers_that_differ_between_ranks_are_those_of_one_rank",
    ),
)


def main() -> int:
    """Runs the mutations; returns how many were not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--file", default="", help="only those of files whose path begins so")
    parser.add_argument("--change", default="", help="only those whose text before has this in it")
    parser.add_argument("--all", action="store_true", help="with the long lane of the tests")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each")
    options = parser.parse_args()
    missed = 0
    for mutation in MUTATIONS:
        if mutation.file.startswith(options.file) and options.change in mutation.before:
            began = time.monotonic()
            found = find(mutation, _stages(mutation), options.timeout, ["--all"] if options.all else [])
            missed += not found
            what = f"{mutation.file}: {mutation.before.strip()!r} -> {mutation.after.strip()!r}"
            print(f"{time.monotonic() - began:5.0f} s  {what}\n         {found or 'NOT FOUND IN TIME'}", flush=True)
    print(f"{missed} were not found")
    return missed


def find(mutation: Mutation, stages: Iterable[list[str]], seconds: float, options: Sequence[str] = ()) -> str:
    """The test that finds a mutation, of stages that run one after the other; empty if none does in time."""
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "src")
        shutil.copytree(ROOT / "src", source)
        for name in ("docs", "examples"):  # for which a test looks beside the source
            Path(folder, name).symlink_to(ROOT / name)
        file = source / "fullshard" / mutation.file
        text = file.read_text()
        assert text.count(mutation.before) == 1, f"{mutation} stands {text.count(mutation.before)} times"
        file.write_text(text.replace(mutation.before, mutation.after))
        for tests in stages:
            code, said = _run([*tests, *options], source, end - time.monotonic())
            if code not in (0, 5):  # all passed, or there was none
                lines = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return lines[0].removeprefix("FAILED ") if lines else said[-200:]
    return ""


def nearest(file: str) -> list[str]:
    """The tests that stand nearest to a file, the most telling ones first: arguments of pytest."""
    mirror = Path("tests", file).parent / f"test_{Path(file).stem.strip('_')}.py"
    return [
        *([str(mirror)] if (ROOT / mirror).exists() else []),
        *next(tests for prefix, tests in NEAREST.items() if file.startswith(prefix)),
    ]


def _stages(mutation: Mutation) -> Iterator[list[str]]:
    """What to run, one after the other: arguments of pytest."""
    yield [mutation.test]
    near = nearest(mutation.file)
    yield near
    yield ["tests", *(f"--ignore={each}" for each in near)]


def _run(arguments: list[str], source: Path, seconds: float) -> tuple[int, str]:
    """Run tests on a source until one fails; what pytest returns and prints, 0 if it is not known in time."""
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{source}:{ROOT}", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that its ranks end with it
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (_MOST_MEMORY, _MOST_MEMORY)),
    ) as run:
        try:
            said, _ = run.communicate(timeout=max(seconds, 0))
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            return 0, ""
        return run.returncode, said


if __name__ == "__main__":
    sys.exit(main())
