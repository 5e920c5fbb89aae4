"""Tensors inside whatever a forward takes and returns: nested containers, dataclasses, registered objects.

:func:`map_tensors` replaces them and :func:`tensors` lists them. Casts and copies to a device are such maps. It writes
to no container. A container with a replaced tensor is rebuilt, and so are the containers around it; all others
are returned as they are, the same objects. These containers are searched::

    tuple, list, dict, dataclass, UserDict,    rebuilt as an object of the same class with all its attributes but the
    UserList, and classes derived from them    values of a cached_property, without calling its constructor
    registered with pytree                     rebuilt by its registered functions, which have the last word
    PackedSequence                             rebuilt by its constructor; ``batch_sizes``, always on the CPU, is kept

Everything else is a leaf, including sets and modules. :func:`reachable_tensors` searches further.

A function that is called with a list may append to it, and its caller reads the list afterwards. So what a forward
takes is not rebuilt: :func:`replace_tensors` writes to the caller's containers, and :class:`Replacements` undoes it
after the call. :func:`replace_reachable` does the same to the plain objects that a forward returns.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from operator import is_
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fullshard.torch_private import PYTREE_NODES

T = TypeVar("T")

_LEAVES = frozenset(
    {type(None), bool, int, float, complex, str, bytes, set, frozenset, torch.Size, torch.dtype, torch.device}
)
_PASSED_BY = (_LEAVES - {set, frozenset}) | {FunctionType, MethodType, BuiltinFunctionType, ModuleType}
_MOST_OBJECTS = 1000
_PLAIN_TENSORS = frozenset({Tensor, nn.Parameter})


def map_tensors(fn: Callable[[Tensor], Tensor], tree: T) -> T:
    """``tree`` with every tensor replaced by ``fn(tensor)``; ``tree`` itself if ``fn`` returned each tensor itself.

    ``fn`` is called once for each tensor, even if it occurs several times. A container that occurs several times stays
    one container, and a cycle stays a cycle.
    """
    if isinstance(tree, Tensor):
        return fn(tree)  # type: ignore[return-value]
    cls = type(tree)
    if cls in _LEAVES or (cls in (tuple, dict, list) and not tree):
        return tree
    flat = _flat_tensors(tree)
    if flat is not None:
        mapped = tuple(map(fn, flat)) if len(flat) > 1 else (fn(flat[0]),)
        return tree if mapped[0] is flat[0] and all(map(is_, mapped, flat)) else cast(T, mapped)
    walk = _Walk(fn)
    result = walk.visit(tree)
    return result if walk.changed else tree  # a cycle is rebuilt before it is known that nothing in it changes


#: A tensor that stands in a container for another one: the functions that read and set an item of the container, the
#: container, the key of the item, what stands there now, and what stood there before.
Replaced = tuple[Callable[[Any, Any], Any], Callable[[Any, Any, Any], None], Any, Any, Any, Any]


def replace_tensors(fn: Callable[[Tensor], Tensor], tree: T, replaced: list[Replaced]) -> T:
    """Like :func:`map_tensors`, but lists, dicts, dataclasses and other mutable containers stay the same objects: they
    are written to, and ``replaced`` says what was there. Tuples are rebuilt."""
    if isinstance(tree, Tensor) or _flat_tensors(tree) is not None or (type(tree) is dict and not tree):
        return map_tensors(fn, tree)
    return cast(T, _InPlace(fn, replaced).visit(tree))


class Replacements:
    """What :func:`replace_tensors` replaced for calls that have not ended, the outermost first."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, list[Replaced]]] = []

    def of(self, callee: object) -> list[Replaced]:
        """A list for what is replaced until the call of ``callee`` ends."""
        self.calls.append((callee, []))
        return self.calls[-1][1]

    def restore(self, callee: object) -> None:
        """Undo what was replaced for ``callee``, and for calls in it that did not end. Later changes stay."""
        while any(each is callee for each, _ in self.calls):
            for read, write, node, key, new, old in reversed(self.calls.pop()[1]):
                with suppress(LookupError, AttributeError):
                    if read(node, key) is new:
                        write(node, key, old)


