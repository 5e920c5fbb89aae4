"""What the native collectives are given, for up to 1,024 ranks: few calls, few copies, and the user's own memory."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fullshard import torch_private
from fullshard.buffer.slots import SHARED
from fullshard.comm import collective
from fullshard.comm.backends import BACKENDS
from fullshard.comm.collective import CollectiveTransport, HookTransport
from fullshard.comm.transport import Reduction
from fullshard.comm.waits import WAITS, describe
from fullshard.device import Streams
from fullshard.policies import AllGather, ReduceScatter
from tests.comm.cases import (
    LARGE,
    ODD,
    ZERO_COPY,
    Case,
    LayoutName,
    Section,
    assert_gathered,
    assert_reduced,
    cut,
    fill_fulls,
    fill_shards,
    gather,
    reduce,
    transfers_of,
)
from tests.harness import World, fake_world, ranks

SIZES = [1, 2, 3, 5, 64, 1024]
CPU = torch.device("cpu")

each_size = pytest.mark.parametrize("size", SIZES)
each_layout = pytest.mark.parametrize("layout", ["even", "flat", "ragged"])


class OwnMemory:
    def __init__(self) -> None:
        self.allocated: list[torch.Tensor] = []

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.allocated.append(torch.empty([int(one) for one in size], dtype=dtype, device=device))
        return self.allocated[-1]

    def owns(self, tensor: torch.Tensor) -> bool:
        storages = [one.untyped_storage().data_ptr() for one in self.allocated]
        return tensor.untyped_storage().data_ptr() in storages


class SimulatedGather(OwnMemory, AllGather):
    """Delivers what all ranks of a case would send."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        assert async_op, "on the CPU a gather runs beside what follows"
        assert self.owns(output_tensor)
        assert self.owns(input_tensor)
        size = group.size()
        (transfer,) = transfers_of(self.case, size)
        messages = output_tensor.view(size, -1)
        assert input_tensor.data_ptr() == messages[group.rank()].data_ptr()
        for rank in range(size):
            fill_shards(self.case, [transfer], rank)
            messages[rank] = transfer.shard


