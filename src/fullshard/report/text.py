"""Plain text for people: sizes, times, shapes, and aligned tables."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

import torch

_WIDTH = 110


def bytes_text(nbytes: float) -> str:
    """A size in bytes, with a unit that is a power of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(nbytes) < 1024 or unit == "TiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError


def seconds_text(seconds: float) -> str:
    """A time with three digits."""
    if seconds >= 999.5:
        return f"{seconds:,.0f} s"
    size, unit = (1, "s") if seconds >= 0.9995 else (1e-3, "ms") if seconds >= 0.9995e-3 else (1e-6, "us")
    return f"{seconds / size:.3g} {unit}"


def quantity_text(value: float, unit: str) -> str:
    """A quantity with three digits, and a unit with a prefix that is a power of 1000."""
    power = next((power for power in range(5) if abs(value) < 999.5 * 1000**power), 5)
    return f"{value / 1000**power:.3g} {('', 'k', 'M', 'G', 'T', 'P')[power]}{unit}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shape_text(sizes: Iterable[int]) -> str:
    return " x ".join(map(str, sizes)) or "scalar"


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def counted(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def wrapped(text: str, indent: str = "  ") -> str:
    """A paragraph, wrapped to lines of a fixed width; all lines but the first are indented. A number and its unit stay
    on one line."""
    unbroken = re.sub(r"(?<=\d) (?=x \d|(?:B|[KMGT]iB|%|m?s|us)\b|%)|(?<=\d x) (?=\d)", "\0", text)
    return textwrap.fill(unbroken, _WIDTH, subsequent_indent=indent).replace("\0", " ")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first is left-aligned, the others are right-aligned."""
    widths = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        return "  ".join(cells).rstrip()

    return "\n".join(map(line, [head, ["-" * width for width in widths], *rows]))
