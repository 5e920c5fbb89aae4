"""Tensors are found and replaced in every kind of container, and nothing is rebuilt or written into without need."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import sys
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from fullshard.tree import cast_floating, map_tensors, tensors, to_device


class Pair(NamedTuple):
    left: Any
    right: Any


class PickyPair(Pair):
    """Its constructor takes other arguments than its fields, and instances have attributes."""

    def __new__(cls, both: Any) -> PickyPair:
        made = super().__new__(cls, both, both)
        made.note = "kept"  # type: ignore[attr-defined]
        return made


@dataclasses.dataclass
class Plain:
    x: Any
    y: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    derived: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "derived", self.x * 2)


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any
    never_set: Any = dataclasses.field(init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlotted:
    x: Any


@dataclasses.dataclass
class DictOutput(OrderedDict):  # type: ignore[type-arg]
    """A dict of those of its fields that are not None, as some libraries' outputs are, unknown to pytree."""

    x: Any = None
    y: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __getitem__(self, key: Any) -> Any:
        return self.to_tuple()[key] if isinstance(key, int) else super().__getitem__(key)

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(OrderedDict.values(self))


class PickyDict(dict):  # type: ignore[type-arg]
    def __init__(self, size: int, owner: str) -> None:
        super().__init__()
        self.owner = owner


class Registered:
    def __init__(self, inner: Any, name: str) -> None:
        self.inner = inner
        self.name = name


pytree.register_pytree_node(Registered, lambda obj: ([obj.inner], obj.name), lambda new, name: Registered(*new, name))


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def one() -> torch.Tensor:
    return torch.ones(2)


def picky_dict(value: Any) -> PickyDict:
    made = PickyDict(3, owner="me")
    made["x"] = value
    return made


class PickyList(list):  # type: ignore[type-arg]
    def __init__(self, owner: str) -> None:
        super().__init__()
        self.owner = owner


def picky_list(value: Any) -> PickyList:
    made = PickyList("me")
    made.append(value)
    return made


def transformers_output(*args: Any, **kwargs: Any) -> Any:
    """An output of a model of transformers, which takes a second to import."""
    return importlib.import_module("transformers.modeling_outputs").BaseModelOutput(*args, **kwargs)


def frozen_inside(value: Any) -> dict[str, Any]:
    return {"list": [Frozen(value)], "none": None, "text": "abc"}


CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda value: (value, 3),
    "1-tuple": lambda value: (value,),
    "tuple of tensors": lambda value: (value, torch.zeros(3)),
    "list": lambda value: [1, value],
    "dict": lambda value: {"a": value, 2: None},
    "OrderedDict": lambda value: OrderedDict(b=1, a=value),
    "defaultdict": lambda value: defaultdict(list, a=value),
    "Counter": lambda value: Counter(a=value),
    "UserDict": lambda value: UserDict(a=value),
    "UserList": lambda value: UserList([value]),
    "list subclass": picky_list,
    "deque": lambda value: deque([value, 2], maxlen=2),
    "dict subclass": picky_dict,
    "named tuple": lambda value: Pair("left", value),
    "named tuple subclass": PickyPair,
    "dataclass": Plain,
    "frozen dataclass": Frozen,
    "dataclass with slots": Slotted,
    "frozen dataclass with slots": FrozenSlotted,
    "dataclass that is a dict": lambda value: DictOutput(x=value),
    "transformers output": lambda value: transformers_output(last_hidden_state=value),
    "registered": lambda value: Registered(value, "name"),
    "nested": frozen_inside,
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_tensor_is_replaced_and_nothing_is_written_into_or_rebuilt_without_need(name: str) -> None:
    tensor = one()
    tree = CONTAINERS[name](tensor)
    before = tensors(tree)
    assert map_tensors(same, tree) is tree
    new = map_tensors(double, tree)
    assert type(new) is type(tree)
    assert [each.tolist() for each in tensors(new)] == [(2 * each).tolist() for each in before]
    assert len(before) > 0
    assert list(map(id, tensors(tree))) == list(map(id, before))
    assert tensor.tolist() == [1, 1]
    if name not in ("frozen dataclass", "nested"):  # these compute with it
        tree = CONTAINERS[name]([{"deep": (tensor,)}])
        assert tensors(tree)[0] is tensor
        assert tensors(map_tensors(double, tree))[0].tolist() == [2, 2]


