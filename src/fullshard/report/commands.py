"""The commands ``fullshard explain`` and ``fullshard fit``, for the model that a function builds.

Owns the arguments, and how the function is found. :mod:`fullshard.report.explain` makes the explanation, and
:mod:`fullshard.report.search` the plan.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import runpy
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from fullshard.report.explain import explain
from fullshard.report.meta_copy import build_on_meta
from fullshard.report.search import DoesNotFitError, fit
from fullshard.report.tables import estimate_text, over_hosts_text
from fullshard.report.values import UnknownValueError, Values
from fullshard.text import bytes_argument, rehearsal_text


def _number(kind: type[float], what: str, is_fine: Callable[[float], bool], text: str) -> float:
    with suppress(ValueError):
        if is_fine(number := kind(text)):
            return number
    raise argparse.ArgumentTypeError(f"expected {what}, got '{text}'")


_above_0 = partial(_number, float, "a number above 0", lambda number: number > 0)
_count = partial(_number, int, "a whole number above 0", lambda number: number > 0)
_from_0 = partial(_number, float, "a number of 0 or more", lambda number: number >= 0)

#: Options of an estimate of time, by the names of the arguments of ``Explanation.estimate``.
_TIMING: dict[str, dict[str, Any]] = {
    "bandwidth": {"type": _above_0, "metavar": "BYTES/S", "help": "bytes that one rank sends each second"},
    "peak_flops": {
        "type": _above_0,
        "metavar": "FLOP/S",
        "help": "peak FLOP/s of one rank's device, in the dtype it uses",
    },
    "efficiency": {
        "type": _above_0,
        "default": 1.0,
        "metavar": "SHARE",
        "help": "the share of the peak that is reached (1.0)",
    },
    "tokens": {"type": _count, "help": "tokens that one rank processes in a step"},
    "latency": {
        "type": _from_0,
        "default": 0.0,
        "metavar": "SECONDS",
        "help": "latency of each step of an exchange (0)",
    },
    "algorithm": {
        "choices": ("ring", "tree"),
        "default": "ring",
        "help": "exchanges of W ranks have W - 1 steps, or log2(W)",
    },
    "node_bandwidth": {
        "type": _above_0,
        "metavar": "BYTES/S",
        "help": "bytes that a node sends to other nodes each second",
    },
    "ranks_per_node": {
        "type": _count,
        "metavar": "RANKS",
        "help": "needed with --node-bandwidth, unless there are --ranks and --hosts",
    },
}


def _value(text: str) -> tuple[str, float]:
    """``FILE.py:LINE=NUMBER``, or a number for all lines, whose line is empty."""
    line, _, number = text.rpartition("=")
    if not line or re.fullmatch(r"[^/]+\.py:\d+", line):
        with suppress(ValueError):
            return line, float(number)
    raise argparse.ArgumentTypeError(f"expected a number or FILE.py:LINE=NUMBER, got '{text}'")


def _values(options: argparse.Namespace) -> Values | None:
    """What ``--values`` say. A number for all lines is refused beside numbers for single lines."""
    given = dict(options.values)
    if "" in given and len(options.values) > 1:
        raise _RefusedOptions("--values takes one number for all lines, or FILE.py:LINE=NUMBER for each line")
    return given.get("", given or None)


def _add_shared(parser: argparse.ArgumentParser, given: str) -> None:
    """Adds the options of both commands; ``given`` is what forward gets beside the model."""
    parser.add_argument("--ranks", type=_count, required=given == "inputs", help="the number of ranks to simulate")
    parser.add_argument(
        "--optimizer-bytes",
        type=_from_0,
        help="bytes of optimizer state for each element (AdamW's: two of the parameters' dtype)",
    )
    parser.add_argument(
        "--loss",
        metavar="FUNCTION",
        help=f"a function of the model and the {given} that returns the loss (forward does)",
    )
    parser.add_argument(
        "--values",
        action="append",
        default=[],
        type=_value,
        metavar="NUMBER",
        help="what forward gets where it reads the value of a tensor: one number, or FILE.py:LINE=NUMBER once for each "
        "line",
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="what each rank computes on, here or not (what is here)"
    )


def add_explain(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fullshard explain``."""
    parser.description = (
        "Shows how a model is cut over any number of ranks, how much memory and communication a step needs, and what "
        "could be better. The function builds the model on the meta device: this needs no memory and no other process."
    )
    parser.add_argument("function", help="the function that builds the model: FILE.py:FUNCTION or MODULE:FUNCTION")
    parser.add_argument("--rank", type=int, default=0, help="the rank whose shards and memory are shown (0)")
    parser.add_argument(
        "--batch",
        metavar="FUNCTION",
        help="the function that returns an example batch of one rank: a tensor, a tuple of arguments or a dict of "
        "keyword arguments of the model's forward. Counts activations and FLOPs on tensors without memory",
    )
    _add_shared(parser, "batch")
    parser.add_argument(
        "--hosts",
        type=_count,
        nargs="+",
        default=[],
        help="on how many hosts these ranks are. With --ranks-per-node in place of --ranks, several numbers may "
        "follow: then a table says for each how long a step takes",
    )
    parser.add_argument(
        "--device-memory",
        type=bytes_argument,
        metavar="SIZE",
        help="the memory of a rank's device, such as 80GB: does it fit?",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes")
    parser.add_argument("--picture", metavar="FILE", help="draw the groups too, as PNG, SVG or PDF; needs matplotlib")
    timing = parser.add_argument_group(
        "estimate of a step's time", "Give --bandwidth and --peak-flops, and --tokens unless there is a --batch."
    )
    for name, about in _TIMING.items():
        timing.add_argument(f"--{name.replace('_', '-')}", **about)
    parser.set_defaults(call=partial(_refusing, "explain", _explain))


def add_fit(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fullshard fit``."""
    parser.description = (
        "Chooses how to shard a model so that a step fits into memory: its groups, what is recomputed, and what stays "
        "whole after forward. Runs in one process, without memory for the model."
    )
    parser.add_argument(
        "function", help="returns the model and an example of its inputs: FILE.py:FUNCTION or MODULE:FUNCTION"
    )
    parser.add_argument("--memory", type=bytes_argument, required=True, metavar="SIZE", help="what a rank may use")
    parser.add_argument(
        "--offload-directory", metavar="DIRECTORY", help="where what does not fit may be on a disk (nothing is)"
    )
    _add_shared(parser, "inputs")
    parser.add_argument("--hosts", type=_count, default=1, help="on how many hosts these ranks are (1)")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON, for Plan.from_json")
    parser.set_defaults(call=partial(_refusing, "fit", _fit))


def _fit(options: argparse.Namespace) -> int:
    model, inputs = build_on_meta(_function(options.function))
    loss = _function(options.loss) if options.loss else None
    asked = {
        name: getattr(options, name)
        for name in ("memory", "ranks", "hosts", "optimizer_bytes", "offload_directory", "device")
    }
    try:
        plan = fit(model, inputs, loss=loss, values=_values(options), **asked)
    except DoesNotFitError as error:
        print(f"fullshard fit: {error}", file=sys.stderr)
        return 1
    print(plan.to_json() if options.json else plan)
    return 0


def _refusing(command: str, call: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """The status of a command, 2 if its options make no sense or do not say what forward reads."""
    try:
        return call(options)
    except _RefusedOptions as error:
        why = str(error)
    except RuntimeError as error:
        if not isinstance(error.__cause__, UnknownValueError):
            raise
        why = f"{error.__cause__}: here --values FILE.py:LINE=NUMBER, or --values NUMBER"
    print(f"fullshard {command}: {why}", file=sys.stderr)
    return 2


class _RefusedOptions(Exception):
    """Options that make no sense. The message is for the user."""


def _explain(options: argparse.Namespace) -> int:
    needed = ["bandwidth", "peak_flops", *(() if options.batch else ("tokens",))]
    missing = [name for name in needed if getattr(options, name) is None]
    timing = {name: getattr(options, name) for name in _TIMING}
    is_timed = any(timing[name] is not None for name in ("bandwidth", "peak_flops", "tokens", "node_bandwidth"))
    if is_timed and missing:
        raise _RefusedOptions(f"an estimate needs --{' and --'.join(missing)} too".replace("_", "-"))
    if options.ranks is None and not (options.hosts and options.ranks_per_node):
        raise _RefusedOptions("--ranks is missing, or --hosts and --ranks-per-node")
    if options.ranks is not None and len(options.hosts) > 1:
        raise _RefusedOptions("several numbers of --hosts need --ranks-per-node in place of --ranks")
    if len(options.hosts) > 1 and (missing or options.picture):
        lacks = f"needs --{' and --'.join(missing)}" if missing else "has no --picture"
        raise _RefusedOptions(f"a table of several numbers of --hosts {lacks}".replace("peak_flops", "peak-flops"))
    places = options.hosts or [None]
    options.ranks = options.ranks or options.ranks_per_node * places[0]
    if not 0 <= options.rank < options.ranks:
        raise _RefusedOptions(
            f"--rank {options.rank} is not one of {options.ranks} ranks, which are 0 to {options.ranks - 1}"
        )
    if options.loss and not options.batch:
        raise _RefusedOptions("--loss needs --batch too")
    build = _function(options.function)
    loss = _function(options.loss) if options.loss else None
    batch = _function(options.batch)() if options.batch else None
    asked = {name: getattr(options, name) for name in ("rank", "optimizer_bytes", "device_memory", "device")}
    asked |= {"batch": batch, "loss": loss, "values": _values(options)}
    if len(places) > 1:
        here = options.ranks_per_node
        every = [explain(build, ranks=hosts * here, hosts=hosts, **asked) for hosts in options.hosts]
        rows = [(hosts, here, each.estimate(**timing)) for hosts, each in zip(options.hosts, every, strict=True)]
        as_data = [{"hosts": hosts, "ranks_per_host": here, **asdict(estimate)} for hosts, _, estimate in rows]
        print(json.dumps(as_data, indent=1) if options.json else over_hosts_text(rows))
        return 0
    try:
        found = explain(build, ranks=options.ranks, hosts=places[0], **asked)
    except ValueError as error:
        raise _RefusedOptions(str(error)) from error
    program, _, _ = options.function.rpartition(":")
    program = program if program.endswith(".py") else f"-m {program}"
    given = options.bandwidth or 0.0, options.latency
    found = replace(found, rehearsal=rehearsal_text(options.ranks, options.rank, program, *given))
    try:
        estimate = found.estimate(**timing) if is_timed else None
    except ValueError as error:
        raise _RefusedOptions(str(error)) from error
    if options.json:
        print(json.dumps(found.as_dict() | ({"estimate": asdict(estimate)} if estimate else {}), indent=1))
    else:
        print(f"{found}\n\n{estimate_text(estimate)}" if estimate else found)
    if options.picture:
        try:
            found.picture(options.picture)
        except ImportError as error:
            needs = "it needs matplotlib: pip install 'fullshard[report]'"
            raise _RefusedOptions(f"{options.picture} is not drawn: {needs} ({error})") from error
        except (OSError, ValueError) as error:
            raise _RefusedOptions(f"{options.picture} cannot be drawn: {error}") from error
    return 0


def _function(text: str) -> Callable[..., Any]:
    """The function that ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION`` names."""
    try:
        return _found(text)
    except (OSError, ImportError, LookupError, AttributeError) as error:
        raise _RefusedOptions(f"{text} names no function: {error}") from error


def _found(text: str) -> Callable[..., Any]:
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
