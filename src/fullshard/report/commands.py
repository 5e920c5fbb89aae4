"""The command ``fullshard explain``: explains what sharding does to the model that a function builds.

Owns the arguments, and how the function is found. :mod:`fullshard.report.explain` makes the explanation.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import runpy
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from torch import nn

from fullshard.report.explain import ADAM, explain
from fullshard.report.tables import estimate_text

_GIVEN = ("bandwidth", "flops", "tokens")


def _above_0(text: str) -> float:
    return _number(text, float, "a number above 0", lambda number: number > 0)


def _count(text: str) -> int:
    return int(_number(text, int, "a whole number above 0", lambda number: number > 0))


def _from_0(text: str) -> float:
    return _number(text, float, "a number that is not below 0", lambda number: number >= 0)


def _number(text: str, kind: type[float], what: str, is_fine: Callable[[float], bool]) -> float:
    with suppress(ValueError):
        if is_fine(number := kind(text)):
            return number
    raise argparse.ArgumentTypeError(f"expected {what}, got '{text}'")


def add_explain(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fullshard explain``."""
    parser.description = (
        "Shows how a model is cut over any number of ranks, how much memory and traffic a step needs, and what could "
        "be better. The function builds the model on the meta device: this needs no memory and no other process."
    )
    parser.add_argument("function", help="the function that builds the model: FILE.py:FUNCTION or MODULE:FUNCTION")
    parser.add_argument("--ranks", type=_count, required=True, help="the number of ranks to simulate")
    parser.add_argument("--rank", type=int, default=0, help="the rank whose shards and memory are shown (0)")
    parser.add_argument(
        "--optimizer-bytes",
        type=_from_0,
        default=ADAM,
        help="bytes of optimizer state for each element (8, as AdamW has)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes")
    parser.add_argument("--picture", metavar="FILE", help="draw the groups too, as PNG, SVG or PDF; needs matplotlib")
    timing = parser.add_argument_group("estimate of a step's time: give bandwidth, flops and tokens")
    timing.add_argument("--bandwidth", type=_above_0, help="bytes that a rank sends each second")
    timing.add_argument("--flops", type=_above_0, help="operations that a rank computes each second")
    timing.add_argument("--tokens", type=_count, help="tokens that a rank processes in a step")
    timing.add_argument("--latency", type=_from_0, default=0.0, help="fixed seconds of each exchange (0)")
    parser.set_defaults(call=_explain)


def _explain(options: argparse.Namespace) -> int:
    missing = [name for name in _GIVEN if getattr(options, name) is None]
    if missing and len(missing) < len(_GIVEN):
        print(f"fullshard explain: an estimate needs --{' and --'.join(missing)} too", file=sys.stderr)
        return 2
    if not 0 <= options.rank < options.ranks:
        message = f"--rank {options.rank} is not one of {options.ranks} ranks, which are 0 to {options.ranks - 1}"
        print(f"fullshard explain: {message}", file=sys.stderr)
        return 2
    try:
        build = _function(options.function)
    except (OSError, ImportError, LookupError, AttributeError) as error:
        print(f"fullshard explain: {options.function} names no function: {error}", file=sys.stderr)
        return 2
    found = explain(build, ranks=options.ranks, rank=options.rank, optimizer_bytes=options.optimizer_bytes)
    given = {name: getattr(options, name) for name in (*_GIVEN, "latency")}
    estimate = None if missing else found.estimate(**given)
    if options.picture:
        try:
            found.picture(options.picture)
        except (ImportError, OSError, ValueError) as error:
            print(f"fullshard explain: {options.picture} cannot be drawn: {error}", file=sys.stderr)
            return 2
    if options.json:
        print(json.dumps(found.as_dict() | ({"estimate": asdict(estimate)} if estimate else {}), indent=1))
        return 0
    print(found)
    if estimate:
        print(f"\n{estimate_text(estimate)}")
    return 0


def _function(text: str) -> Callable[[], nn.Module]:
    """The function that ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION`` names."""
    where, _, name = text.rpartition(":")
    if not where:
        raise LookupError("give FILE.py:FUNCTION or MODULE:FUNCTION")
    if where.endswith(".py"):
        sys.path.insert(0, str(Path(where).resolve().parent))
        found = runpy.run_path(where).get(name)
    else:
        sys.path.insert(0, os.getcwd())
        found = getattr(importlib.import_module(where), name, None)
    if not callable(found):
        raise LookupError(f"{where} has no function '{name}'")
    return found
