"""Routes with a wire (:mod:`fullshard.comm.encoded`) against whole tensors: as close as the encoding promises."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from benchmarks.launches import Counts, _Unordered

from fullshard.comm.collective import CollectiveTransport
from fullshard.comm.encoded import lay_out_message
from fullshard.comm.point_to_point import PointToPointTransport
from fullshard.comm.transport import Feedback, Reduction, Transfer, Transport, Wire
from fullshard.encodings import Encoding, encoding
from fullshard.wire_policy import EncodingName
from tests.comm.cases import (
    EMPTY,
    LARGE,
    ODD,
    ZERO_COPY,
    Case,
    LayoutName,
    Section,
    cut,
    fill_fulls,
    fill_shards,
    group,
    is_kept,
    transfers_of,
)
from tests.comm.test_transport import mixed
from tests.harness import World, ranks
from tests.harness.slow import slow, some
from tests.simulated import simulate

TRANSPORTS: dict[str, type[Transport]] = {"p2p": PointToPointTransport, "collective": CollectiveTransport}
each_transport = pytest.mark.parametrize("transport_name", TRANSPORTS)
each_layout = pytest.mark.parametrize("layout", ["even", "flat", "ragged"])
each_encoding = pytest.mark.parametrize("name", ["fp8", "int4", *slow("bf16", "int8")])
#: Kernels that write the messages of a gather and read them, and the same of a reduction, on any number of ranks, by
#: operations of torch. tests/test_fused.py counts those of Triton.
COUNTED = {"bf16": (10, 2, 9, 10), "fp8": (63, 18, 62, 25), "int8": (65, 18, 64, 25), "int4": (74, 22, 73, 29)}
#: The largest error of standard normal numbers, of which no block of these cases spans more than 11.
ERRORS = {"bf16": 6 / 2**8, "fp8": 6 / 2**4, "int8": 11 / 255 / 2 + 1e-5, "int4": 11 / 15 / 2 + 6 / 2**10}


def made(name: str, block: int = 128) -> Encoding:
    found = encoding(name, block)  # type: ignore[arg-type]
    assert found is not None
    return found


def wire(name: str, transfers: list[Transfer], min_numel: int = 0) -> Wire:
    """A wire with feedback that has lost nothing so far."""
    lost = [torch.zeros(each.full.numel(), dtype=torch.bfloat16) for each in transfers]
    return Wire(made(name), min_numel, Feedback(lost))


@ranks(2, 3)
@each_transport
@each_layout
@each_encoding
def test_all_ranks_gather_the_same_close_values(
    world: World, transport_name: str, layout: LayoutName, name: EncodingName
) -> None:
    case = Case(layout, mixed(LARGE, ZERO_COPY, ODD))
    transfers = transfers_of(case, world.size)
    fill_shards(case, transfers, world.rank)
    route = TRANSPORTS[transport_name]().gather_route(transfers, group(), 0, wire(name, transfers))
    for _ in range(2):  # in the memory of the first
        for transfer in transfers:
            transfer.full.fill_(math.nan)
        route.start().finish()
    everybody, own = case.values(0), case.values(world.rank)
    for section, (plan, full, _) in enumerate(transfers):
        for i, (param, offset) in enumerate(zip(plan.params, plan.full_offsets, strict=True)):
            expected = own[section][i] if is_kept(plan, param) else everybody[section][i]
            found = full[offset : offset + param.numel].view(param.shape)
            error = 0.0 if is_kept(plan, param) or full.dtype == torch.float64 else ERRORS[name] + 0.02
            assert not found.numel() or float((found - expected).abs().max()) <= error
        found = torch.cat(
            [
                full[offset:][: param.numel]
                for param, offset in zip(plan.params, plan.full_offsets, strict=True)
                if not is_kept(plan, param)
            ]
        )
        every = [torch.empty_like(found) for _ in range(world.size)]
        torch.distributed.all_gather(every, found)
        assert all(torch.equal(each, found) for each in every)


@ranks(2, 3)
@each_transport
@each_layout
@each_encoding
def test_owners_get_sums_that_are_close_and_what_is_lost_comes_next(
    world: World, transport_name: str, layout: LayoutName, name: EncodingName
) -> None:
    case = Case(layout, (Section(torch.float32, LARGE), Section(torch.float32, ZERO_COPY + ODD)))
    transfers = transfers_of(case, world.size)
    given = wire(name, transfers)
    route = TRANSPORTS[transport_name]().reduce_route(transfers, group(), 1, given)
    steps, found = 4, [torch.zeros_like(transfer.shard) for transfer in transfers]
    for step in range(steps):
        fill_fulls(case, transfers, world.rank)
        for transfer in transfers:
            transfer.shard.fill_(math.nan)
        route.start([transfer.shard for transfer in transfers], Reduction(world.size)).finish()
        for total, transfer in zip(found, transfers, strict=True):
            total += transfer.shard
        if step == 0:
            first = [total.clone() for total in found]
    for section, transfer in enumerate(transfers):
        terms = zip(*(case.values(rank)[section] for rank in range(world.size)), strict=True)
        means = [torch.stack([value.double() for value in values]).mean(0) for values in terms]
        for start, expected in cut(transfer.plan, means, world.rank):
            once = first[section][start : start + expected.numel()].double()
            total = found[section][start : start + expected.numel()].double()
            share = (world.size - 1) / world.size
            if expected.numel():
                assert float((once - expected).abs().max()) <= share * ERRORS[name] + 1e-5
                # Errors do not add up: the sum of all steps is as close as one.
                assert float((total - steps * expected).abs().max()) <= share * ERRORS[name] * 1.05 + 1e-4


@ranks(2)
@each_transport
def test_small_parameters_and_other_dtypes_travel_as_they_are(world: World, transport_name: str) -> None:
    case = Case("even", (Section(torch.float32, (*ODD, ((400, 100), 0))), Section(torch.float64, LARGE)))
    transfers = transfers_of(case, world.size)
    fill_shards(case, transfers, world.rank)
    given = wire("int4", transfers, min_numel=16384)
    TRANSPORTS[transport_name]().gather_route(transfers, group(), 0, given).start().finish()
    everybody, own = case.values(0), case.values(world.rank)
    for section, (plan, full, _) in enumerate(transfers):
        for i, (param, offset) in enumerate(zip(plan.params, plan.full_offsets, strict=True)):
            expected = own[section][i] if is_kept(plan, param) else everybody[section][i]
            is_exact = torch.equal(full[offset : offset + param.numel].view(param.shape), expected)
            assert is_exact == (param.shape != (400, 100))
    fill_fulls(case, transfers, world.rank)
    TRANSPORTS[transport_name]().reduce_route(transfers, group(), 1, given).start(
        [transfer.shard for transfer in transfers], Reduction(2)
    ).finish()
    for section, transfer in enumerate(transfers):
        means = [
            (a.double() + b.double()) / 2 for a, b in zip(case.values(0)[section], case.values(1)[section], strict=True)
        ]
        for (start, expected), param in zip(cut(transfer.plan, means, world.rank), transfer.plan.params, strict=True):
            found = transfer.shard[start : start + expected.numel()].double()
            is_exact = torch.allclose(found, expected, atol=1e-6)
            assert is_exact == (param.shape != (400, 100))


@ranks(2)
@each_transport
@each_encoding
def test_infinities_and_nan_arrive_and_are_not_kept(world: World, transport_name: str, name: EncodingName) -> None:
    case = Case("even", (Section(torch.float32, (((512, 64), 0),)),))
    transfers = transfers_of(case, 2)
    given = wire(name, transfers)
    route = TRANSPORTS[transport_name]().reduce_route(transfers, group(), 1, given)
    shards = [transfer.shard for transfer in transfers]
    fill_fulls(case, transfers, world.rank)
    clean = transfers[0].full.clone()
    odd = {5: math.inf, 300: -math.inf, 17_000: math.nan, 17_001: math.inf, 30_000: -math.inf}
    if world.rank == 1:
        for at, value in odd.items():
            transfers[0].full[at] = value
    route.start(shards, Reduction(2)).finish()
    chunk = 512 * 64 // 2
    for at, value in odd.items():
        if at // chunk == world.rank:
            found = float(shards[0][at % chunk])
            assert math.isnan(found) if math.isnan(value) else found == value
    mine = [at % chunk for at in odd if at // chunk == world.rank]
    assert int((~shards[0].isfinite()).sum()) == len(mine)
    transfers[0].full.copy_(clean)
    route.start(shards, Reduction(2)).finish()
    assert bool(shards[0].isfinite().all())
    assert given.feedback is not None
    assert all(bool(each.isfinite().all()) for each in given.feedback.lost)


@ranks(2)
@each_transport
def test_what_a_checkpoint_brought_is_added_once(world: World, transport_name: str) -> None:
    case = Case("even", (Section(torch.float32, (((512, 64), 0),)),))
    transfers = transfers_of(case, 2)
    given = wire("int8", transfers)
    assert given.feedback is not None
    chunk = 512 * 64 // 2
    given.feedback.lost[0][world.rank * chunk :][:chunk] = 2.0
    given.feedback.is_loaded = True
    route = TRANSPORTS[transport_name]().reduce_route(transfers, group(), 1, given)
    for expected in (2.0, 0.0):
        transfers[0].full.zero_()
        route.start([transfers[0].shard], Reduction(1)).finish()
        assert torch.equal(transfers[0].shard, torch.full((chunk,), expected))


@each_encoding
def test_a_letter_lists_every_piece_once(name: EncodingName) -> None:
    case = Case("even", (Section(torch.float32, (*LARGE, *ODD)), Section(torch.float64, ODD)))
    plans = tuple(transfer.plan for transfer in transfers_of(case, 3))
    for owner in range(3):
        message = lay_out_message(plans, (torch.float32, torch.float64), Wire(made(name), 100), owner, True)
        encoded = sum(piece.numel for chunk in message.chunks for piece, _ in chunk.pieces)
        exact = sum(piece.numel for piece, _ in message.exact)
        assert encoded + exact == sum(plan.owned_numel(owner) for plan in plans)
        assert all(piece.section == 0 and piece.part_of >= 100 for p in message.chunks for piece, _ in p.pieces[:1])
        assert [*(span[0] for span in message.parts), message.nbytes] == [0, *(span[1] for span in message.parts)]


@ranks(2)
@each_transport
def test_nothing_to_move_is_nothing_to_encode(world: World, transport_name: str) -> None:
    case = Case("even", (Section(torch.float32, EMPTY),))
    transfers = transfers_of(case, 2)
    transport = TRANSPORTS[transport_name]()
    transport.gather_route(transfers, group(), 0, wire("int8", transfers)).start().finish()
    transport.reduce_route(transfers, group(), 1, wire("int8", transfers)).start([transfers[0].shard]).finish()


@ranks(2)
@each_transport
@pytest.mark.parametrize(("name", "most"), [("bf16", 0.502), ("fp8", 0.26), ("int8", 0.267), ("int4", 0.134)])
def test_a_route_knows_what_it_sends(world: World, transport_name: str, name: EncodingName, most: float) -> None:
    case = Case("even", (Section(torch.float32, (((1024, 1024), 0), ((1024,), 0))),))
    transfers = transfers_of(case, 2)
    transport = TRANSPORTS[transport_name]()
    for route in (
        transport.gather_route(transfers, group(), 0, wire(name, transfers, 16384)),
        transport.reduce_route(transfers, group(), 1, wire(name, transfers, 16384)),
    ):
        assert route.sent <= most * 2 * 1024 * 1024 + 4096


@ranks(2)
@each_transport
def test_a_route_keeps_nothing_that_a_start_brings(world: World, transport_name: str) -> None:
    case = Case("even", (Section(torch.float32, (((512, 64), 0),)),))
    transfers = transfers_of(case, 2)
    fill_fulls(case, transfers, world.rank)
    shard = torch.empty_like(transfers[0].shard)
    gone = weakref.ref(shard.untyped_storage())
    given = [transfers[0]._replace(shard=shard)]
    route = TRANSPORTS[transport_name]().reduce_route(given, group(), 1, wire("int8", transfers))
    route.start([shard], Reduction(2)).finish()
    del given, shard
    gc.collect()
    assert gone() is None
    route.start([transfers[0].shard], Reduction(2)).finish()


def launches_of_messages(world: World, name: str, count: int, counts: type[Counts] = Counts) -> list[float]:
    """Kernels that write the messages of a gather and read them, and the same of a reduction, on a simulated device."""
    shapes = (((320, 77), 0),) * count + (((9,), 0),) * count
    case = Case("even", (Section(torch.float32, shapes),))
    found = list[float]()
    with simulate(_Unordered()):
        transfers = transfers_of(case, world.size)
        fill_shards(case, transfers, world.rank)
        given = wire(name, transfers, 100)
        routes = [CollectiveTransport().gather_route(transfers, group(), 0, given)]
        routes.append(CollectiveTransport().reduce_route(transfers, group(), 1, given))
        for brought in ([], [transfer.shard for transfer in transfers]):
            for _ in range(2):  # what is made once
                with counts() as writing:
                    pending = routes[len(brought)].start(brought)
                with counts() as reading:
                    pending.finish()
            found += [writing.cost.launches, reading.cost.launches]
    return found


@ranks(2, 3)
@pytest.mark.parametrize("name", some(COUNTED, ["int4"]))
def test_a_device_encodes_and_decodes_all_letters_at_once(world: World, name: EncodingName) -> None:
    few, many = (launches_of_messages(world, name, count) for count in (2, 9))
    assert few == many, "with more parameters"
    assert few == list(COUNTED[name])
