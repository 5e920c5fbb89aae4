"""Random bugs in the library: `python -m tests.mutants --count 100 --seed 1 --package checkpoint`.

Each is one small change that the syntax allows: another comparison, a number off by one, a condition negated, a call
left out, two arguments swapped. :mod:`tests.mutations` has the list of chosen bugs, and runs both kinds. What survives
the nearest tests of the quick lane is a claim that nobody tests, or a change that changes nothing.
"""

from __future__ import annotations

import argparse
import ast
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.mutations import ROOT, Mutation, find, nearest

PACKAGES = ("checkpoint", "report", "wrapper", "optim", "compat")
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
_OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any"}


class Change(NamedTuple):
    """One part of a file, from byte ``start`` to ``end``, becomes ``after``."""

    file: str
    line: int
    start: int
    end: int
    after: str


def changes(file: str) -> list[Change]:
    """All that may be changed in a file below `src/fullshard`, in its order."""
    source = (ROOT / "src" / "fullshard" / file).read_bytes()
    begins = [0]
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    found = []
    for node, after in _changed(ast.parse(source)):
        start = begins[node.lineno - 1] + node.col_offset
        end = begins[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        found.append(Change(file, node.lineno, start, end, after))
    return found


def _changed(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Nodes with what each may become. Types, messages and docstrings stay as they are."""
    if isinstance(node, ast.expr):
        yield from ((node, f"({ast.unparse(other)})") for other in _other_expressions(node))
    elif isinstance(node, (ast.AugAssign, ast.Raise, ast.Continue, ast.Break)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Await))
    ):
        yield node, "pass"
    for test in [getattr(node, "test", None), *getattr(node, "ifs", ())]:
        if isinstance(test, (ast.Name, ast.Attribute, ast.Call, ast.NamedExpr)):
            yield test, f"(not ({ast.unparse(test)}))"
    if isinstance(node, (ast.JoinedStr, ast.Raise)) or (isinstance(node, ast.Call) and _name(node.func) == "warn"):
        return
    types = {id(getattr(node, name, None)) for name in ("annotation", "returns")}
    for child in ast.iter_child_nodes(node):
        if id(child) not in types:
            yield from _changed(child)


def _other_expressions(node: ast.expr) -> Iterator[ast.expr]:
    match node:
        case ast.Compare(left, [op, *ops], comparators):
            yield ast.Compare(left, [_COMPARISONS[type(op)](), *ops], comparators)
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            yield ast.BinOp(left, _OPERATORS[type(op)](), right)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
            yield ast.BoolOp(op, values[1:]) if len(values) > 2 else values[1]
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.IfExp(test, body, other):
            yield ast.IfExp(test, other, body)
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.Call(function, [first, second, *rest], keywords) if _may_swap(function, first, second):
            yield ast.Call(function, [second, first, *rest], keywords)
        case ast.Call(ast.Name(name), arguments, keywords) if name in _OPPOSITES:
            yield ast.Call(ast.Name(_OPPOSITES[name]), arguments, keywords)


def _may_swap(function: ast.expr, first: ast.expr, second: ast.expr) -> bool:
    """Whether two arguments look alike: others are of different types, and any test finds that they are swapped."""
    alike = type(first) is type(second) and ast.dump(first) != ast.dump(second)
    return alike and _name(function) not in ("isinstance", "issubclass", "partial")


def _name(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def drawn(packages: list[str], count: int, seed: int) -> list[Change]:
    """So many changes of packages, the same for the same seed."""
    below = ROOT / "src" / "fullshard"
    files = sorted(path.relative_to(below).as_posix() for each in packages for path in (below / each).rglob("*.py"))
    every = [change for file in files for change in changes(file)]
    return sorted(random.Random(seed).sample(every, min(count, len(every))))


def main() -> int:
    """Runs random changes; returns how many were not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=20, help="how many changes")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--package", action="append", choices=[*PACKAGES, "comm", "group", "schedule", "buffer"])
    parser.add_argument("--number", type=int, help="only the change of this number")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each")
    options = parser.parse_args()
    missed = 0
    for number, change in enumerate(drawn(options.package or list(PACKAGES), options.count, options.seed)):
        if options.number not in (None, number):
            continue
        began, text = time.monotonic(), Path(ROOT, "src", "fullshard", change.file).read_bytes()
        before, after = text.decode(), (text[: change.start] + change.after.encode() + text[change.end :]).decode()
        found = find(Mutation(change.file, before, after, ""), [nearest(change.file)], options.timeout)
        if found.startswith("tests/"):  # by a test that passes without the change
            test = found.partition(" - ")[0]
            again = find(Mutation(change.file, before, before, ""), [[test]], options.timeout)
            assert not again, f"{test} fails without a change too"
        missed += not found
        what = " ".join(text[change.start : change.end].decode().split())
        print(f"{number:3} {time.monotonic() - began:4.0f} s  {change.file}:{change.line}: {what} -> {change.after}")
        print(f"             {found or 'NOT FOUND'}", flush=True)
    print(f"{missed} were not found")
    return missed


if __name__ == "__main__":
    sys.exit(main())
