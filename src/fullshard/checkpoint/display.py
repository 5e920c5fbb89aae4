"""The output of the commands: tables, JSON, sizes and progress.

In a terminal, rich (``pip install fullshard[cli]``) draws tables and progress. Elsewhere, or without rich, tables are
plain text and progress is not shown.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any

from fullshard.checkpoint.blocks import CorruptCheckpointError, printable
from fullshard.checkpoint.reader import Checkpoint

#: Only values with fewer stored bytes are shown.
_SHORT = 1 << 16


def size_of(nbytes: float) -> str:
    power = min(4, int(math.log10(max(1, nbytes)) / 3))
    return f"{nbytes / 1000**power:.1f} {' kMGT'[power]}B" if power else f"{nbytes} B"


def parse_size(text: str) -> int:
    if not (found := re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKMGT]?)(i?)B?", text)) or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 500MB or 5GB")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " "))


def value_of(checkpoint: Checkpoint, name: str) -> Any:
    """A value that is not a tensor, in a form for JSON. A value that is large or cannot be read is described
    instead."""
    stored = checkpoint.manifest.objects[name]
    try:
        return _shown(checkpoint.value(name)) if stored.length < _SHORT else f"({size_of(stored.length)})"
    except CorruptCheckpointError as error:
        return f"({error})"
    except RecursionError:
        return f"({size_of(stored.length)} in one another)"


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


def print_table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """Prints rows under names of columns; a column whose name begins with ">" is aligned to the right.
    Names come from files: what is not printable, such as the escape sequences of terminals, is replaced."""
    names = [column.removeprefix(">") for column in columns]
    right = [column.startswith(">") for column in columns]
    cells = [["-" if cell is None else printable(" ".join(str(cell).split())) for cell in row] for row in rows]
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold")
        for name, is_right in zip(names, right, strict=True):
            table.add_column(name, justify="right" if is_right else "left", overflow="fold")
        for line in cells:
            table.add_row(*(Text(cell, "red" if cell.startswith("broken") else "") for cell in line))
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    for line in (names, *cells):
        padded = [
            cell.rjust(width) if r else cell.ljust(width) for cell, width, r in zip(line, widths, right, strict=True)
        ]
        print("  ".join(padded).rstrip())


@cache
def _report_missing_rich() -> None:
    print("rich is not installed, so progress is not shown: pip install 'fullshard[cli]'", file=sys.stderr)


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], object]]:
    """Shows a progress bar if the output is a terminal. Yields a function to call with the number of bytes done."""
    if not sys.stderr.isatty() or not importlib.util.find_spec("rich"):
        if sys.stderr.isatty():
            _report_missing_rich()
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield partial(progress.advance, task)