def replace_reachable(fn: Callable[[Tensor], Tensor], tree: T) -> T:
    """``tree`` with ``fn(tensor)`` in place of every tensor that :func:`reachable_tensors` finds. Containers are
    rebuilt, and plain objects are written to. ``fn`` is called once for each tensor."""
    done: dict[Tensor, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        if tensor not in done:
            done[tensor] = fn(tensor)
        return done[tensor]

    for node in _reachable(tree):
        if isinstance(node, set):
            values = {map_tensors(once, value) for value in node}
            node.clear()
            node.update(values)
        elif _kind(type(node)) is None and not isinstance(node, (Tensor, frozenset)):
            for name, value in list(_attributes(node)):
                if (new := map_tensors(once, value)) is not value:
                    object.__setattr__(node, name, new)
    return map_tensors(once, tree)


def tensors(tree: object) -> list[Tensor]:
    """The tensors in ``tree`` in order, each once."""
    flat = (tree,) if isinstance(tree, Tensor) else _flat_tensors(tree)
    if flat is not None:
        return list(flat)
    walk = _Walk(lambda tensor: tensor)
    walk.visit(tree)
    return [node for node, _ in walk.done.values() if isinstance(node, Tensor)]


def reachable_tensors(tree: object) -> list[Tensor]:
    """The tensors in ``tree``, including those in sets and in attributes of plain objects.
    Modules, functions and classes are skipped. The search ends after :data:`_MOST_OBJECTS` objects, because a result
    may refer to the whole program."""
    flat = (tree,) if isinstance(tree, Tensor) else _flat_tensors(tree)
    if flat is not None:
        return list(flat)
    return [node for node in _reachable(tree) if isinstance(node, Tensor)]


def _reachable(tree: object) -> list[Any]:
    """The tensors, containers and objects in ``tree``, each once."""
    visited: dict[int, Any] = {}
    waiting: list[Any] = [tree]
    for node in waiting:
        if type(node) in _PASSED_BY or id(node) in visited or isinstance(node, (nn.Module, type)):
            continue
        visited[id(node)] = node
        if not isinstance(node, Tensor) and len(visited) <= _MOST_OBJECTS:
            kind = _kind(type(node))
            if kind is not None:
                waiting += kind.open(node)[0]
            else:
                waiting += node if isinstance(node, (set, frozenset)) else [value for _, value in _attributes(node)]
    return list(visited.values())


def cast_floating(tree: T, dtype: torch.dtype | None, replaced: list[Replaced] | None = None) -> T:
    """``tree`` with its floating-point tensors in ``dtype``, or as they are if that is ``None``. With ``replaced``, as
    :func:`replace_tensors` does it."""
    if dtype is None:
        return tree

    def to_dtype(tensor: Tensor) -> Tensor:
        return tensor if tensor.dtype is dtype or not tensor.is_floating_point() else tensor.to(dtype)

    return map_tensors(to_dtype, tree) if replaced is None else replace_tensors(to_dtype, tree, replaced)


def to_device(tree: T, device: torch.device | str | int, replaced: list[Replaced] | None = None) -> T:
    """``tree`` with its tensors on ``device``. A tensor that is already there stays the same object."""
    target = torch.device(device)

    def move(tensor: Tensor) -> Tensor:
        return tensor if tensor.device == target else tensor.to(target)

    return map_tensors(move, tree) if replaced is None else replace_tensors(move, tree, replaced)


def _flat_tensors(tree: Any) -> tuple[Tensor, ...] | None:
    """``tree`` if it is a tuple of different tensors and nothing else, as the arguments of most modules are."""
    if type(tree) is not tuple:
        return None
    if len(tree) == 1:
        return tree if isinstance(tree[0], Tensor) else None
    is_list = _PLAIN_TENSORS.issuperset(map(type, tree)) and len(set(map(id, tree))) == len(tree)
    return tree if is_list else None


class _ContainerKind(NamedTuple):
    """How containers of one class are taken apart and rebuilt.

    ``open`` returns the values inside, and a context for ``build``. With ``fills``, ``build`` fills an empty object of
    the class, so that a cycle can refer to the container before it is complete. Otherwise ``build`` makes a new
    container from the old one.
    """

    open: Callable[[Any], tuple[Iterable[Any], Any]]
    build: Callable[[Any, list[Any], Any], Any]
    fills: bool = False


class _Walk:
    """One walk over a tree: the objects that were mapped, and the containers that the walk is inside of."""

    __slots__ = ("changed", "done", "fn", "under_way")

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.fn = fn
        self.changed = False
        self.done: dict[int, tuple[Any, Any]] = {}  # the key is an id, so the object is kept alive beside its result
        self.under_way: dict[int, Any] = {}

    def visit(self, node: Any) -> Any:
        cls: type = type(node)
        if cls in _LEAVES:
            return node
        key = id(node)
        if key in self.done:
            return self.done[key][1]
        if isinstance(node, Tensor):
            result = self.fn(node)
            self.changed |= result is not node
        else:
            kind = _kind(cls)
            if kind is None:
                return node
            if key in self.under_way:
                if not kind.fills:  # a cycle that was entered at a tuple: it is cut where it passes something mutable
                    return node
                if self.under_way[key] is None:
                    self.under_way[key] = _maker(cls)()
                return self.under_way[key]
            self.under_way[key] = None
            values, context = kind.open(node)
            old = list(values)
            new = [self.visit(value) for value in old]
            blank = self.under_way.pop(key)  # not None if something inside refers to it
            result = node
            if blank is not None or not all(map(is_, new, old)):
                whole = node if not kind.fills else _maker(cls)() if blank is None else blank
                result = kind.build(whole, new, context)
        self.done[key] = (node, result)
        return result


class _InPlace:
    """One walk that writes to mutable containers. In objects that are registered with pytree it finds tensors by their
    attributes, because their registered functions make new objects."""

    __slots__ = ("done", "fn", "inside", "replaced")

    def __init__(self, fn: Callable[[Tensor], Tensor], replaced: list[Replaced]) -> None:
        self.fn = fn
        self.replaced = replaced
        self.done: dict[int, tuple[Any, Any]] = {}  # the key is an id, so the object is kept alive beside its result
        self.inside = 0  # registered objects

    def visit(self, node: Any) -> Any:
        cls = type(node)
        if cls in _PASSED_BY or isinstance(node, (nn.Module, type)):
            return node
        if isinstance(node, Tensor):
            return self.fn(node)
        if id(node) in self.done:
            return self.done[id(node)][1]
        kind = _kind(cls)
        if kind is None and not self.inside:
            return node
        self.done[id(node)] = node, node
        is_registered = kind is _REGISTERED
        if not isinstance(node, tuple):
            self.inside += is_registered
            for read, write, key, value in _places(node):
                if (new := self.visit(value)) is not value:
                    write(node, key, new)
                    self.replaced.append((read, write, node, key, new, value))
            self.inside -= is_registered
        if kind is not None and (is_registered or isinstance(node, tuple)):
            values, context = kind.open(node)
            old = list(values)
            new = [self.visit(value) for value in old]
            if not all(map(is_, new, old)):
                self.done[id(node)] = node, kind.build(node, new, context)
        return self.done[id(node)][1]


def _places(node: Any) -> list[tuple[Callable[[Any, Any], Any], Callable[[Any, Any, Any], None], Any, Any]]:
    """The items and attributes of an object: functions that read and set one, its key, and its value."""
    places: list[tuple[Any, Any, Any, Any]] = []
    base: Any
    for base in (list, deque):
        if isinstance(node, base):
            places += [(base.__getitem__, base.__setitem__, i, value) for i, value in enumerate(base.__iter__(node))]
    if isinstance(node, dict):
        base = OrderedDict if isinstance(node, OrderedDict) else dict
        places += [(dict.__getitem__, base.__setitem__, key, value) for key, value in base.items(node)]
    reads, writes = object.__getattribute__, object.__setattr__
    return places + [(reads, writes, name, value) for name, value in _attributes(node)]


def _kind(cls: type) -> _ContainerKind | None:
    """The kind of a class; ``None`` for a leaf. Registered classes are looked up each time, because users may
    register more."""
    return _BUILTIN_KINDS.get(cls) or (_REGISTERED if cls in PYTREE_NODES else _derived_kind(cls))


@lru_cache(maxsize=1024)
def _derived_kind(cls: type) -> _ContainerKind | None:
    if issubclass(cls, PackedSequence):
        return _PACKED
    if issubclass(cls, tuple):
        return _TUPLE
    is_object = dataclasses.is_dataclass(cls) or issubclass(cls, (dict, list, UserDict, UserList))
    return _OBJECT if is_object and not issubclass(cls, nn.Module) else None


_APPENDS: dict[Any, Callable[[Any, Any], None]] = {list.__setitem__: list.append, deque.__setitem__: deque.append}


def _open_object(node: Any) -> tuple[Iterable[Any], Any]:
    """The items of a list or dict, then the attributes, with their places. Methods that the class overrides are not
    called, so that it reads the stored values."""
    places = _places(node)
    return [value for *_, value in places], places


def _fill_object(blank: Any, new: list[Any], places: Any) -> Any:
    for (_, write, key, _), value in zip(places, new, strict=True):
        append = _APPENDS.get(write)
        append(blank, value) if append else write(blank, key, value)  # also an attribute of a frozen dataclass
    return blank


def _attributes(node: Any) -> Iterator[tuple[str, Any]]:
    """The attributes in the ``__dict__`` and the slots of an object, except values of a cached_property."""
    cls: type = type(node)
    for name in _slot_names(cls):
        try:
            yield name, object.__getattribute__(node, name)
        except AttributeError:
            continue  # a field that was never set
    for name, value in getattr(node, "__dict__", {}).items():
        if not isinstance(getattr(cls, name, None), cached_property):
            yield name, value


@lru_cache(maxsize=1024)
def _slot_names(cls: type) -> tuple[str, ...]:
    """Names of attributes outside ``__dict__``, including a defaultdict's ``default_factory``."""
    return tuple(
        name for base in cls.__mro__ for name, member in vars(base).items() if isinstance(member, MemberDescriptorType)
    )


@lru_cache(maxsize=1024)
def _maker(cls: type) -> Callable[..., Any]:
    """Makes objects of ``cls`` by ``__new__`` of the built-in class from which it derives, because a user's constructor
    may need arguments that we do not have."""
    makers = (base.__dict__.get("__new__") for base in cls.__mro__)
    return partial(next(make for make in makers if make is not None and not isinstance(make, staticmethod)), cls)


def _build_tuple(node: Any, new: list[Any], context: Any) -> Any:
    cls: type = type(node)
    copy = _maker(cls)(new)
    for name, value in getattr(node, "__dict__", {}).items():
        object.__setattr__(copy, name, value)
    return copy


_OBJECT = _ContainerKind(_open_object, _fill_object, fills=True)
_TUPLE = _ContainerKind(lambda node: (node, None), _build_tuple)
_PACKED = _ContainerKind(
    lambda node: ((node.data, node.sorted_indices, node.unsorted_indices), node.batch_sizes),
    lambda node, new, batch_sizes: type(node)(new[0], batch_sizes, *new[1:]),
)
_REGISTERED = _ContainerKind(
    lambda node: PYTREE_NODES[type(node)].flatten_fn(node),
    lambda node, new, context: PYTREE_NODES[type(node)].unflatten_fn(new, context),
)
_BUILTIN_KINDS: dict[type, _ContainerKind] = {
    tuple: _TUPLE,
    dict: _ContainerKind(
        lambda node: (node.values(), [(0, dict.__setitem__, key, 0) for key in node]), _fill_object, True
    ),
    **dict.fromkeys((list, OrderedDict, defaultdict), _OBJECT),
}
