"""Making a program that fails smaller: whatever can be left out, and fails all the same, is left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from tests.fuzz.actions import Train
from tests.fuzz.pool import Fuzzer, Result
from tests.fuzz.programs import Program
from tests.fuzz.sharding import Sharding

_MOST_RUNS = 150


def shrink(fuzzer: Fuzzer, result: Result) -> Result:
    """The smallest program found that still fails; a program that cannot be run any more is no smaller one."""
    runs = 0
    smaller = True
    while smaller and runs < _MOST_RUNS:
        smaller = False
        for candidate in _candidates(result.program):
            runs += 1
            try:
                found = fuzzer.run(candidate)
            except Exception:  # a program that does not fit together
                continue
            if found.is_finding and found.kind == result.kind and _same(found.text, result.text):
                result, smaller = found, True
                break
    return result


def _same(text: str, other: str) -> bool:
    """Whether two programs seem to fail alike: with an error of the same type, or without one."""
    errors = [line.split(": ")[2:3] for line in (text.splitlines()[0], other.splitlines()[0])]
    return errors[0] == errors[1] or not text.startswith("rank")


def _candidates(program: Program) -> Iterator[Program]:
    for at in range(len(program.actions)):
        yield replace(program, actions=program.actions[:at] + program.actions[at + 1 :])
    model, sharding = program.model, program.sharding
    for at, layer in enumerate(model.layers):
        if len(model.layers) > 1 and all(later.same is None and later.tie is None for later in model.layers):
            layers = model.layers[:at] + model.layers[at + 1 :]
            groups = tuple(
                replace(group, paths=paths) for group in sharding.groups if (paths := _renumbered(group.paths, at))
            )
            yield replace(program, model=replace(model, layers=layers), sharding=replace(sharding, groups=groups))
        for simpler in _simpler(layer, ("pack", "frozen", "checkpoint", "repeat", "branch", "same", "tie")):
            yield replace(program, model=replace(model, layers=(*model.layers[:at], simpler, *model.layers[at + 1 :])))
    for at in range(len(sharding.groups) - 1):
        groups = sharding.groups[:at] + sharding.groups[at + 1 :]
        yield replace(program, sharding=replace(sharding, groups=groups, by="calls"))
    for simpler in _simpler(model, ("head", "embedding", "pack", "scale", "spare")):
        yield replace(program, model=simpler)
    names = [
        field.name for field in fields(Sharding) if field.name not in ("api", "groups", "original", "mesh", "strategy")
    ]
    for simpler in _simpler(sharding, tuple(names)):
        yield replace(program, sharding=simpler)
    for at, action in enumerate(program.actions):
        if isinstance(action, Train):
            for simpler in _simpler(action, tuple(field.name for field in fields(action))):
                yield replace(program, actions=(*program.actions[:at], simpler, *program.actions[at + 1 :]))
    if program.world > 2:
        yield replace(program, world=2)
    if program.optimizer != "sgd":
        yield replace(program, optimizer="sgd")


def _simpler(value: Any, names: tuple[str, ...]) -> Iterator[Any]:
    for field in fields(value):
        if field.name in names and getattr(value, field.name) != field.default:
            yield replace(value, **{field.name: field.default})


def _renumbered(paths: tuple[str, ...], without: int) -> tuple[str, ...]:
    """Paths of a model that lost a cell."""
    kept = []
    for path in paths:
        parts = path.split(".")
        if parts[0] == "cells":
            number = int(parts[1])
            if number == without:
                continue
            parts[1] = str(number - (number > without))
        kept.append(".".join(parts))
    return tuple(kept)
