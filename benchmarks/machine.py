"""The machine that a run is made on: what it is, and how much of it other programs take meanwhile."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.ranks import cpu_seconds

#: The part of the machine that others may take before figures are not to be believed.
QUIET = 0.05


def facts() -> dict[str, Any]:
    """What has to be known of the machine to read absolute numbers."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "commit": _commit(),
    }


def _commit() -> str:
    """The commit of this checkout, with a + if files differ from it; empty outside of one."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=10", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


class Watch:
    """How busy other programs keep the machine while it runs, and how busy it was before."""

    def __init__(self) -> None:
        self.load_before = os.getloadavg()[0]
        self._begin = time.perf_counter()
        self._busy, self._own = _busy_seconds(), _own_seconds()

    def read(self) -> dict[str, float]:
        """``load_before``: processes that ran in the minute before the run; ``others``: part of all cores' time since
        then that went to other programs; ``seconds`` since then."""
        seconds = time.perf_counter() - self._begin
        busy = _busy_seconds() - self._busy
        others = max(0.0, busy - (_own_seconds() - self._own)) / seconds / (os.cpu_count() or 1)
        return {"load_before": self.load_before, "others": others, "seconds": seconds}


def _own_seconds() -> float:
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime + cpu_seconds()


def _busy_seconds() -> float:
    """Seconds that all cores together have computed for anyone; none where the kernel does not tell."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system = (int(ticks) for ticks in stat.read_text().split(maxsplit=4)[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "") or (
        platform.processor() or platform.machine()
    )
