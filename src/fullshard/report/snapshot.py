"""What the code of users can write to, before it runs on tensors without values, and how it is put back.

A forward may cache tensors outside of its modules: by ``functools.cache``, in globals, class attributes, closures,
plain objects, arguments' defaults. A cached fake tensor would be used by the next forward that trains. Owns the walk
over all that such code reaches, the copies of the containers on the way, and the search for who holds a tensor.
Modules of Python's library and of torch are not entered, and context variables are the caller's business.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from functools import _lru_cache_wrapper, cache
from itertools import islice
from operator import is_
from threading import local
from types import CellType, CoroutineType, FrameType, FunctionType, GeneratorType, MemberDescriptorType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

_SKIPPED = (frozenset(sys.stdlib_module_names) - {"__main__"}) | {"fullshard", "numpy", "sympy", "torch", "triton"}
#: The walk ends after this many objects: a module may refer to the whole program, and that to its data.
_MOST_WALKED, _MOST_SEARCHED, _MOST_NAMED = 400_000, 10_000, 100
_MISSING: Any = object()


class _ObjectKind(NamedTuple):
    """How containers of one kind are read, as a mapping, and written."""

    read: Callable[[Any], dict[Any, Any]]
    write: Callable[[Any, dict[Any, Any]], None]


def _base(owner: object) -> Any:
    """The class whose methods are called, as users' classes may override them."""
    return OrderedDict if issubclass(type(owner), OrderedDict) else dict


def _write_dict(owner: Any, content: dict[Any, Any]) -> None:
    base = _base(owner)
    base.clear(owner)
    for key, value in content.items():
        base.__setitem__(owner, key, value)


def _write_deque(owner: Any, content: dict[Any, Any]) -> None:
    owner.clear()
    owner.extend(content.values())


def _write_set(owner: Any, content: dict[Any, Any]) -> None:
    set.clear(owner)
    set.update(owner, content)


def _read_cell(owner: CellType) -> dict[Any, Any]:
    try:
        return {"": owner.cell_contents}
    except ValueError:  # empty
        return {}


def _write_cell(owner: CellType, content: dict[Any, Any]) -> None:
    if content:
        owner.cell_contents = content[""]
    else:
        del owner.cell_contents


def _write_type(owner: type, content: dict[Any, Any]) -> None:
    for name, value in vars(owner).copy().items():
        if name not in content:
            type.__delattr__(owner, name)
        elif content[name] is not value:
            type.__setattr__(owner, name, content[name])
    for name in content.keys() - vars(owner).keys():
        type.__setattr__(owner, name, content[name])


def _members(cls: type) -> Iterator[Any]:
    return (each for base in cls.__mro__ for each in vars(base).values() if isinstance(each, MemberDescriptorType))


def _read_slots(owner: object) -> dict[Any, Any]:
    found = {}
    for slot in _members(type(owner)):
        with suppress(AttributeError):  # never set
            found[slot] = slot.__get__(owner)
    return found


def _write_slots(owner: object, content: dict[Any, Any]) -> None:
    for slot in _read_slots(owner).keys() - content.keys():
        slot.__delete__(owner)
    for slot, value in content.items():
        slot.__set__(owner, value)


def _write_grad(owner: torch.Tensor, content: dict[Any, Any]) -> None:
    if content:
        owner.grad = content["grad"]


_KINDS: dict[type, _ObjectKind] = {
    dict: _ObjectKind(lambda owner: dict(_base(owner).items(owner)), _write_dict),
    list: _ObjectKind(
        lambda owner: dict(enumerate(list.__iter__(owner))),
        lambda owner, content: list.__setitem__(owner, slice(None), content.values()),
    ),
    deque: _ObjectKind(lambda owner: dict(enumerate(owner.copy())), _write_deque),
    set: _ObjectKind(lambda owner: {each: each for each in set.__iter__(owner)}, _write_set),
    CellType: _ObjectKind(_read_cell, _write_cell),
    type: _ObjectKind(lambda owner: dict(vars(owner)), _write_type),
    torch.Tensor: _ObjectKind(lambda owner: {"grad": owner.grad} if owner.is_leaf else {}, _write_grad),
}
_OF_SLOTS = _ObjectKind(_read_slots, _write_slots)


@cache
def _kind_of(cls: type) -> _ObjectKind | None:
    for base, kind in _KINDS.items():
        if issubclass(cls, base):
            return kind
    in_python = cls.__flags__ & 1 << 9
    return _OF_SLOTS if in_python and any(isinstance(each, MemberDescriptorType) for each in _members(cls)) else None


@cache
def _is_foreign(cls: type) -> bool:
    """Whether objects of a class belong to torch or to this library."""
    is_ours = _package(vars(cls).get("__module__")) in ("fullshard", "torch")
    return is_ours and not issubclass(cls, (nn.Module, *_KINDS))


def _is_skipped(value: Any) -> bool:
    """Whether the walk does not enter a value: it belongs to what is not the users', or refers to nothing."""
    cls: Any = type(value)
    if not gc.is_tracked(value) and cls is not dict:  # an empty dict is not tracked
        return True
    if issubclass(cls, ModuleType):
        return _package(vars(value).get("__name__")) in _SKIPPED
    if issubclass(cls, type):
        return _package(vars(value).get("__module__")) in _SKIPPED
    return _is_foreign(cls)


def _package(name: object) -> str:
    return name.partition(".")[0] if isinstance(name, str) else ""


