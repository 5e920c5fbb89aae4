"""From samples to figures: medians, quartiles, and ratios that are taken round by round."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

Spread = tuple[float, float, float]
"""A median, the lower quartile and the upper one."""


def spread(values: Sequence[float]) -> Spread:
    ordered = sorted(values)
    quarter = len(ordered) // 4
    return median(ordered), ordered[quarter], ordered[-1 - quarter]


def middle(values: Sequence[float]) -> float:
    return float(median(values)) if values else float("nan")


def ratio(contenders: dict[str, Any], what: str, name: str, base: str) -> Spread:
    """A contender's times over those of another, both of the same round."""
    pairs = zip(contenders[name][what], contenders[base][what], strict=True)
    return spread([ours / theirs for ours, theirs in pairs])


def sockets(contenders: dict[str, Any]) -> str:
    """The name of fullshard over sockets, whether or not that is its default."""
    return next(name for name, values in contenders.items() if values["transport"] == "p2p")


def least(values: Sequence[float]) -> float:
    """Of counts that repeat, and to which others only add, the one with the least of others in it."""
    return float(min(values)) if values else float("nan")


def exact(value: float) -> Spread:
    """A count, which has no spread."""
    return value, value, value