class SimulatedReduction(OwnMemory, ReduceScatter):
    """Keeps what it was given, and returns this rank's part of it as if others had sent zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[torch.Tensor] = []
        self.ops: list[Any] = []

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert async_op, "on the CPU a reduction runs beside what follows"
        assert self.owns(output_tensor)
        assert self.owns(input_tensor)
        self.inputs.append(input_tensor)
        self.ops.append(op)
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])


@each_size
@each_layout
def test_the_messages_of_all_ranks_become_parameters(size: int, layout: LayoutName) -> None:
    case = Case(layout, (Section(torch.float32, ODD),))
    rank = size // 2
    with fake_world(size, rank):
        transfers = transfers_of(case, size)
        fill_shards(case, transfers, rank)
        gather(CollectiveTransport(all_gather=SimulatedGather(case)), transfers, dist.group.WORLD, 0).finish()
    assert_gathered(case, transfers, rank)


@each_size
@each_layout
def test_gradients_become_the_messages_for_all_ranks(size: int, layout: LayoutName) -> None:
    case = Case(layout, (Section(torch.float32, ODD),))
    rank = size // 2
    comm = SimulatedReduction()
    with fake_world(size, rank):
        (transfer,) = transfers_of(case, size)
        fill_fulls(case, [transfer], rank)
        reduce(CollectiveTransport(reduce_scatter=comm), [transfer], dist.group.WORLD, 1, Reduction(4.0)).finish()
    (sent,) = comm.inputs
    assert comm.ops == [dist.ReduceOp.SUM]
    (values,) = case.values(rank)
    for other in range(size):
        for start, expected in cut(transfer.plan, values, other):
            assert torch.equal(sent.view(size, -1)[other][start : start + expected.numel()], expected)
    for start, expected in cut(transfer.plan, values, rank):
        assert torch.equal(transfer.shard[start : start + expected.numel()], expected / 4)


@each_size
@each_layout
def test_the_backends_collectives_take_any_number_of_ranks(size: int, layout: LayoutName) -> None:
    case = Case(layout, (Section(torch.float32, ODD), Section(torch.bfloat16, ODD)))
    transport = CollectiveTransport()
    with fake_world(size), warnings.catch_warnings():
        warnings.simplefilter("error")
        transfers = transfers_of(case, size)
        before = [transfer.full.clone() for transfer in transfers]
        for _ in range(2):
            gather(transport, transfers, dist.group.WORLD, 0).finish()
            reduce(transport, transfers, dist.group.WORLD, 1, Reduction(size)).finish()
    assert all(transfer.full.shape == old.shape for transfer, old in zip(transfers, before, strict=True))


class Recorder:
    """Stands in for functions of the collective transport, and counts what they are given."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.copies = 0
        copy = collective.foreach_copy

        def record(output: torch.Tensor, source: torch.Tensor) -> None:
            self.calls.append((output, source))

        def count(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
            self.copies += len(targets)
            copy(targets, sources)

        patch.setattr(collective, "all_gather_over", lambda *_: (record, record))
        patch.setattr(collective, "reduce_scatter_over", lambda *_: (record, record))
        patch.setattr(collective, "foreach_copy", count)


@pytest.mark.parametrize("layout", ["even", "flat"])
def test_one_collective_serves_all_sections_of_a_gather(layout: LayoutName, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    case = Case(layout, (Section(torch.float32, ODD), Section(torch.bfloat16, ODD), Section(torch.float64, LARGE)))
    with fake_world(4):
        gather(CollectiveTransport(), transfers_of(case, 4), dist.group.WORLD, 0).finish()
    assert len(recorder.calls) == 1


@pytest.mark.parametrize("layout", ["even", "flat"])
def test_one_collective_serves_all_sections_of_a_dtype_in_a_reduction(
    layout: LayoutName, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch)
    case = Case(layout, (Section(torch.float32, ODD), Section(torch.bfloat16, ODD), Section(torch.float32, LARGE)))
    with fake_world(4):
        reduce(CollectiveTransport(), transfers_of(case, 4), dist.group.WORLD, 1, Reduction(4)).finish()
    assert [source.dtype for _, source in recorder.calls] == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    "case",
    [Case("flat", (Section(torch.float32, LARGE),)), Case("even", (Section(torch.float32, (((64, 16), 0),)),))],
    ids=["flat", "even"],
)
def test_a_section_that_is_the_shards_end_to_end_moves_without_a_copy(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch)
    SHARED.drop()
    with fake_world(4):
        (transfer,) = transfers_of(case, 4)
        gather(CollectiveTransport(), [transfer], dist.group.WORLD, 0).finish()
        reduce(CollectiveTransport(), [transfer], dist.group.WORLD, 1, Reduction(4)).finish()
    full, shard = transfer.full.data_ptr(), transfer.shard.data_ptr()
    assert [(output.data_ptr(), source.data_ptr()) for output, source in recorder.calls] == [
        (full, shard),
        (shard, full),
    ]
    assert recorder.copies == 0
    assert SHARED.nbytes_free == 0


@pytest.mark.parametrize("size", [2, 3, 64])
def test_zero_copy_parameters_move_where_they_lie(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside them one message has the rest. The copies are those of the rest alone."""
    recorder = Recorder(monkeypatch)
    rows = 64 * 3
    case = Case("even", (Section(torch.float32, (((7,), 0), ((rows, 32_768), 0), ((5, 3), 1), ((rows, 32_768), 0))),))
    with fake_world(size):
        (transfer,) = transfers_of(case, size)
        gather(CollectiveTransport(), [transfer], dist.group.WORLD, 0).finish()
        reduce(CollectiveTransport(), [transfer], dist.group.WORLD, 1, Reduction(size)).finish()
    plan, full, shard = transfer
    gathers, reductions = recorder.calls[:3], recorder.calls[3:]
    places = [(full[plan.full_offsets[i] :].data_ptr(), shard[plan.shard_offsets[i] :].data_ptr()) for i in (1, 3)]
    assert [(output.data_ptr(), source.data_ptr()) for output, source in gathers[1:]] == places
    assert [(source.data_ptr(), output.data_ptr()) for output, source in reductions[1:]] == places
    assert gathers[0][1].nbytes == reductions[0][0].nbytes == 4 * plan.packed.shard_numel < 200
    assert recorder.copies <= 2 * 2 * 2  # two pieces of each of two parameters, there and back


@ranks(2, 3)
def test_a_backend_may_take_all_tensors_in_one_call(world: World) -> None:
    case = Case("even", tuple(Section(dtype, ZERO_COPY) for dtype in (torch.float32, torch.float64)))
    with mock.patch.dict(BACKENDS, gloo=BACKENDS["gloo"]._replace(launches_together=True)):
        transfers = transfers_of(case, world.size)
        fill_shards(case, transfers, world.rank)
        gather(CollectiveTransport(), transfers, dist.group.WORLD, 0).finish()
        assert_gathered(case, transfers, world.rank)
        for shard_dtype in (None, torch.bfloat16):  # where they are added up, and on the way there
            transfers = transfers_of(case, world.size, shard_dtype)
            fill_fulls(case, transfers, world.rank)
            reduce(CollectiveTransport(), transfers, dist.group.WORLD, 1, Reduction(world.size)).finish()
            assert_reduced(case, transfers, world.rank, world.size)


def test_an_even_gather_sends_the_shards_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    case = Case("even", (Section(torch.bfloat16, ODD), Section(torch.float32, ODD)))
    with fake_world(4):
        transfers = transfers_of(case, 4)
        gather(CollectiveTransport(), transfers, dist.group.WORLD, 0).finish()
    ((_, source),) = recorder.calls
    assert source.data_ptr() == transfers[0].shard.data_ptr()


def test_the_number_of_copies_does_not_depend_on_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("even", (Section(torch.float32, (((2050, 2), 0), ((3, 2050), 1), ((4100,), 0))),))
    counts = []
    for size in (4, 1024):
        recorder = Recorder(monkeypatch)
        with fake_world(size):
            gather(CollectiveTransport(), transfers_of(case, size), dist.group.WORLD, 0).finish()
        counts.append(recorder.copies)
        monkeypatch.undo()
    assert counts[0] == counts[1] <= 6


def test_buffers_come_from_the_users_all_gather() -> None:
    comm = SimulatedGather(Case("even", ()))
    memory = CollectiveTransport(all_gather=comm).allocate(96, CPU)
    assert comm.owns(memory)
    assert (memory.dtype, memory.numel()) == (torch.uint8, 96)


@ranks(2)
def test_repeated_collectives_take_no_new_staging(world: World) -> None:
    transport = CollectiveTransport()
    case = Case("even", (Section(torch.float32, LARGE), Section(torch.bfloat16, ODD)))
    transfers = transfers_of(case, world.size)
    SHARED.drop()
    kept = []
    for _ in range(4):
        gather(transport, transfers, dist.group.WORLD, 0).finish()
        reduce(transport, transfers, dist.group.WORLD, 1, Reduction(2)).finish()
        kept.append(SHARED.nbytes_free)
    assert kept[0] > 0
    assert len(set(kept)) == 1


@ranks(2)
def test_a_reduction_by_a_hook_is_a_wait(world: World) -> None:
    seen = list[str]()

    def hook(full: torch.Tensor, reduced: torch.Tensor) -> None:
        assert WAITS.current is not None
        seen.append(describe(WAITS.current))
        dist.reduce_scatter_tensor(reduced, full)

    (transfer,) = transfers_of(Case("flat", (Section(torch.float32, ODD),)), world.size)
    transfer.full.fill_(1)
    reduce(HookTransport(hook), [transfer], dist.group.WORLD, 7, Reduction()).finish()
    assert seen == ["a reduction by a hook of the group with tag 7"]
    assert (transfer.shard == world.size).all()


def test_sums_with_ever_new_factors_keep_nothing_for_ever() -> None:
    """Divisors may change in every step, and on NCCL each makes an operation of its own."""
    with fake_world(2, 0):
        for _ in range(2):
            op = torch_private.premultiplied_sum(0.5)
            before = sys.getrefcount(op)
            torch_private.reduce_scatter_over(dist.group.WORLD, op, async_op=True)[0](torch.zeros(1), torch.zeros(2))
            assert sys.getrefcount(op) == before


def test_the_streams_of_communication_have_a_high_priority() -> None:
    """Else their copies queue behind the kernels of the computation, as they do not in torch's."""
    with mock.patch.object(torch, "Stream") as stream:
        Streams().make(CPU)
    assert stream.call_args.kwargs["priority"] < 0
