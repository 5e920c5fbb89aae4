"""Policies that say which checkpoints stay: each of them, several together, and what a save then leaves."""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fullshard import checkpoint
from fullshard.checkpoint import (
    BestN,
    Checkpoint,
    CheckpointInfo,
    EveryNSteps,
    LatestN,
    NewerThan,
    PreservationPolicy,
    store,
)
from fullshard.checkpoint.manifest import name_of, number_of
from fullshard.checkpoint.removal import reasons_to_stay
from tests.checkpoint.cases import rewrite_manifest, save_at
from tests.checkpoint.stores import HOOKS
from tests.harness import World, ranks

HOUR = timedelta(hours=1)
VALUES = st.none() | st.sampled_from([math.nan, math.inf, -math.inf]) | st.integers(-3, 3).map(float)
POLICIES = st.one_of(
    st.builds(LatestN, st.integers(1, 5)),
    st.builds(EveryNSteps, st.integers(1, 5)),
    st.builds(BestN, st.just("loss"), st.integers(1, 3), st.sampled_from(["min", "max"])),
    st.builds(NewerThan, st.sampled_from([HOUR / 60, 5 * HOUR])),
)


def infos(*losses: float | None, ages: Sequence[timedelta | None] = ()) -> list[CheckpointInfo]:
    """Checkpoints of steps down to 1, with these losses, and saved so long ago."""
    now = datetime.now(UTC)
    times = [None if age is None else now - age for age in ages] or [now] * len(losses)
    return [
        CheckpointInfo(len(losses) - number, time, {} if loss is None else {"loss": loss})
        for number, (loss, time) in enumerate(zip(losses, times, strict=True))
    ]


def kept(policy: PreservationPolicy, checkpoints: Sequence[CheckpointInfo]) -> list[int]:
    """The steps that a policy keeps."""
    stay = policy.should_preserve(checkpoints)
    return [each.step for each, stays in zip(checkpoints, stay, strict=True) if stays]


def save(directory: Any, step: int, loss: float | None = None, **options: Any) -> None:
    metrics = None if loss is None else {"loss": loss}
    checkpoint.save(directory, nn.Linear(2, 2), step=step, metrics=metrics, **options)


def left(directory: Any) -> list[int]:
    """The steps that are there, the newest first."""
    return [number[0] for path in checkpoint.list_checkpoints(directory) if (number := number_of(path.name))]


LOSSES = (5, 1, 3, 1, None, math.nan)


@pytest.mark.parametrize(
    ("policy", "losses", "steps"),
    [
        (LatestN(2), (1, 2, 3), [3, 2]),
        (LatestN(9), (1, 2, 3), [3, 2, 1]),
        (EveryNSteps(2), range(5), [4, 2]),
        (BestN("loss", 1), LOSSES, [5]),
        (BestN("loss", 2), LOSSES, [5, 3]),  # of equal ones the newer
        (BestN("loss", 2, mode="max"), LOSSES, [6, 4]),
        (BestN("loss", 9), LOSSES, [6, 5, 4, 3]),
    ],
    ids=str,
)
def test_a_policy_keeps_the_steps(policy: PreservationPolicy, losses: Any, steps: list[int]) -> None:
    assert kept(policy, infos(*losses)) == steps


def test_without_the_metric_all_are_kept_and_a_warning_says_so() -> None:
    with pytest.warns(UserWarning, match=r"no checkpoint has the metric 'los', only \['loss'\], so BestN.* keeps all"):
        assert kept(BestN("los", 1), infos(5, None)) == [2, 1]


def test_those_that_are_new_or_of_unknown_time_are_kept() -> None:
    assert kept(NewerThan(2 * HOUR), infos(0, 0, 0, ages=[HOUR, 3 * HOUR, None])) == [3, 1]