class TestWhatContainersKeep:
    def test_a_defaultdict_keeps_its_factory(self) -> None:
        assert map_tensors(double, defaultdict(list, a=one()))["new"] == []

    def test_an_ordered_dict_keeps_its_order(self) -> None:
        tree = OrderedDict(a=one(), b=one(), c=1)
        tree.move_to_end("a")
        new = map_tensors(double, tree)
        assert list(new) == ["b", "c", "a"]
        assert new["a"].tolist() == [2, 2]
        assert new.popitem()[0] == "a"

    def test_a_deque_keeps_its_length(self) -> None:
        assert map_tensors(double, deque([one()], maxlen=3)).maxlen == 3

    def test_attributes_of_subclasses_are_kept(self) -> None:
        assert map_tensors(double, picky_dict(one())).owner == "me"
        assert map_tensors(double, picky_list(one())).owner == "me"
        assert map_tensors(double, PickyPair(one())).note == "kept"  # type: ignore[attr-defined]

    def test_fields_that_the_constructor_does_not_take_are_mapped(self) -> None:
        new = map_tensors(lambda tensor: tensor + 1, Frozen(one()))
        assert (new.x.tolist(), new.derived.tolist()) == ([2, 2], [3, 3])

    def test_fields_that_were_never_set_stay_unset(self) -> None:
        assert not hasattr(map_tensors(double, Slotted(one())), "never_set")

    def test_attributes_that_are_no_fields_are_mapped(self) -> None:
        tree = Plain(1)
        tree.extra = one()  # type: ignore[attr-defined]
        assert map_tensors(double, tree).extra.tolist() == [2, 2]  # type: ignore[attr-defined]

    def test_the_dict_and_the_fields_of_an_output_stay_the_same_tensors(self) -> None:
        for tree in (DictOutput(x=one(), y=one()), transformers_output(one(), hidden_states=(one(),))):
            new: Any = map_tensors(double, tree)
            assert list(new) == list(tree)
            for name in tree:
                assert getattr(new, name) is new[name]

    def test_private_slots_are_mapped(self) -> None:
        @dataclasses.dataclass
        class Hidden:
            __slots__ = ("__x",)
            __x: Any

            def get(self) -> Any:
                return self.__x

        assert map_tensors(double, Hidden(one())).get().tolist() == [2, 2]

    def test_cached_values_are_computed_anew(self) -> None:
        @dataclasses.dataclass
        class Lazy:
            x: Any

            @cached_property
            def total(self) -> float:
                return float(self.x.sum())

        tree = Lazy(one())
        assert tree.total == 2
        assert map_tensors(double, tree).total == 4

    def test_registration_has_the_last_word(self) -> None:
        @dataclasses.dataclass
        class OnlyX:
            x: Any
            y: Any

        tree = OnlyX(one(), one())
        assert len(tensors(tree)) == 2
        pytree.register_pytree_node(OnlyX, lambda obj: ([obj.x], obj.y), lambda new, y: OnlyX(*new, y))
        assert tensors(tree) == [tree.x]  # noticed although the class was met before
        new = map_tensors(double, tree)
        assert (new.x.tolist(), new.y) == ([2, 2], tree.y)

    def test_return_types_of_torch_are_mapped(self) -> None:
        tree = torch.ones(2, 2).max(dim=0)
        new = map_tensors(double, tree)
        assert type(new) is type(tree)
        assert new.values.tolist() == [2, 2]