def _referents(value: Any) -> Iterable[Any]:
    """What a value refers to, without the globals of functions. Runs no code of users."""
    cls: type = type(value)
    if issubclass(cls, type):
        return [*vars(value).values(), *value.__bases__]
    if cls is FunctionType:
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value)]
    found = gc.get_referents(value)
    if cls.__flags__ & 1 << 9 or cls is local:  # of a class in Python
        with suppress(AttributeError):
            found.append(vars(value) if cls is local else object.__getattribute__(value, "__dict__"))
    return found


class Snapshot:
    """What code of users can reach: a copy of each container.

    Args:
        *roots: the model, and functions. The modules of Python that are imported come with them.
    """

    def __init__(self, *roots: object) -> None:
        self._objects: list[Any] = []
        self._found_in: list[int] = []  # the position of the object that refers to each
        self._known: set[int] = set()  # the ids of the objects
        self._before: dict[int, tuple[_ObjectKind, dict[Any, Any]]] = {}  # by position
        self._walk([*roots, *(module for module in [*sys.modules.values()] if not _is_skipped(module))])

    def including(self, *roots: object) -> Snapshot:
        """This snapshot, and what ``roots`` reach beside it."""
        twin = copy.copy(self)
        for name, value in vars(self).items():
            setattr(twin, name, copy.copy(value))
        twin._walk(roots)
        return twin

    def _walk(self, roots: Iterable[object]) -> None:
        first = len(self._objects)
        self._add(roots, -1)
        for at, value in enumerate(islice(self._objects, first, None), first):  # which grows
            cls: type = type(value)
            if (kind := _kind_of(cls)) is not None:
                self._before[at] = kind, kind.read(value)
            self._add(_referents(value), at)
            if type(value) is FunctionType and _package(value.__globals__.get("__name__")) not in _SKIPPED:
                self._add([value.__globals__], at)

    def _add(self, found: Iterable[object], at: int) -> None:
        for each in found:
            if id(each) not in self._known and len(self._objects) < _MOST_WALKED and not _is_skipped(each):
                self._known.add(id(each))
                self._objects.append(each)
                self._found_in.append(at)

    def restore(self, is_left: Callable[[torch.Tensor], bool], built: Collection[nn.Module] = ()) -> None:
        """Put back the containers that have come to hold such tensors, and those that lead to them, and clear caches.

        Args:
            is_left: whether a tensor must not stay.
            built: modules that may keep what they hold.
        """
        passed = self._known | {*map(id, built)}

        def holds(values: Iterable[Any]) -> bool:
            return any(issubclass(type(each), torch.Tensor) and is_left(each) for each in _reached(values, passed))

        written: set[int] = set()
        for at, (kind, before) in self._before.items():
            now = kind.read(self._objects[at])
            is_same = len(now) == len(before) and all(map(is_, now.values(), before.values()))
            if not is_same and holds(value for key, value in now.items() if before.get(key, _MISSING) is not value):
                while at >= 0 and at not in written:
                    written.add(at)
                    at = self._found_in[at]
        for at in written & self._before.keys():
            kind, before = self._before[at]
            now = kind.read(self._objects[at])
            # A module that was imported meanwhile stays.
            modules = {key: value for key, value in now.items() if issubclass(type(value), ModuleType)}
            if not all(before.get(key, _MISSING) is value for key, value in now.items()) or len(now) != len(before):
                kind.write(self._objects[at], {**before, **modules})
        for each in [*self._objects, *gc.get_objects()]:  # which lacks what gc.freeze() froze
            if type(each) is _lru_cache_wrapper and each.cache_info().currsize and holds(gc.get_referents(each)):
                each.cache_clear()


def _reached(values: Iterable[Any], passed: Collection[int]) -> Iterator[Any]:
    """What is reached from values, without the objects whose ids are ``passed``."""
    waiting = [each for each in values if id(each) not in passed]
    seen = {*map(id, waiting)}
    for value in waiting:
        yield value
        if issubclass(type(value), (type, ModuleType)) or len(waiting) > _MOST_SEARCHED:
            continue
        for each in _referents(value):
            if id(each) not in seen and id(each) not in passed:
                seen.add(id(each))
                waiting.append(each)


def holder_of(tensor: torch.Tensor) -> str:
    """Returns the name of a tensor's nearest holder that has one."""
    names = {id(vars(module)): name for name, module in [*sys.modules.items()] if isinstance(module, ModuleType)}
    waiting: list[Any] = [tensor]
    seen = {id(tensor), id(waiting), id(sys._getframe())}
    for value in waiting:
        for each in gc.get_referrers(value):
            if id(each) in seen:
                continue
            seen.add(id(each))
            if id(each) in names:
                return f"'{next(key for key in each if each[key] is value)}' of the module {names[id(each)]}"
            if isinstance(each, (type, FunctionType)):
                return f"{each.__module__}.{each.__qualname__}"
            if isinstance(each, (FrameType, GeneratorType, CoroutineType)):
                code = next(getattr(each, name) for name in ("f_code", "gi_code", "cr_code") if hasattr(each, name))
                return f"{code.co_qualname}, which has not ended ({code.co_filename}:{code.co_firstlineno})"
            if type(each).__module__ not in ("builtins", "collections"):
                return f"an object of the class {type(each).__module__}.{type(each).__qualname__}"
            waiting.append(each)
        if len(waiting) > _MOST_NAMED:
            break
    return f"an object of the class {type(waiting[-1]).__qualname__}"