def test_wrong_arguments_of_policies_are_refused() -> None:
    make: dict[str, Any] = {"LatestN": LatestN, "EveryNSteps": EveryNSteps, "BestN": lambda n: BestN("loss", n)}
    for kind, n in product(make, (0, -1, 2.5, "3")):
        with pytest.raises(ValueError, match=f"{kind} has n={n!r}; expected an integer of 1 or more"):
            make[kind](n)
    with pytest.raises(ValueError, match="mode='lowest'; expected 'min' or 'max'"):
        BestN("loss", 1, mode="lowest")  # type: ignore[arg-type]
    for age in (timedelta(), -HOUR, 60):
        with pytest.raises(ValueError, match=r"NewerThan has age=.*; expected a datetime.timedelta of more than 0"):
            NewerThan(age)  # type: ignore[arg-type]


def test_wrong_arguments_of_a_save_are_refused_before_it_begins(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"keep": []}, ValueError, "keep is empty; expected policies, or None"),
        ({"keep": [LatestN(1)], "keep_last": 1}, ValueError, "keep_last=1 and keep are both given"),
        ({"keep_last": 0}, ValueError, "keep_last is 0"),
        ({"keep": LatestN(1)}, TypeError, r"keep is LatestN\(n=1\); expected a list of policies"),
        ({"keep": [LatestN]}, TypeError, "expected a list of policies"),
        ({"keep": [3]}, TypeError, "expected a list of policies"),
        ({"keep": 3}, TypeError, "expected a list of policies"),
        ({"metrics": {"loss": "low"}}, TypeError, "metrics are .*'low'.*; expected a dict of numbers by name"),
        ({"metrics": {"loss": None}}, TypeError, "expected a dict of numbers by name"),
        ({"metrics": [1.0]}, TypeError, "expected a dict of numbers by name"),
    ]
    for options, error, text in cases:
        with pytest.raises(error, match=text):
            checkpoint.save(tmp_path / "run", nn.Linear(2, 2), step=1, **options)
        assert not (tmp_path / "run").exists()


