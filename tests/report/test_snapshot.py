"""What a model caches outside of its modules while it is explained is not there when it trains."""

from __future__ import annotations

import contextvars
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard.report import snapshot
from fullshard.report.explain import explain
from fullshard.torch_private import FakeTensor

TABLE: Tensor | None = None
TABLES: dict[str, Any] = {}
VARIABLE: contextvars.ContextVar[Tensor | None] = contextvars.ContextVar("VARIABLE", default=None)
LOCAL = threading.local()


def made() -> Tensor:
    return torch.ones(4)


@functools.lru_cache
def by_function(size: int) -> tuple[Tensor, dict[str, Tensor]]:
    return torch.ones(size), {"also": torch.ones(size)}


def by_global() -> Tensor:
    global TABLE
    TABLE = made() if TABLE is None else TABLE
    return TABLE


def by_default(kept: dict[str, Tensor] = {}) -> Tensor:  # noqa: B006
    return kept.setdefault("table", made())


def by_attribute() -> Tensor:
    by_attribute.table = getattr(by_attribute, "table", None) or [made()]  # type: ignore[attr-defined]
    return by_attribute.table[0]  # type: ignore[attr-defined,no-any-return]


def by_variable() -> Tensor:
    if (table := VARIABLE.get()) is None:
        VARIABLE.set(table := made())
    return table


def by_thread() -> Tensor:
    LOCAL.table = getattr(LOCAL, "table", None) or [made()]
    return LOCAL.table[0]  # type: ignore[no-any-return]


def _closure() -> Callable[[], Tensor]:
    table: Tensor | None = None

    def get() -> Tensor:
        nonlocal table
        table = made() if table is None else table
        return table

    return get


class Rotary:
    """A cache of a library, with a flag beside it."""

    shared: Tensor | None = None
    is_built = False

    def __init__(self) -> None:
        self.by_size: dict[int, SimpleNamespace] = {}
        self.recent: deque[Tensor] = deque()

    @functools.cache  # noqa: B019
    def by_method(self) -> Tensor:
        return made()

    def by_class(self) -> Tensor:
        if not Rotary.is_built:
            Rotary.shared, Rotary.is_built = made(), True
        assert Rotary.shared is not None
        return Rotary.shared

    def by_object(self) -> Tensor:
        return self.by_size.setdefault(4, SimpleNamespace(inside=[made()])).inside[0]  # type: ignore[no-any-return]

    def by_deque(self) -> Tensor:
        self.recent.append(made()) if not self.recent else None
        return self.recent[0]


class Slotted:
    __slots__ = ("table",)

    def get(self) -> Tensor:
        self.table = getattr(self, "table", None) or [made()]
        return self.table[0]  # type: ignore[has-type,no-any-return]


class Hidden(nn.Module):
    """A module that its parent does not know, with a buffer that forward sets, and a parameter that gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("table", None, persistent=False)

    def forward(self) -> Tensor:
        self.table = made() if self.table is None else self.table
        return self.table * self.weight


ROTARY = Rotary()
CACHES: dict[str, Callable[[], Tensor]] = {
    "function": lambda: by_function(4)[0] + by_function(4)[1]["also"],
    "method": ROTARY.by_method,
    "global": by_global,
    "dict of a module": lambda: TABLES.setdefault("table", (made(),))[0],
    "class attribute": ROTARY.by_class,
    "dict of an object": ROTARY.by_object,
    "deque": ROTARY.by_deque,
    "slots": Slotted().get,
    "closure": _closure(),
    "default argument": by_default,
    "attribute of a function": by_attribute,
    "context variable": by_variable,
    "thread": by_thread,
    "hidden module": Hidden(),
}


class Model(nn.Module):
    def __init__(self, *cached: Callable[[], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.cached = cached  # not submodules

    def forward(self, x: Tensor, *, fails: bool = False) -> Tensor:
        y = (self.linear(x) * sum(cached() for cached in self.cached)).sum()
        return y.item() if fails else y  # type: ignore[return-value]


def explained(model: nn.Module, **options: Any) -> None:
    with fullshard.torch_private.simulated_world(1, 0):
        explain(fullshard.fully_shard(model), batch={"x": torch.ones(2, 4), **options})


def test_nothing_that_was_cached_stays() -> None:
    with pytest.raises(RuntimeError, match="failed on tensors without values"):
        explained(Model(*CACHES.values()), fails=True)
    explained(Model(*CACHES.values()))
    loss = Model(*CACHES.values())(torch.ones(2, 4))
    assert not isinstance(loss, FakeTensor)
    loss.backward()
    for where, cached in [*CACHES.items()] * 2:
        assert not isinstance(cached(), FakeTensor), where  # what is cached now is a value
    by_function.cache_clear()


@pytest.mark.parametrize("snapshots", ["small_snapshots", pytest.param("whole_snapshots", marks=pytest.mark.slow)])
def test_what_was_there_before_stays(request: pytest.FixtureRequest, snapshots: str) -> None:
    request.getfixturevalue(snapshots)
    before = TABLES["before"] = torch.zeros(4)
    TABLES.pop("table", None)
    kept = by_global()
    explained(Model(CACHES["dict of a module"], by_global))
    assert [*TABLES] == ["before"]
    assert TABLES["before"] is before
    assert by_global() is kept


def _endless(tables: list[Tensor]) -> Iterator[Tensor]:
    while True:
        table = made()
        yield table


def test_a_holder_that_cannot_be_emptied_is_named() -> None:
    endless = _endless([])
    with pytest.raises(RuntimeError, match=r"shape \(4,\), .*: _endless, which has not ended .* holds it"):
        explained(Model(lambda: next(endless)))


class Built(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(4, 4), by_function(4)[0]


def test_what_building_a_model_on_meta_caches_does_not_stay() -> None:
    built: list[nn.Module] = []

    def build() -> nn.Module:
        built.append(Built())
        return built[-1]

    explain(build, ranks=2)
    assert not Built().table.is_meta
    assert len(built) == 1, "the model itself may be kept"
    by_function.cache_clear()


def test_the_walk_calls_no_code_of_users() -> None:
    class Lazy(dict[str, int]):
        def __getitem__(self, key: str) -> int:
            raise AssertionError

        keys = values = items = copy = __iter__ = __len__ = __getitem__  # type: ignore[assignment]

        def __getattribute__(self, name: str) -> Any:
            raise AssertionError

    snapshot.Snapshot(Lazy(a=1)).restore(lambda tensor: True)
