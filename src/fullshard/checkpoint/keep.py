"""Policies that say which checkpoints stay when others are removed. The names are Orbax's.

A checkpoint stays if any policy keeps it. :mod:`fullshard.checkpoint.removal` asks them, and removes the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import isnan
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from fullshard.policies import warn


class CheckpointInfo(NamedTuple):
    """What a policy knows of a checkpoint.

    Attributes:
        step: its step.
        time: when it was saved, in UTC; ``None`` if an older version saved it.
        metrics: the metrics that were given to :func:`save`.
    """

    step: int
    time: datetime | None
    metrics: Mapping[str, float]


@runtime_checkable
class PreservationPolicy(Protocol):
    """The interface of policies. Any class with this method is one."""

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo]) -> Sequence[bool]:
        """Returns for each of ``checkpoints`` whether it stays. They are whole, and ordered from the newest on.

        Ranks: the first rank; for in-memory replicas, the first rank of each host.
        """


class _Counted:
    n: int

    def __post_init__(self) -> None:
        if not isinstance(self.n, int) or self.n < 1:
            raise ValueError(f"{type(self).__name__} has n={self.n!r}; expected an integer of 1 or more")


@dataclass(frozen=True)
class LatestN(_Counted):
    """Keeps the ``n`` newest checkpoints.

    Raises:
        ValueError: ``n`` is not an integer of 1 or more.
    """

    n: int

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo]) -> list[bool]:
        return [number < self.n for number in range(len(checkpoints))]


@dataclass(frozen=True)
class EveryNSteps(_Counted):
    """Keeps the checkpoints whose step is a multiple of ``n``.

    Raises:
        ValueError: ``n`` is not an integer of 1 or more.
    """

    n: int

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo]) -> list[bool]:
        return [each.step % self.n == 0 for each in checkpoints]


@dataclass(frozen=True)
class BestN(_Counted):
    """Keeps the ``n`` checkpoints with the lowest value of a ``metric``, or the highest with ``mode="max"``. Of equal
    values, the newer is kept. No checkpoint is kept for a NaN.

    If no checkpoint has the metric, all stay, and a warning says so.

    Raises:
        ValueError: ``n`` is not an integer of 1 or more, or ``mode`` is neither "min" nor "max".
    """

    metric: str
    n: int
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in ("min", "max"):
            raise ValueError(f"BestN has mode={self.mode!r}; expected 'min' or 'max'")

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo]) -> list[bool]:
        if not any(self.metric in each.metrics for each in checkpoints):
            known = sorted({name for each in checkpoints for name in each.metrics})
            warn(
                f"no checkpoint has the metric '{self.metric}', only {known}, so {self} keeps all: give it to save(), "
                f"as in metrics={{'{self.metric}': value}}"
            )
            return [True] * len(checkpoints)
        sign = 1 if self.mode == "min" else -1
        values = [sign * each.metrics.get(self.metric, float("nan")) for each in checkpoints]
        best = sorted((value, number) for number, value in enumerate(values) if not isnan(value))[: self.n]
        return [(value, number) in best for number, value in enumerate(values)]


@dataclass(frozen=True)
class NewerThan:
    """Keeps the checkpoints that were saved less than ``age`` ago, and those of which the time is not known.

    Raises:
        ValueError: ``age`` is not a timedelta of more than 0.
    """

    age: timedelta

    def __post_init__(self) -> None:
        if not isinstance(self.age, timedelta) or self.age <= timedelta():
            raise ValueError(f"NewerThan has age={self.age!r}; expected a datetime.timedelta of more than 0")

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo]) -> list[bool]:
        now = datetime.now(UTC)
        return [each.time is None or now - each.time < self.age for each in checkpoints]


def checked_policies(keep_last: int | None, keep: Sequence[PreservationPolicy] | None) -> list[PreservationPolicy]:
    """The policies that were given to a save; none if all checkpoints stay. Raises ValueError or TypeError."""
    if keep_last is not None and keep is not None:
        raise ValueError(f"keep_last={keep_last} and keep are both given: leave out keep_last, or add LatestN to keep")
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}; expected None or how many to keep, 1 or more")
    if keep is None:
        return [] if keep_last is None else [LatestN(keep_last)]
    if not isinstance(keep, Sequence) or any(
        isinstance(each, type) or not isinstance(each, PreservationPolicy) for each in keep
    ):
        raise TypeError(f"keep is {keep!r}; expected a list of policies such as [LatestN(3)]")
    if not keep:
        raise ValueError("keep is empty; expected policies, or None to keep all checkpoints")
    return [*keep]


def checked_metrics(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """The metrics that were given to a save. Raises TypeError."""
    try:
        return {str(name): float(value) for name, value in dict(metrics or {}).items()}
    except (TypeError, ValueError) as error:
        raise TypeError(f"metrics are {metrics!r}; expected a dict of numbers by name") from error
