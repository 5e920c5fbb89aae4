"""Deliberate bugs in the library, and whether the quick lane of the tests finds each: `python -m tests.mutations`.

Each is one changed line of the kind that a mistaken edit makes. A copy of the source gets it, and the tests that stand
nearest run on that copy until the first one fails. The lane would let a bug through that none of them finds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
NEAREST = {
    "buffer/plan.py": ("tests/buffer", "tests/comm"),
    "group/gradients.py": ("tests/parity", "tests/fully_shard"),
    "schedule/": ("tests/parity", "tests/fully_shard"),
    "comm/host.py": ("tests/comm", "tests/fully_shard/test_shared_memory.py", "tests/parity"),
    "comm/point_to_point.py": ("tests/comm", "tests/parity"),
    "wrapper/": ("tests/wrapper", "tests/parity"),
    "group/flat.py": ("tests/parity", "tests/wrapper"),
}


@dataclass(frozen=True)
class Mutation:
    """In `file`, below `src/fullshard`, `before` stands once and becomes `after`."""

    file: str
    before: str
    after: str


MUTATIONS = (
    # where parameters lie
    Mutation("buffer/plan.py", "step = -(-size // world_size)", "step = max(1, size // world_size)"),
    Mutation("buffer/plan.py", "return -(-numel // alignment) * alignment", "return numel"),
    Mutation("buffer/plan.py", "(plan.end,)", "(plan.full_numel,)"),
    Mutation("buffer/plan.py", "(outer, row, numel)", "(outer, numel, numel)"),
    Mutation("buffer/plan.py", "in edges if end < start]", "in edges if end > start]"),
    Mutation(
        "buffer/plan.py", "begin = self.full_offsets[index] + start - rank", "begin = self.full_offsets[index] - rank"
    ),
    # how gradients are taken and reduced
    Mutation("group/gradients.py", "self._views[index].zero_()", "pass"),
    Mutation("group/gradients.py", "gap.zero_()", "pass"),
    Mutation("group/gradients.py", "local.add_(partial.pop(index))", "partial.pop(index)"),
    Mutation("group/gradients.py", "self._arrived.update(waiting)", "self._arrived |= set(list(waiting)[:1])"),
    Mutation(
        "group/gradients.py",
        "if index in self._waiting:\n            self.settle()",
        "if False:\n            self.settle()",
    ),
    Mutation("group/gradients.py", "self._dtypes_of.refuse_unknown()", "pass"),
    Mutation("group/gradients.py", "leaf.requires_grad_(trainable)", "pass"),
    # when each group is gathered and reduced
    Mutation("schedule/schedule.py", "group.check_in()\n", "pass\n"),
    Mutation("schedule/schedule.py", "self.clock.epoch += 1", "pass"),
    Mutation("schedule/schedule.py", 'self.passes.end("backward")', "pass"),
    Mutation("schedule/schedule.py", "self.comm.reductions.keep_at_most(0)", "pass"),
    Mutation("schedule/unit.py", "if self._entered > 0 or self._is_differentiated:", "if self._is_differentiated:"),
    Mutation("schedule/unit.py", "self._is_opaque |= not found", "pass"),
    Mutation("schedule/order.py", "self._uses.clear()", "pass"),
    # memory that the ranks of a host share
    Mutation("comm/host.py", "self.done.set(number)\n\n", "\n"),
    Mutation("comm/host.py", "if subject != route.subject:", "if False:"),
    Mutation("comm/host.py", "if (number, tag) != (reading.number, route.tag):", "if number != reading.number:"),
    Mutation("comm/host.py", "if dropped != self._purged[rank]:", "if False:"),
    Mutation("comm/host.py", "self._dropped.set(self._dropped.value + 1)", "pass"),
    # messages between ranks
    Mutation("comm/point_to_point.py", "foreach_copy(*self._own)", "pass"),
    Mutation("comm/point_to_point.py", "large = min(large, capacity)", "large = 2 * capacity"),
    Mutation("comm/point_to_point.py", "foreach_copy(*planned.before)", "pass"),
    Mutation("comm/point_to_point.py", "SHARED.give_back(self.lease)", "pass"),
    Mutation("comm/point_to_point.py", "start += align(leaving.packed_bytes)", "start += 0"),
    # the wrapper
    Mutation("wrapper/unit.py", "root.failed = False", "pass"),
    Mutation("wrapper/unit.py", "module._buffers[name] = buffer.to(dtype)", "pass"),
    Mutation("wrapper/unit.py", "group.options.mp_policy = self.mp_policy", "pass"),
    Mutation("group/flat.py", "self.sharded.grad = None\n", "pass\n"),
    Mutation(
        "group/flat.py", "return grad if grad is None or self.home is None else self.part_in(grad)", "return grad"
    ),
    Mutation("group/flat.py", "replaced |= not same_memory(shown, shard)", "pass"),
)


def main() -> int:
    """Runs the mutations; returns how many were not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--file", default="", help="only those of files whose path begins so")
    parser.add_argument("--all", action="store_true", help="with the long lane of the tests")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for each")
    options = parser.parse_args()
    missed = 0
    for mutation in MUTATIONS:
        if mutation.file.startswith(options.file):
            began = time.monotonic()
            found = _find(mutation, options)
            missed += not found
            what = f"{mutation.file}: {mutation.before.strip().splitlines()[0]!r} -> {mutation.after.strip()!r}"
            print(f"{time.monotonic() - began:5.0f} s  {what}\n         {found or 'NOT FOUND IN TIME'}", flush=True)
    print(f"{missed} were not found")
    return missed


def _find(mutation: Mutation, options: argparse.Namespace) -> str:
    """The test that finds a mutation; empty if none does."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "src")
        shutil.copytree(ROOT / "src", source)
        file = source / "fullshard" / mutation.file
        text = file.read_text()
        assert text.count(mutation.before) == 1, f"{mutation} stands {text.count(mutation.before)} times"
        file.write_text(text.replace(mutation.before, mutation.after))
        (tests,) = [tests for prefix, tests in NEAREST.items() if mutation.file.startswith(prefix)]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        environment = {**os.environ, "PYTHONPATH": f"{source}:{ROOT}", "OMP_NUM_THREADS": "1"}
        try:
            run = subprocess.run(
                [*command, *(["--all"] if options.all else [])],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=options.timeout,
            )
        except subprocess.TimeoutExpired:
            return ""  # nobody knows
        if run.returncode == 0:
            return ""
        lines = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return lines[0] if lines else run.stdout[-200:]


if __name__ == "__main__":
    sys.exit(main())
