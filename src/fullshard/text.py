"""Plain text for people: sizes, times, shapes, and aligned tables (by tabulate)."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence

import torch
from tabulate import tabulate

from fullshard.comm.transport import DIRECTIONS, Direction, Wire
from fullshard.wire_policy import WirePolicy

#: The width of wrapped text, in letters.
WIDTH = 110
#: The units of sizes in bytes, without the letter B.
_UNITS = {"": 1}
_UNITS |= {prefix: 1000**power for power, prefix in enumerate("kMGT", 1)}
_UNITS |= {f"{prefix}i": 1024**power for power, prefix in enumerate("KMGT", 1)}
_BY_TEXT = {unit.lower(): size for unit, size in _UNITS.items()}


def bytes_text(nbytes: float) -> str:
    """A size in bytes, with a unit that is a power of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(nbytes) < 1024 or unit == "TiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError


def bytes_of(size: float | str) -> int:
    """Bytes from a number of bytes, or from text such as ``"80GB"`` (80 * 10**9) or ``"80 GiB"`` (80 * 2**30).

    Raises:
        ValueError: ``size`` is not positive, or not a number with one of these units.
    """
    text = str(size).strip()
    found = re.fullmatch(r"([\d.]+(?:[eE]\+?\d+)?)\s*([A-Za-z]*)", text, re.ASCII)
    try:
        number = float(found[1]) * _BY_TEXT[found[2].lower().removesuffix("b")] if found else 0.0
    except (ValueError, KeyError):
        number = 0.0
    if not 0.5 <= number < float("inf"):
        units = ", ".join(f"{unit}B" for unit in _UNITS)
        raise ValueError(f"expected bytes, or a number with one of the units {units}, such as '80GB', got {text!r}")
    return round(number)


def bytes_argument(text: str) -> int:
    """:func:`bytes_of` for an argument of a command.

    Raises:
        argparse.ArgumentTypeError: it is no size.
    """
    try:
        return bytes_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


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


def wrapped(text: str, indent: str = "  ", width: int = WIDTH) -> str:
    """A paragraph, wrapped to lines of a fixed width; all lines but the first are indented. A number and its unit stay
    on one line."""
    unbroken = re.sub(r"(?<=\d) (?=x \d|(?:B|[KMGT]iB|%|m?s|us)\b|%)|(?<=\d x) (?=\d)", "\0", text)
    return textwrap.fill(unbroken, width, subsequent_indent=indent).replace("\0", " ")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], align: str = "") -> str:
    """Aligned columns under their names; without names, only the columns.

    Args:
        align: a letter for each column: ``l`` for left, ``r`` for right. If not given, the first column is left-aligned
            and the others are right-aligned.
    """
    letters = align or "l" + "r" * (len(head) - 1)
    text = tabulate(
        rows,
        head,
        tablefmt="simple" if head else "plain",
        disable_numparse=True,
        preserve_whitespace=True,
        colalign=["left" if letter == "l" else "right" for letter in letters] if rows else None,
    )
    return "\n".join(line.rstrip() for line in text.split("\n"))


def rehearsal_text(ranks: int, rank: int = 0, program: str = "", bandwidth: float = 0.0, latency: float = 0.0) -> str:
    """The command that measures a step of one rank of many. In capitals is what only its user knows."""
    number, seconds = f" --rank {rank}" if rank else "", f" --latency {latency * 1e6:g}us" if latency else ""
    rate = f"{bandwidth / 1e9:g}GB/s" if bandwidth else "RATE"
    return f"fullshard rehearse --ranks {ranks}{number} --bandwidth {rate}{seconds} {program or 'PROGRAM.py'}"


def wire_text(wire: Callable[[Direction, bool], Wire | None], inner: WirePolicy, outer: WirePolicy) -> str:
    """How messages are encoded, with a group's ``wire``; empty if none are."""
    policies = ((inner, False, ""), (outer, True, " between replicas"))
    return "; ".join(
        each.text + where for each, is_outer, where in policies if any(wire(kind, is_outer) for kind in DIRECTIONS)
    )
