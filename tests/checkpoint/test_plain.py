"""Pickles of strangers are data: nothing in them is imported or called, and memory is in proportion to their bytes."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest

from fullshard.checkpoint.plain import Global, Made, Pairs, parse


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


class Harm:
    """What calls a function when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_values_are_what_pickle_makes_of_them(protocol: int) -> None:
    values = [None, True, False, 0, -7, 255, 2**70, 1.5, "text", "ü" * 300]
    values += [(), (1,), (1, 2, 3), (1, 2, 3, 4), [], [1, [2, 3]]]
    values += [[b"", b"abc", b"x" * 70_000]] if protocol >= 3 else []
    for value in values:
        assert parse(pickle.dumps(value, protocol)) == value
    keys = list[Any]()
    found = parse(pickle.dumps({"a": 1, "b": {2: 3}}, protocol), keys.append)
    assert isinstance(found, Pairs)
    assert found == ["a", 1, "b", [2, 3]]
    assert [key for each in keys for key in each] in (["a", "b", 2], [2, "a", "b"], ["a", 2, "b"])
    shared = ["shared"]
    beside = (0, ("x", (1,), (2, 3)), [(4, 5, 6), shared], (7, 8, 9), shared)
    again: Any = parse(pickle.dumps(beside, protocol))
    assert again == beside
    assert again[2][1] is again[4], "one object in several places is one"


def test_an_object_is_its_class_by_name_and_its_state() -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        point, ordered = parse(pickle.dumps([Point(5), OrderedDict(a=1)], protocol))
        assert isinstance(point, Made)
        assert point.function == Global(__name__, "Point")
        assert str(point.function) == f"{__name__}.Point"
        assert point.state == ["x", 5]
        assert (ordered.function, ordered.items) == (Global("collections", "OrderedDict"), ["a", 1])


def test_nothing_is_called(tmp_path: Path) -> None:
    seen = list[Any]()
    found = parse(pickle.dumps(Harm(tmp_path / "made")), seen.append)
    assert not (tmp_path / "made").exists()
    assert (found.function.name, found.args) == ("mkdir", (str(tmp_path / "made"),))
    assert seen == [found]


def test_nothing_is_hashed() -> None:
    """A set of a list would be an error; of numbers chosen for it, it would take a time that grows with the square."""
    assert parse(b"\x80\x04\x8f(]K\x01K\x02\x90.") == [[], 1, 2]


REFUSED = {
    b"": "pickle exhausted",
    b"N": "pickle exhausted before seeing STOP",
    b"\x80\x04\x86.": "takes more values than there are",
    b"\x80\x04K\x01b.": "takes more values than there are|pop from empty|list index",
    b"\x80\x04K\x01}b.": "gives a state to something that is not an object",
    b"\x80\x04K\x01K\x02\x93.": "names a class by something that is not a string",
    b"\x80\x04K\x01K\x02a.": "adds to a int",
    b"\x80\x02\x82\x01.": "opcode EXT1, which plain data does not need",
}


def test_what_is_no_plain_data_is_refused() -> None:
    for data, says in REFUSED.items():
        with pytest.raises((UnpicklingError, ValueError, IndexError), match=says):
            parse(data)


def test_of_objects_beside_others_each_has_its_own_state() -> None:
    seen = list[Any]()
    found: Any = parse(pickle.dumps((0, Point(5)), 2), seen.append)
    assert (found[0], found[1].state) == (0, ["x", 5])
    assert found[1] in seen


def test_what_may_be_hashed_is_visited() -> None:
    seen = list[Any]()
    for data in (b"(K\x01K\x02K\x03K\x04d.", b"\x80\x04(K\x01K\x02K\x03\x91.", b"(NK\x05Q."):
        parse(data, seen.append)
    assert seen[:2] == [[1, 3], [1, 2, 3]], "of a dict and of a frozenset"
    assert seen[2].id == 5


def test_a_name_may_have_spaces_after_the_first() -> None:
    assert parse(b"ca\nb c\n.") == Global("a", "b c")
