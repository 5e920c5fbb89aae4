"""The process that ranks of ``fullshard.testing`` are forked from, which imports torch while the test process does.

It is started before the test process imports torch. So this file, which starts it, imports neither torch nor fullshard.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

#: Of ranks, unless it is set: threads of one rank are taken from the others, and a host name need not resolve.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})}
_preloaded = ["torch", "torch.distributed.tensor", "fullshard.testing.rank"]


def start(modules: Sequence[str] = ()) -> Any:
    """Start the process, which imports torch and ``modules``, if none runs; returns the context in which ranks start.

    It returns at once. Where processes cannot be forked, a rank imports everything itself.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    _preloaded.extend(module for module in modules if module not in _preloaded)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_preloaded)
    with environment():
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """Set the variables that are not set, for as long as processes start that inherit them."""
    added = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