@given(st.lists(st.tuples(st.integers(0, 99), VALUES, st.none() | st.integers(0, 9))), POLICIES)
def test_a_policy_answers_for_each_checkpoint(each: list[tuple[int, float | None, int | None]], one: Any) -> None:
    now = datetime.now(UTC)
    checkpoints = [
        CheckpointInfo(step, None if age is None else now - age * HOUR, {} if loss is None else {"loss": loss})
        for step, loss, age in each
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no checkpoint has the metric
        stay = one.should_preserve(checkpoints)
    assert len(stay) == len(checkpoints)
    assert set(stay) <= {True, False}
    if isinstance(one, LatestN):
        assert sum(stay) == min(one.n, len(checkpoints))
    if isinstance(one, BestN) and any("loss" in info.metrics for info in checkpoints):
        losses = [info.metrics.get("loss", math.nan) for info in checkpoints]
        assert sum(stay) == min(one.n, sum(not math.isnan(loss) for loss in losses))
        sign = 1 if one.mode == "min" else -1
        assert all(
            sign * mine <= sign * other
            for mine, stays in zip(losses, stay, strict=True)
            for other, goes in zip(losses, stay, strict=True)
            if stays and not goes and not math.isnan(other)
        )


@settings(max_examples=15, deadline=None)
@given(
    st.lists(VALUES, min_size=1, max_size=5),
    st.lists(POLICIES, min_size=1, max_size=3),
    st.sets(st.integers(1, 5)),
    st.randoms(),
)
def test_a_save_leaves_what_any_policy_keeps_the_newest_and_what_is_not_whole(
    losses: list[float | None], keep: list[PreservationPolicy], broken: set[int], random: Any
) -> None:
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no checkpoint has the metric
        root, new = Path(directory), len(losses) + 1
        for step, loss in enumerate(losses, 1):
            save(root, step, loss)
        broken = broken & set(left(root))
        for step in broken:
            next((root / name_of(step)).glob("*.distcp")).unlink()
        now = datetime.now(UTC)
        whole = [
            CheckpointInfo(step, now, {} if loss is None else {"loss": loss})
            for step, loss in enumerate([*losses, 0.0], 1)
            if step not in broken
        ][::-1]
        expected = {new} | broken | {step for policy in keep for step in kept(policy, whole)}
        save(root, new, 0.0, keep=random.sample(keep, len(keep)))
        assert left(root) == sorted(expected, reverse=True)
        assert all(list(Checkpoint(root / name_of(step)).verify()) == [] for step in expected - broken)


def test_reasons_name_the_policies(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, float(step))
    reasons = reasons_to_stay(checkpoint.list_checkpoints(tmp_path), [EveryNSteps(2), BestN("loss", 1)])
    found = {path.name: why for path, why in reasons.items()}
    best = "BestN(metric='loss', n=1, mode='min')"
    assert found == {name_of(3): ["newest"], name_of(2): ["EveryNSteps(n=2)"], name_of(1): [best]}


def test_a_class_of_the_user_is_a_policy(tmp_path: Path) -> None:
    class Odd:
        def should_preserve(self, checkpoints: Sequence[CheckpointInfo]) -> list[bool]:
            return [each.step % 2 == 1 for each in checkpoints]

    for step in range(1, 6):
        save(tmp_path, step, keep=[Odd()])
    assert left(tmp_path) == [5, 3, 1]


def test_a_policy_that_fails_removes_nothing_and_the_save_is_whole(tmp_path: Path) -> None:
    class Wrong:
        def __init__(self, answer: Any) -> None:
            self.answer = answer

        def should_preserve(self, checkpoints: Sequence[CheckpointInfo]) -> Any:
            return self.answer

    save(tmp_path, 1)
    for step, answer in enumerate(([], [False] * 9, None), 2):
        with pytest.warns(UserWarning, match=f"no checkpoint in {tmp_path} was removed"):
            save(tmp_path, step, keep=[LatestN(1), Wrong(answer)])
    assert left(tmp_path) == [4, 3, 2, 1]


def test_the_manifest_has_the_time_and_the_metrics(tmp_path: Path) -> None:
    before = datetime.now(UTC)
    metrics = {"loss": torch.tensor(0.5), "score": 2, "nan": math.nan, "inf": -math.inf}
    path = save_at(tmp_path, nn.Linear(2, 2), step=1, metrics=metrics)
    with Checkpoint(path) as saved:
        manifest = saved.manifest
    assert manifest.time is not None
    assert before <= manifest.time <= datetime.now(UTC)
    assert math.isnan(manifest.metrics.pop("nan"))
    assert manifest.metrics == {"loss": 0.5, "score": 2.0, "inf": -math.inf}


def test_a_manifest_of_an_older_version_has_neither_and_loads(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step, 0.5)
    rewrite_manifest(tmp_path / name_of(1), lambda fields: (fields.pop("time"), fields.pop("metrics")))
    with Checkpoint(tmp_path / name_of(1)) as saved:
        assert (saved.manifest.time, saved.manifest.metrics) == (None, {})
    assert checkpoint.load(tmp_path / name_of(1), nn.Linear(2, 2)) == {"step": 1}
    save(tmp_path, 3, keep=[NewerThan(timedelta(microseconds=1))])
    assert left(tmp_path) == [3, 1]


@ranks(2)
def test_metrics_of_the_first_rank_are_stored(world: World, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint.save(
            tmp_path, nn.Linear(2, 2), step=step, keep=[BestN("loss", 1)], metrics={"loss": step + 10 * world.rank}
        )
    assert left(tmp_path) == [3, 1]
    with Checkpoint(tmp_path / name_of(1)) as saved:
        assert saved.manifest.metrics == {"loss": 1.0}


def test_a_loop_in_a_store_leaves_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PAUSES", (0.001,) * 5)
    url = f"faulty://{tmp_path}/run"
    losses = (5, 2, 4, 3, 1, 6, 7)
    for step, loss in enumerate(losses, 1):
        save(url, step, loss, keep=[LatestN(2), EveryNSteps(3), BestN("loss", 1)])
    assert left(url) == [7, 6, 5, 3]

    def fail(request: str, path: str) -> None:
        if request == "get" and path.endswith("step-00000006/manifest.json"):
            raise ConnectionResetError("no answer")

    HOOKS.append(fail)
    try:
        with pytest.warns(UserWarning, match="run was removed: .*the store failed 6 times"):
            save(url, 8, keep_last=1)
    finally:
        HOOKS.clear()
    assert left(url) == [8, 7, 6, 5, 3]
    save(url, 9, keep_last=1)
    assert left(url) == [9]
