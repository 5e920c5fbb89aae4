"""When ranks that share memory wait for each other: at the beginning and the end of what is outermost, and once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fullshard.group.step import Log, Step
from fullshard.schedule.passes import Passes
from fullshard.schedule.schedule import Schedule


class Barrier:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def enter(self, doing: str, kind: int, steps: int) -> None:
        self.calls.append(("enter", doing, kind, steps))

    def leave(self, doing: str) -> None:
        self.calls.append(("leave", doing))

    def give_up(self) -> None:
        self.calls.append(("give up",))


def group(
    transport: object, barrier: Barrier, unsharded: bool = False, mapped: bool = True, shares: bool = True
) -> Any:
    """A group whose ranks share memory, as far as passes use it."""
    reads = list[bool]()
    published = list[bool]()
    memory = SimpleNamespace(barrier=barrier)
    shared = SimpleNamespace(memory=memory, publish=lambda version, whatever: published.append(whatever))
    full = SimpleNamespace(
        state=SimpleNamespace(is_unsharded=unsharded), let_read=reads.append, reads=reads, count_writes=lambda: 0
    )
    shard = SimpleNamespace(shared=shared if shares else None, is_unmapped=not mapped, published=published)
    return SimpleNamespace(shard=shard, full=full, transport=transport)


def test_groups_of_the_same_ranks_wait_once_at_both_ends_of_a_pass() -> None:
    barrier, transport = Barrier(), object()
    groups = [group(transport, barrier) for _ in range(3)]
    tree: Any = SimpleNamespace(step=Step(), log=Log(), passes=Passes(), groups=groups)
    Schedule.begin_pass(tree, "forward")
    assert barrier.calls == [("enter", "the beginning of a forward", 0, 0)]
    assert [(each.shard.published, each.full.reads) for each in groups] == [([True], [True])] * 3
    Schedule.begin_pass(tree, "backward")  # inside of the forward: nothing was written since
    assert len(barrier.calls) == 1
    tree.passes.end("the end of a forward")
    assert barrier.calls[1:] == [("leave", "the end of a forward")]
    assert [each.full.reads for each in groups] == [[True, False]] * 3


def test_ranks_of_other_transports_have_barriers_of_their_own() -> None:
    barriers = [Barrier(), Barrier()]
    Passes().begin("backward", [group(object(), each) for each in barriers], steps=7)
    assert [each.calls for each in barriers] == [[("enter", "the beginning of a backward", 1, 7)]] * 2


def test_what_shares_no_memory_or_has_not_mapped_it_is_left_alone() -> None:
    barrier = Barrier()
    groups = [group(object(), barrier, shares=False), group(object(), barrier, mapped=False)]
    tree: Any = SimpleNamespace(step=Step(), log=Log(), passes=Passes(), groups=groups)
    Schedule.begin_pass(tree, "forward")
    assert (barrier.calls, [each.full.reads for each in groups]) == ([], [[], []])


def test_what_is_unsharded_already_is_neither_shown_nor_hidden() -> None:
    barrier, passes = Barrier(), Passes()
    one = group(object(), barrier, unsharded=True)
    passes.begin("forward", [one], steps=0)
    passes.end("the end")
    assert (one.full.reads, len(barrier.calls)) == ([], 2)


def test_a_pass_that_an_error_ends_waits_for_nobody() -> None:
    barrier, passes = Barrier(), Passes()
    one = group(object(), barrier)
    passes.begin("forward", [one], steps=0)
    passes.end()
    assert barrier.calls[1:] == [("give up",)]
    assert one.full.reads == [True, False]