def test_leaves_and_empty_containers_are_handed_back() -> None:
    leaves = (None, 3, "text", {1, 2}, torch.float32, torch.Size([2]), nn.Linear(1, 1), object(), Plain, range(3))
    for leaf in (*leaves, (), {}, []):
        assert map_tensors(double, leaf) is leaf
        assert tensors(leaf) == [], leaf


def test_sets_are_left_alone() -> None:
    tree = {one()}
    assert map_tensors(double, tree) is tree
    assert tensors([tree, frozenset(tree)]) == []


def test_modules_are_left_alone() -> None:
    @dataclasses.dataclass(eq=False)
    class Odd(nn.Module):
        x: Any

        def __post_init__(self) -> None:
            super().__init__()

    module = Odd.__new__(Odd)
    nn.Module.__init__(module)
    module.x = one()
    assert tensors((module, nn.Linear(2, 2))) == []


class TestSharing:
    def test_a_tensor_in_several_places_is_given_once_and_stays_one(self) -> None:
        tensor, seen = one(), []

        def record(given: torch.Tensor) -> torch.Tensor:
            seen.append(given)
            return given * 2

        for tree in ((tensor, tensor), [tensor, {"a": tensor}], Plain(tensor, tensor)):
            seen.clear()
            new = tensors(map_tensors(record, tree))
            assert len(seen) == 1
            assert len(new) == 1
            assert tensors(tree) == [tensor]

    def test_a_container_in_several_places_stays_one(self) -> None:
        shared = [one()]
        new = map_tensors(double, (shared, shared, one()))
        assert new[0] is new[1]

    def test_unchanged_parts_of_a_changed_tree_are_the_same_objects(self) -> None:
        kept = {"ids": torch.arange(3)}
        tree = (kept, one())
        assert cast_floating(tree, torch.float64)[0] is kept

    @pytest.mark.parametrize("fn", [same, double])
    def test_a_dataclass_that_refers_to_itself_comes_out_so(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for tree in (Plain(one()), Slotted(one())):
            if isinstance(tree, Plain):
                tree.y = [tree, tree]
            else:
                tree.never_set = {"me": tree}
            new: Any = map_tensors(fn, tree)
            back = new.y[0] if isinstance(new, Plain) else new.never_set["me"]
            assert back is new
            assert (new is tree) == (fn is same)
            assert new.x.tolist() == fn(one()).tolist()
            assert tree.x.tolist() == [1, 1]

    def test_dicts_and_lists_that_refer_to_themselves_come_out_so(self) -> None:
        tree: dict[str, Any] = {"x": one()}
        tree["list"] = [tree]
        tree["list"].append(tree["list"])
        new = map_tensors(double, tree)
        assert new is not tree
        assert new["list"][0] is new
        assert new["list"][1] is new["list"]
        assert new["x"].tolist() == [2, 2]

    def test_a_tuple_that_refers_to_itself_does_not_loop(self) -> None:
        inner: list[Any] = [one()]
        tree = (inner,)
        inner.append(tree)
        new = map_tensors(double, tree)
        assert new[0][0].tolist() == [2, 2]
        assert tensors(tree) == [inner[0]]


class TestPackedSequences:
    def test_the_data_is_cast_and_lengths_and_order_are_kept(self) -> None:
        packed = pack_sequence([torch.ones(1, 2), torch.ones(3, 2)], enforce_sorted=False)
        new = cast_floating((packed, 1), torch.float64)[0]
        assert type(new) is PackedSequence
        assert new.data.dtype is torch.float64
        assert new.batch_sizes is packed.batch_sizes
        assert new.sorted_indices is packed.sorted_indices
        assert new.unsorted_indices is packed.unsorted_indices

    def test_moves_but_its_lengths_stay_on_the_cpu(self) -> None:
        packed = pack_sequence([torch.ones(1, 2), torch.ones(3, 2)], enforce_sorted=False)
        new = to_device(packed, "meta")
        assert {new.data.device.type, new.sorted_indices.device.type, new.unsorted_indices.device.type} == {"meta"}
        assert new.batch_sizes is packed.batch_sizes

    def test_is_handed_back_if_nothing_changes(self) -> None:
        packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
        assert cast_floating(packed, torch.float32) is packed


class TestCasting:
    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.uint8])
    def test_only_floating_point_tensors_are_cast(self, dtype: torch.dtype) -> None:
        other = torch.ones(2, dtype=dtype)
        tree = {"other": other, "low": torch.ones(2, dtype=torch.bfloat16), "high": torch.ones(2, dtype=torch.float64)}
        new = cast_floating(tree, torch.float32)
        assert new["other"] is other
        assert (new["low"].dtype, new["high"].dtype) == (torch.float32, torch.float32)

    def test_none_casts_nothing(self) -> None:
        tree = [torch.ones(2, dtype=torch.float64)]
        assert cast_floating(tree, None) is tree

    def test_a_tensor_of_that_dtype_is_handed_back(self) -> None:
        tensor = one()
        assert cast_floating(tensor, torch.float32) is tensor

    def test_gradients_flow_through_the_cast(self) -> None:
        tensor = one().requires_grad_()
        cast_floating(Plain(tensor), torch.float64).x.sum().backward()
        assert tensor.grad is not None
        assert tensor.grad.tolist() == [1, 1]


