"""Untrusted pickles as plain data: nothing that they name is imported, called, or hashed.

A call or an object becomes a :class:`Made`, and a dict becomes a list of pairs. So a pickle needs memory and time in
proportion to its bytes, whatever it contains. Readers use only what they know, and check types.
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Callable
from pickle import UnpicklingError
from typing import Any, NamedTuple


class Global(NamedTuple):
    """A name in a pickle: a class, a function or a dtype."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Pairs(list[Any]):
    """The keys and the values of a dict, alternating."""


class Made:
    """A call that was not made, or an object that was not created. ``state`` is the state that the object would get."""

    __slots__ = ("args", "function", "items", "state")

    def __init__(self, function: Any, args: Any) -> None:
        self.function, self.args, self.state, self.items = function, args, None, list[Any]()


class PlainTensor(NamedTuple):
    """A reference by a persistent id, such as the storage of a tensor."""

    id: Any


#: Opcodes whose argument is the value.
_LITERALS = re.compile(
    "(BIN)?INT[12]?|LONG[14]?|(BIN)?FLOAT|(SHORT_)?(BIN)?(STRING|UNICODE8?|BYTES8?)|BYTEARRAY8"
).fullmatch
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_PUTS, _GETS = ("PUT", "BINPUT", "LONG_BINPUT"), ("GET", "BINGET", "LONG_BINGET")
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MAKES = {"LIST": list, "TUPLE": tuple, "DICT": Pairs, "FROZENSET": tuple}
_EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": Pairs, "EMPTY_SET": list}


def parse(data: bytes, visit: Callable[[Any], object] = lambda _: None) -> Any:
    """The value of a pickle. Raises some error if it is not a pickle of plain data.

    Args:
        visit: is called with each :class:`Made`, each :class:`Stored`, and each list of keys.
    """
    stack: list[Any] = []
    marks: list[list[Any]] = []
    memo: dict[int, Any] = {}
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if _LITERALS(name):
            stack.append(argument)
        elif name in _PUTS:
            memo[int(argument)] = stack[-1]  # type: ignore[arg-type]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in _GETS:
            stack.append(memo[int(argument)])  # type: ignore[arg-type]
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "MARK":
            marks.append(stack)
            stack = []
        elif name in _TUPLES:
            stack[-_TUPLES[name] :] = [tuple(_top(stack, _TUPLES[name]))]
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in _MAKES:
            items, stack = stack, marks.pop()
            stack.append(_MAKES[name](items))
            if name in ("DICT", "FROZENSET"):
                visit(items[:: 2 if name == "DICT" else 1])
        elif name in ("APPEND", "SETITEM"):
            items = _pop(stack, 1 if name == "APPEND" else 2)
            visit(_add(stack[-1], items))
        elif name in ("APPENDS", "SETITEMS", "ADDITEMS"):
            items, stack = stack, marks.pop()
            visit(_add(stack[-1], items))
        elif name == "GLOBAL":
            stack.append(Global(*str(argument).split(" ", 1)))
        elif name == "STACK_GLOBAL":
            module, attribute = _pop(stack, 2)
            if not type(module) is type(attribute) is str:
                raise UnpicklingError("it names a class by something that is not a string")
            stack.append(Global(module, attribute))
        elif name in ("REDUCE", "NEWOBJ"):
            stack.append(Made(*_pop(stack, 2)))
            visit(stack[-1])
        elif name == "BUILD":
            state = stack.pop()
            if not isinstance(stack[-1], Made):
                raise UnpicklingError("it gives a state to something that is not an object")
            stack[-1].state = state
        elif name == "BINPERSID":
            stack.append(PlainTensor(stack.pop()))
            visit(stack[-1])
        elif name == "STOP":
            return stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise UnpicklingError(f"it has the opcode {name}, which plain data does not need")
    raise UnpicklingError("it does not end")


def _top(stack: list[Any], count: int) -> list[Any]:
    if len(stack) < count:
        raise UnpicklingError("it takes more values than there are")
    return stack[-count:]


def _pop(stack: list[Any], count: int) -> list[Any]:
    items = _top(stack, count)
    del stack[-count:]
    return items


def _add(container: Any, items: list[Any]) -> list[Any]:
    """Adds items to a list, a dict, a set or an object. Returns the items that may be keys."""
    if not isinstance(container, (list, Made)):
        raise UnpicklingError(f"it adds to a {type(container).__name__}")
    (container.items if isinstance(container, Made) else container).extend(items)
    return items[::2] if isinstance(container, Pairs) else items
