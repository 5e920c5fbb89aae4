"""Files from strangers: they are refused, in time that is bounded, with no more memory than they have."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_hostile_directories_neither_hang_nor_crash_nor_take_memory() -> None:
    call = [sys.executable, "-m", "tests.checkpoint.hostile", "--count", "320", "--every", "1"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