class TestMoving:
    @pytest.mark.parametrize("device", ["meta", torch.device("meta")])
    def test_tensors_are_moved(self, device: Any) -> None:
        new = to_device({"a": one(), "b": [torch.arange(2)]}, device)
        assert {new["a"].device.type, new["b"][0].device.type} == {"meta"}

    def test_what_lies_there_is_handed_back(self) -> None:
        tree = (one(), [torch.arange(2)])
        assert to_device(tree, "cpu") is tree


trees = st.recursive(
    st.one_of(
        st.none(), st.integers(), st.text(max_size=2), st.builds(one), st.builds(torch.arange, st.integers(1, 3))
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict),
        st.builds(Pair, inner, inner),
        st.builds(Plain, inner, inner),
        st.builds(FrozenSlotted, inner),
        st.builds(DictOutput, inner, inner),
        st.builds(Registered, inner, st.just("name")),
    ),
    max_leaves=12,
)


def plain(tree: Any) -> Any:
    """Tensors and containers as something that ``==`` can compare."""
    if isinstance(tree, torch.Tensor):
        return ("tensor", str(tree.dtype), tree.tolist())
    if isinstance(tree, dict):
        return (type(tree).__name__, [(key, plain(value)) for key, value in tree.items()])
    if isinstance(tree, (list, tuple)):
        return (type(tree).__name__, [plain(value) for value in tree])
    if isinstance(tree, (Plain, FrozenSlotted, Registered)):
        names = tree.__dict__ if hasattr(tree, "__dict__") else ("x",)
        return (type(tree).__name__, [plain(getattr(tree, name)) for name in names])
    return tree


@settings(deadline=None)
@given(trees)
def test_casting_there_and_back_gives_an_equal_tree(tree: Any) -> None:
    before = plain(copy.deepcopy(tree))
    there = cast_floating(tree, torch.float64)
    assert all(tensor.dtype is torch.float64 for tensor in tensors(there) if tensor.is_floating_point())
    assert plain(cast_floating(there, torch.float32)) == before
    assert plain(tree) == before


@settings(deadline=None)
@given(trees)
def test_a_map_that_changes_nothing_returns_the_tree(tree: Any) -> None:
    assert map_tensors(same, tree) is tree


@pytest.mark.parametrize(
    "tree", [one(), (one(),), (), None, {}], ids=["tensor", "1-tuple", "empty", "none", "no kwargs"]
)
def test_common_arguments_take_few_calls(tree: Any) -> None:
    """Of Python and of C, the mapped function's included; ten are less than a microsecond."""
    calls = []

    def count(frame: Any, event: str, callee: Any) -> None:
        if event in ("call", "c_call"):
            calls.append(callee)

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        map_tensors(same, tree)
    finally:
        sys.setprofile(before)
    assert len(calls) <= 10
