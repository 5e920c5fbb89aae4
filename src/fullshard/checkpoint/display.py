"""The output of the commands: tables, JSON, values, and progress (by tqdm)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tqdm import tqdm

from fullshard.checkpoint.blocks import CorruptCheckpointError, printable
from fullshard.checkpoint.reader import Checkpoint
from fullshard.text import bytes_text, table

#: Only values with fewer stored bytes are shown.
_SHORT = 1 << 16


def value_of(checkpoint: Checkpoint, name: str) -> Any:
    """A value that is not a tensor, in a form for JSON. A value that is large or cannot be read is described
    instead."""
    stored = checkpoint.manifest.objects[name]
    try:
        return _shown(checkpoint.value(name)) if stored.length < _SHORT else f"({bytes_text(stored.length)})"
    except CorruptCheckpointError as error:
        return f"({error})"
    except RecursionError:
        return f"({bytes_text(stored.length)} in one another)"


def _shown(value: Any) -> Any:
    """A copy of nested dicts and lists. One object may occur in them any number of times, so the copy may be much
    larger than the value: then a RecursionError is raised."""
    remaining = _SHORT

    def copy(value: Any, depth: int) -> Any:
        nonlocal remaining
        remaining -= 1
        if remaining < 0 or depth > 64:
            raise RecursionError
        if isinstance(value, dict):
            return {key if type(key) in (int, bool, float) else str(key): copy(value[key], depth + 1) for key in value}
        if type(value) in (list, tuple):
            return type(value)(copy(each, depth + 1) for each in value)
        return hex(value) if type(value) is int and value.bit_length() > 256 else value

    return copy(value, 0)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, default=str))


def print_lines(*lines: object) -> None:
    """Prints lines. Names and values in them come from files, so unprintable characters are replaced."""
    print(*(printable(str(line)) for line in lines), sep="\n")


def print_table(columns: Sequence[str], align: str, rows: Iterable[Iterable[object]]) -> None:
    """Prints rows under names of columns; ``align`` has ``l`` or ``r`` for each column. Names and values come from
    files, so unprintable characters, such as the escape sequences of terminals, are replaced."""
    cells = [["-" if cell is None else printable(" ".join(str(cell).split())) for cell in row] for row in rows]
    print(table(columns, cells, align))


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], object]]:
    """Shows a progress bar in a terminal. Yields a function to call with the number of bytes done."""
    options: dict[str, Any] = {"unit": "iB", "unit_scale": True, "unit_divisor": 1024, "leave": False}
    with tqdm(desc=what, total=total, disable=None, **options) as bar:  # None: unless in a terminal
        yield bar.update
