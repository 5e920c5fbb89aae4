"""The command ``fullshard rehearse``: starts a program as one rank of many, beside torch's FSDP if asked, and prints.

Owns the arguments and the report. :mod:`fullshard.rehearsal.rank` runs the program in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fullshard.text import bytes_of, bytes_text, counted, quantity_text, seconds_text, table

#: The environment variable with what is asked of the process that runs the program, as JSON.
ASKED = "FULLSHARD_REHEARSAL"
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
#: Rows of the report: what is found, and how it is printed.
_ROWS = {
    "step, seconds": seconds_text,
    "host, seconds": seconds_text,
    "waited, seconds": seconds_text,
    "collectives, seconds": seconds_text,
    "memory between steps, bytes": bytes_text,
    "memory at the peak, bytes": bytes_text,
    "memory reserved, bytes": bytes_text,
}


def seconds_argument(text: str) -> float:
    """Seconds from text such as ``20us``."""
    found = re.fullmatch(r"([\d.]+(?:e-?\d+)?)\s*(s|ms|us|ns)", text.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"expected a time with a unit, such as 20us, got '{text}'")
    return float(found[1]) * _SECONDS[found[2]]


def rate_argument(text: str) -> int:
    """Bytes in a second from text such as ``45GB/s`` or ``400Gbit/s``."""
    rate, is_rate, _ = text.strip().partition("/s")
    try:
        if not is_rate:
            raise ValueError
        return bytes_of(rate.removesuffix("bit")) // 8 if rate.endswith("bit") else bytes_of(rate)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected bytes or bits per second, such as 45GB/s, got '{text}'") from None


def add_rehearse(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fullshard rehearse``."""
    parser.description = (
        "Runs an unmodified program as one rank of many, on one device and over a simulated network, and measures "
        "its steps: time, memory, collectives, and what is waited for."
    )
    parser.add_argument("--ranks", type=int, required=True, help="the number of ranks to rehearse")
    parser.add_argument("--rank", type=int, default=0, help="the rank that this process is (0)")
    parser.add_argument("--bandwidth", type=rate_argument, required=True, help="of a rank's network: 45GB/s, 400Gbit/s")
    parser.add_argument("--latency", type=seconds_argument, default=0.0, help="of a collective: 20us (0)")
    parser.add_argument("--steps", type=int, default=5, help="steps to time (5), after two that are not")
    parser.add_argument("--against", choices=("torch",), help="run the program with torch's FSDP too, and print ratios")
    parser.add_argument(
        "--json", action="store_true", help="print JSON; what the program prints goes to the error output"
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="the program is a module, as with python -m")
    parser.add_argument("program", help="a Python file, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's own arguments")
    parser.epilog = "Exit codes: 0: measured; 1: the program failed; 2: the arguments make no sense."
    parser.set_defaults(call=_rehearse)


def _rehearse(options: argparse.Namespace) -> int:
    """Runs the command."""
    if not 0 <= options.rank < options.ranks or options.steps < 1:
        what = f"rank {options.rank} of {options.ranks}, {options.steps} steps"
        print(f"fullshard rehearse: {what}: give a rank below --ranks, and 1 step or more", file=sys.stderr)
        return 2
    if not options.is_module and not Path(options.program).is_file():
        print(f"fullshard rehearse: no file {options.program}: give the program that each rank runs", file=sys.stderr)
        return 2
    found: dict[str, dict[str, Any]] = {}
    for library in ("fullshard", *filter(None, [options.against])):
        print(f"fullshard rehearse: {library}, rank {options.rank} of {options.ranks} ...", file=sys.stderr, flush=True)
        if (measured := _measure(library, options)) is None:
            print(f"fullshard rehearse: the program failed with {library}: see above", file=sys.stderr)
            return 1
        found[library] = measured
    print(json.dumps(found, indent=1) if options.json else report(found, options.steps), flush=True)
    return 0


def _measure(library: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """What the program takes with a library; ``None`` if it failed."""
    with tempfile.TemporaryDirectory(prefix="fullshard-rehearsal-") as folder:
        names = ("ranks", "rank", "bandwidth", "latency", "steps", "program", "arguments", "is_module")
        asked = {name: getattr(options, name) for name in names}
        asked |= {"library": library, "results": str(results := Path(folder, "results.json"))}
        environment = {**os.environ, ASKED: json.dumps(asked), "FULLSHARD_PATCH": "0"}
        output = sys.stderr.fileno() if options.json else None
        subprocess.run([sys.executable, "-m", "fullshard.rehearsal.rank"], env=environment, stdout=output, check=False)
        return json.loads(results.read_text(encoding="utf-8")) if results.exists() else None


def report(found: dict[str, dict[str, Any]], steps: int) -> str:
    """What was found by library, as text."""
    (first, *others), rows = found.values(), []
    for name, text in _ROWS.items():
        if name in first:
            row = [name.rpartition(",")[0], *(text(each[name]) for each in found.values())]
            rows.append([*row, *(f"{first[name] / each[name]:.2f}" for each in others if each[name])])
    kinds = dict.fromkeys(kind for each in found.values() for kind in each["collectives"])
    for kind in kinds:
        each_kind = (each["collectives"].get(kind, {"count": 0, "bytes": 0}) for each in found.values())
        texts = [f"{each['count']:.0f}, {quantity_text(each['bytes'], 'B')}" for each in each_kind]
        rows.append([kind, *texts, *("" for _ in others)])
    lines = [f"One step (median of {counted(steps, 'step')}) on {first['device']}", ""]
    lines.append(table(["", *found, *("ratio" for _ in others)], rows))
    for library, each in found.items():
        for lane in each.get("streams", ()):
            times = [
                f"{name} {seconds_text(lane[f'{name}, seconds'])}" for name in ("busy", "network", "waits", "span")
            ]
            lines += [
                "",
                f"{library}, stream {lane['stream']}: {', '.join([counted(lane['kernels'], 'kernel'), *times])}",
            ]
            lines += [f"  waits {seconds_text(gap['seconds'])} before {gap['before']}" for gap in lane["longest waits"]]
        if waits := each["waits"][:5]:
            lines += ["", f"{library} waited for"]
            lines += [
                f"  {each['what']} {each['group'] or '(root)'}: {seconds_text(each['seconds'])}" for each in waits
            ]
        if why := each["network in Python"]:
            cost = seconds_text(each["seconds of a call"])
            lines += ["", f"{library}: the network is simulated in Python, and each call takes the host {cost} ({why})"]
    return "\n".join(lines)
