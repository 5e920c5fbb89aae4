"""All transports against whole tensors: what is gathered, what is reduced, for all layouts, dtypes and shapes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.buffer.messages import pieces_alone
from fullshard.comm.collective import CollectiveTransport
from fullshard.comm.hosts import shared_transport
from fullshard.comm.point_to_point import PointToPointTransport
from fullshard.comm.shm import ShmTransport
from fullshard.comm.transport import Reduction, Transfer, Transport, alias
from tests.comm.cases import (
    EMPTY,
    EQUAL,
    LARGE,
    ODD,
    SCALARS,
    TINY,
    WIDE,
    ZERO_COPY,
    Case,
    LayoutName,
    Section,
    Shapes,
    assert_gathered,
    assert_reduced,
    complete,
    cut,
    fill_fulls,
    fill_shards,
    gather,
    group,
    reduce,
    transfers_of,
)
from tests.harness import HOSTS, World, pretended_hosts, ranks
from tests.harness.slow import some

TRANSPORTS = {
    "p2p": PointToPointTransport,
    "p2p-large": lambda: PointToPointTransport(large=2**16),
    "p2p-rounds": lambda: PointToPointTransport(staging=1),
    "collective": CollectiveTransport,
}
SHAPES = {
    "odd": ODD,
    "equal": EQUAL,
    "large": LARGE,
    "empty": EMPTY,
    "tiny": TINY,
    "wide": WIDE,
    "scalars": SCALARS,
    "zero-copy": ZERO_COPY,
    "none": (),
}
#: Of one dtype each, and several at once.
SECTIONS = {name: (Section(torch.float32, shapes),) for name, shapes in SHAPES.items()}

each_transport = pytest.mark.parametrize("transport_name", TRANSPORTS)
#: Of tests of what no size and no number of rounds changes.
some_transports = pytest.mark.parametrize("transport_name", some([*TRANSPORTS, "shm"], ("p2p", "collective", "shm")))
#: The ranks of a host gather as messages what does not lie in memory that they share.
each_reducing_transport = pytest.mark.parametrize("transport_name", [*TRANSPORTS, "shm", "hosts"])
each_layout = pytest.mark.parametrize("layout", ["even", "flat", "ragged"])


def make(transport_name: str, process_group: dist.ProcessGroup | None = None) -> Transport:
    if transport_name in ("shm", "hosts"):
        with pretended_hosts(HOSTS if transport_name == "hosts" else ""):
            shared = shared_transport(process_group or group(), PointToPointTransport(), transport_name)
        assert isinstance(shared, ShmTransport), shared
        return shared
    return TRANSPORTS[transport_name]()


def mixed(*shapes: Shapes) -> tuple[Section, ...]:
    """Sections of several dtypes and item sizes, as many as there are shapes."""
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
    return tuple(Section(dtype, chosen) for dtype, chosen in zip(dtypes, shapes, strict=False))


SECTIONS["several dtypes"] = (*mixed(ODD, LARGE, TINY, ZERO_COPY), Section(torch.bfloat16, LARGE))


def check_gather(world: World, transport_name: str, case: Case, transfers: list[Transfer] | None = None) -> None:
    transfers = transfers_of(case, world.size) if transfers is None else transfers
    fill_shards(case, transfers, world.rank)
    gather(make(transport_name), transfers, group(), tag=0).finish()
    assert_gathered(case, transfers, world.rank)


def check_reduction(
    world: World,
    transport_name: str,
    case: Case,
    reduction: Reduction | None = None,
    shard_dtype: torch.dtype | None = None,
) -> None:
    transport, reduction = make(transport_name), reduction or Reduction(world.size)
    transfers = transfers_of(case, world.size, shard_dtype, transport=transport)
    fill_fulls(case, transfers, world.rank)
    complete(reduce(transport, transfers, group(), 1, reduction))
    is_low = any(section.dtype.itemsize < 4 for section in case.sections)
    assert all(transfer.shard.dtype == (shard_dtype or transfer.full.dtype) for transfer in transfers)
    exactly_added = transport_name not in ("collective", "hosts") or not is_low  # a host's sum is rounded
    assert_reduced(case, transfers, world.rank, reduction.divisor, exactly_added=exactly_added)


@ranks(1, 2, 3, 4)
@each_transport
@each_layout
@pytest.mark.parametrize("shapes", SECTIONS)
def test_every_rank_gathers_all_parameters(world: World, transport_name: str, layout: LayoutName, shapes: str) -> None:
    check_gather(world, transport_name, Case(layout, SECTIONS[shapes]))


@ranks(2)
@each_transport
def test_sections_may_lie_in_memory_of_their_own(world: World, transport_name: str) -> None:
    case = Case("even", mixed(ODD, TINY, LARGE))
    apart = [transfers_of(Case("even", (section,)), world.size)[0] for section in case.sections]
    check_gather(world, transport_name, case, apart)


@ranks(2)
@each_transport
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_a_gather_moves_any_dtype(world: World, transport_name: str, dtype: torch.dtype) -> None:
    case = Case("even", (Section(dtype, ODD),))
    transfers = transfers_of(Case("even", (Section(torch.float32, ODD),)), world.size)
    transfers = [
        type(t)(t.plan, torch.zeros(t.plan.full_numel, dtype=dtype), torch.zeros(t.plan.shard_numel, dtype=dtype))
        for t in transfers
    ]
    fill_shards(case, transfers, world.rank)
    gather(make(transport_name), transfers, group(), tag=0).finish()
    assert_gathered(case, [type(t)(t.plan, t.full.to(dtype), t.shard) for t in transfers], world.rank)


@ranks(1, 2, 3, 4)
@each_reducing_transport
@each_layout
@pytest.mark.parametrize("shapes", SECTIONS)
def test_every_rank_gets_the_mean_of_what_it_owns(
    world: World, transport_name: str, layout: LayoutName, shapes: str
) -> None:
    check_reduction(world, transport_name, Case(layout, SECTIONS[shapes]))


@ranks(2, 3)
@pytest.mark.parametrize("transport_name", some(TRANSPORTS, ("p2p", "collective")))
@pytest.mark.parametrize("layout", ["even", "ragged"])
@pytest.mark.parametrize("is_selected", [False, True])
def test_messages_and_zero_copy_gradients_are_reduced_as_they_are(
    world: World, transport_name: str, layout: LayoutName, is_selected: bool
) -> None:
    case = Case(layout, (Section(torch.float32, ZERO_COPY), Section(torch.bfloat16, ZERO_COPY + ODD)))
    transfers, zero_copy = [], list[Tensor]()
    for each, values in zip(transfers_of(case, world.size), case.values(world.rank), strict=True):
        plan, pitch = each.plan.messages, each.plan.packed.shard_numel
        messages = torch.full((plan.full_numel,), math.nan, dtype=each.full.dtype)
        for at, value in enumerate(values):
            if at not in plan.zero_copy:
                for piece in pieces_alone(plan, at, pitch):
                    target = messages[plan.shard_offsets[at] :]
                    piece.of_shard(target).copy_(piece.of_full(value.flatten()))
        chosen = range(1, len(values) - 1) if is_selected else range(len(values))
        plan = plan.select(chosen)
        zero_copy += [values[chosen[at]].flatten() for at in plan.zero_copy]
        transfers.append(Transfer(plan, messages, torch.full((plan.shard_numel,), math.nan, dtype=each.shard.dtype)))
    assert layout == "ragged" or len(zero_copy) > 2
    route = make(transport_name).reduce_route(transfers, group(), 1)
    for _ in range(2):
        given = [gradient.clone() for gradient in zero_copy]
        before = [transfer.full.clone() for transfer in transfers]
        route.start([transfer.shard for transfer in transfers], Reduction(world.size), *given).finish()
        gradients = [[each[1:-1] if is_selected else each for each in case.values(rank)] for rank in range(world.size)]
        for section, transfer in enumerate(transfers):
            terms = zip(*(values[section] for values in gradients), strict=True)
            means = [torch.stack([value.double() for value in values]).mean(0) for values in terms]
            for start, expected in cut(transfer.plan, means, world.rank):
                found = transfer.shard[start : start + expected.numel()].double()
                tolerance = world.size * torch.finfo(transfer.full.dtype).eps
                torch.testing.assert_close(found, expected, rtol=tolerance, atol=2 * tolerance)
        for transfer, values in zip(transfers, before, strict=True):
            transfer.full.copy_(values)  # a transport may overwrite them


@ranks(2, 3)
@some_transports
@pytest.mark.parametrize("shard_dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_the_result_is_cast_to_the_dtype_of_the_shard(
    world: World, transport_name: str, dtype: torch.dtype, shard_dtype: torch.dtype
) -> None:
    case = Case("even", (Section(dtype, ODD), Section(dtype, LARGE)))
    check_reduction(world, transport_name, case, shard_dtype=shard_dtype)


@ranks(2)
@some_transports
@each_layout
@pytest.mark.parametrize("reduction", [Reduction(), Reduction(7.0), Reduction(0.5), Reduction(2.0, sum_only=True)])
def test_the_sum_is_divided_by_any_divisor(
    world: World, transport_name: str, layout: LayoutName, reduction: Reduction
) -> None:
    case = Case(layout, (Section(torch.float32, ODD), Section(torch.float16, ODD)))
    check_reduction(world, transport_name, case, reduction)


@ranks(4)
@some_transports
@pytest.mark.parametrize("value", [30_000.0, 2 * 2.0**-24], ids=["overflow", "underflow"])
def test_the_mean_of_fp16_neither_overflows_nor_vanishes(world: World, transport_name: str, value: float) -> None:
    """The sum would overflow if it were divided last, the terms would vanish if they were divided first."""
    transport = make(transport_name)
    (transfer,) = transfers_of(Case("even", (Section(torch.float16, (((8, 4), 0),)),)), world.size, transport=transport)
    transfer.full.fill_(value)
    complete(reduce(transport, [transfer], group(), 1, Reduction(4.0)))
    assert torch.equal(transfer.shard[:8], torch.full((8,), value, dtype=torch.float16))


@ranks(4)
@some_transports
@each_layout
def test_ranks_of_a_subgroup_are_numbered_within_it(world: World, transport_name: str, layout: LayoutName) -> None:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    pair, rank = pairs[world.rank % 2], world.rank // 2
    transport = make(transport_name, pair)
    case = Case(layout, mixed(ODD, LARGE))
    transfers = transfers_of(case, 2, transport=transport)
    fill_shards(case, transfers, rank)
    gather(transport, transfers, pair, tag=0).finish()
    assert_gathered(case, transfers, rank)
    fill_fulls(case, transfers, rank)
    complete(reduce(transport, transfers, pair, 1, Reduction(2)))
    assert_reduced(case, transfers, rank, 2, exactly_added=transport_name != "collective")


@ranks(3)
@some_transports
def test_exchanges_that_overlap_do_not_mix(world: World, transport_name: str) -> None:
    transport = make(transport_name)
    cases = [Case("even", mixed(ODD, LARGE)), Case("flat", mixed(LARGE)), Case("even", mixed(TINY))]
    gathered = [transfers_of(case, world.size, transport=transport) for case in cases]
    reduced = [transfers_of(case, world.size, transport=transport) for case in cases]
    gathers = [transport.gather_route(each, group(), tag) for tag, each in enumerate(gathered)]
    reductions = [transport.reduce_route(each, group(), tag) for tag, each in enumerate(reduced)]
    for _ in range(3):
        pending = []
        for number, case in enumerate(cases):
            fill_shards(case, gathered[number], world.rank)
            fill_fulls(case, reduced[number], world.rank)
            shards = [transfer.shard for transfer in reduced[number]]
            pending.append(gathers[number].start())
            pending.append(reductions[number].start(shards, Reduction(world.size)))
        for one in pending:
            complete(one)
        for case, here, there in zip(cases, gathered, reduced, strict=True):
            assert_gathered(case, here, world.rank)
            assert_reduced(case, there, world.rank, world.size, exactly_added=transport_name != "collective")
            for transfer in (*here, *there):
                transfer.full.fill_(math.nan)


@ranks(2)
@some_transports
@each_layout
def test_shards_may_be_new_tensors_in_every_reduction(world: World, transport_name: str, layout: LayoutName) -> None:
    transport = make(transport_name)
    case = Case(layout, mixed(ODD, LARGE))
    first = transfers_of(case, world.size, transport=transport)
    route = transport.reduce_route(first, group(), 1)
    for _ in range(3):
        transfers = [type(t)(t.plan, t.full, torch.empty_like(t.shard)) for t in first]
        fill_fulls(case, transfers, world.rank)
        complete(route.start([transfer.shard for transfer in transfers], Reduction(world.size)))
        assert_reduced(case, transfers, world.rank, world.size, exactly_added=transport_name != "collective")


@ranks(1, 2, 3)
@each_reducing_transport
def test_a_selection_of_parameters_is_reduced(world: World, transport_name: str) -> None:
    """Those that have gradients in this step, at their usual place in the full buffer."""
    transport = make(transport_name)
    case = Case("even", (Section(torch.float32, ODD + LARGE),))
    (whole,) = transfers_of(case, world.size, transport=transport)
    gradients = [case.values(rank)[0] for rank in range(world.size)]
    for chosen in ([1, 3, 5, 11], [0], list(range(len(ODD + LARGE))), [10, 14, 15]):
        plan = whole.plan.select(chosen)
        transfer = type(whole)(plan, whole.full, torch.full((plan.shard_numel,), math.nan))
        fill_fulls(case, [whole], world.rank)
        complete(reduce(transport, [transfer], group(), 1, Reduction()))
        sums = [torch.stack([values[index] for values in gradients]).sum(0) for index in chosen]
        for start, expected in cut(plan, sums, world.rank):
            torch.testing.assert_close(transfer.shard[start : start + expected.numel()], expected)


@ranks(2)
@each_transport
def test_memory_may_change_under_the_same_tensors(world: World, transport_name: str) -> None:
    transport = make(transport_name)
    case = Case("even", mixed(ODD, LARGE))
    transfers = transfers_of(case, world.size)
    route = transport.gather_route(transfers, group(), tag=0)
    for _ in range(3):
        fill_shards(case, transfers, world.rank)
        route.start().finish()
        assert_gathered(case, transfers, world.rank)
        for transfer in transfers:
            storage = transfer.full.untyped_storage()
            nbytes = storage.nbytes()
            storage.resize_(0)
            storage.resize_(nbytes)


@ranks(2)
@each_transport
def test_autograd_does_not_see_a_gather(world: World, transport_name: str) -> None:
    case = Case("even", mixed(ODD))
    transfers = transfers_of(case, world.size)
    fill_shards(case, transfers, world.rank)
    versions = [(transfer.full._version, transfer.shard._version) for transfer in transfers]
    gather(make(transport_name), transfers, group(), tag=0).finish()
    assert [(transfer.full._version, transfer.shard._version) for transfer in transfers] == versions


@ranks(2)
@each_transport
@pytest.mark.parametrize("first", ["inference", "training"])
def test_inference_mode_may_come_and_go(world: World, transport_name: str, first: str) -> None:
    transport = make(transport_name)
    case = Case("even", mixed(ODD, LARGE))
    transfers = transfers_of(case, world.size)
    fill_shards(case, transfers, world.rank)
    with torch.inference_mode(first == "inference"):
        route = transport.gather_route(transfers, group(), tag=0)
    for number in range(3):
        with torch.inference_mode((first == "inference") == (number % 2 == 0)):
            route.start().finish()
        assert_gathered(case, transfers, world.rank)
        for transfer in transfers:
            transfer.full.fill_(math.nan)


@ranks(2)
@some_transports
def test_tensors_that_do_not_fit_their_plan_are_refused(world: World, transport_name: str) -> None:
    transport = make(transport_name)
    (transfer,) = transfers_of(Case("even", mixed(ODD)), world.size, transport=transport)
    (other,) = transfers_of(Case("even", mixed(ODD)), world.size + 1)
    kind = type(transfer)
    numel = transfer.plan.shard_numel
    with pytest.raises(ValueError, match=r"'p0' is for 3 ranks, but there are 2"):
        gather(transport, [other], group(), 0)
    with pytest.raises(ValueError, match=rf"shard of the group of parameter 'p0' must be .* {numel} elements"):
        gather(transport, [kind(transfer.plan, transfer.full, transfer.shard[1:])], group(), 0)
    wide = torch.empty(2 * transfer.plan.full_numel)[::2]
    with pytest.raises(ValueError, match=r"full buffer .* with strides \(2,\)"):
        reduce(transport, [kind(transfer.plan, wide, transfer.shard)], group(), 1, Reduction())
    with pytest.raises(ValueError, match=r"has the dtype torch.float32, but its shard torch.float64"):
        gather(transport, [kind(transfer.plan, transfer.full, transfer.shard.double())], group(), 0)
    with pytest.raises(ValueError, match="has the device cpu, but its shard meta"):
        reduce(transport, [kind(transfer.plan, transfer.full, transfer.shard.to("meta"))], group(), 1, Reduction())


@ranks(2)
@some_transports
def test_no_transfers_are_nothing_to_do(world: World, transport_name: str) -> None:
    transport = make(transport_name)
    gather(transport, [], group(), 0).finish()
    complete(reduce(transport, [], group(), 1, Reduction()))
    assert transport.allocate(48, torch.device("cpu")).numel() == 48


@ranks(2)
@each_reducing_transport
@each_layout
@pytest.mark.parametrize("shapes", SHAPES)
def test_a_rank_without_others_gathers_its_shard(
    world: World, transport_name: str, layout: LayoutName, shapes: str
) -> None:
    """As in a mesh that only replicates: the shard is the whole."""
    case = Case(layout, (Section(torch.float32, SHAPES[shapes]), Section(torch.float64, ODD)))
    transfers = transfers_of(case, 1)
    fill_shards(case, transfers, 0)
    route = make(transport_name).gather_route(transfers, None, tag=0)
    assert (route.staging, route.sent) == (0, 0)
    for _ in range(2):
        versions = [(transfer.full._version, transfer.shard._version) for transfer in transfers]
        route.start().finish()
        assert_gathered(case, transfers, 0)
        assert [(transfer.full._version, transfer.shard._version) for transfer in transfers] == versions
        for transfer in transfers:
            transfer.full.fill_(math.nan)


@ranks(1)
@each_transport
def test_a_rank_without_others_gathers_into_another_dtype_and_without_autograd(
    world: World, transport_name: str
) -> None:
    case = Case("even", mixed(ODD))
    (stored,) = transfers_of(case, 1)
    fill_shards(case, [stored], 0)
    shard = stored.shard.clone().requires_grad_()
    computed = type(stored)(stored.plan, torch.empty(stored.plan.full_numel, dtype=torch.bfloat16), shard)
    with torch.inference_mode():
        route = make(transport_name).gather_route([computed], None, tag=0)
    route.start().finish()
    assert not computed.full.requires_grad
    assert torch.equal(computed.full.nan_to_num(), stored.shard.bfloat16().nan_to_num())


@ranks(2)
@each_reducing_transport
@each_layout
@pytest.mark.parametrize("shapes", SHAPES)
def test_the_values_of_a_rank_without_others_are_the_sum(
    world: World, transport_name: str, layout: LayoutName, shapes: str
) -> None:
    case = Case(layout, (Section(torch.float32, SHAPES[shapes]), Section(torch.float64, ODD)))
    transfers = transfers_of(case, 1)
    route = make(transport_name).reduce_route(transfers, None, tag=0)
    assert (route.staging, route.sent) == (0, 0)
    for reduction in (Reduction(), Reduction(3.0), Reduction(2.0, sum_only=True)):
        fill_fulls(case, transfers, 0)
        given = [transfer.full.clone() for transfer in transfers]
        transfers = [type(each)(each.plan, each.full, torch.full_like(each.shard, math.nan)) for each in transfers]
        complete(route.start([transfer.shard for transfer in transfers], reduction))
        assert_reduced(case, transfers, 0, reduction.divisor)
        for transfer, before in zip(transfers, given, strict=True):
            assert torch.equal(transfer.full.nan_to_num(), before.nan_to_num())


@ranks(1)
@each_transport
def test_a_selection_of_the_parameters_of_one_rank_is_gathered_and_reduced(world: World, transport_name: str) -> None:
    transport, case = make(transport_name), Case("even", (Section(torch.float32, ODD + LARGE),))
    (whole,) = transfers_of(case, 1)
    fill_fulls(case, [whole], 0)
    plan = whole.plan.select([1, 3, 5, 11])
    reduced = type(whole)(plan, whole.full, torch.full((plan.shard_numel,), math.nan, dtype=torch.bfloat16))
    reduce(transport, [reduced], None, 0, Reduction(4.0)).finish()
    values = [case.values(0)[0][index] for index in (1, 3, 5, 11)]
    for start, expected in cut(plan, values, 0):
        assert torch.equal(reduced.shard[start : start + expected.numel()], (expected / 4).bfloat16())
    gathered = type(whole)(plan, torch.full_like(whole.full, math.nan), reduced.shard)
    gather(transport, [gathered], None).finish()
    for start, value in zip(plan.full_offsets, values, strict=True):
        assert torch.equal(gathered.full[start : start + value.numel()], (value.flatten() / 4).bfloat16().float())


@ranks(1)
def test_a_plan_for_several_ranks_is_refused_by_one_without_others(world: World) -> None:
    (transfer,) = transfers_of(Case("even", mixed(ODD)), 2)
    with pytest.raises(ValueError, match=r"'p0' is for 2 ranks, but there are 1: make a new plan"):
        gather(make("p2p"), [transfer], None)


def test_an_alias_follows_the_memory_and_counts_its_own_versions() -> None:
    tensor = torch.zeros(3)
    other = alias(tensor)
    other.fill_(5)
    assert tensor.tolist() == [5] * 3
    assert tensor._version == 0
    tensor.untyped_storage().resize_(0)
    assert other.untyped_storage().nbytes() == 0
