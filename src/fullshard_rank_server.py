"""The process that ranks of ``fullshard.testing`` are forked from, which imports torch while the test process does.

It is started before the test process imports torch. So this file, which starts it, imports neither torch nor fullshard.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

#: Of ranks, unless it is set: threads of one rank are taken from the others, and a host name need not resolve.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})}
#: The first operation on a DTensor imports torch._dynamo, which takes a second: once here, and not on each rank.
_preloaded = ["torch", "torch.distributed.tensor", "fullshard.testing.rank", "torch._dynamo"]
_PRELOAD = "FULLSHARD_RANKS_PRELOAD"


def start(modules: Sequence[str] = ()) -> Any:
    """Start the process, which imports torch and ``modules``, if none runs; returns the context in which ranks start.

    It returns at once. Where processes cannot be forked, a rank imports everything itself.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    _preloaded.extend(module for module in modules if module not in _preloaded)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with environment({_PRELOAD: " ".join(_preloaded)}):
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def imports_kept() -> Iterator[None]:
    """Import without collections of garbage, and keep what is there afterwards out of later ones.

    To import torch makes millions of objects that stay. To walk them, again and again, takes a third of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def environment(more: Mapping[str, str] | None = None) -> Iterator[None]:
    """Set the variables that are not set, for as long as processes start that inherit them."""
    wanted = {**ENVIRONMENT, **(more or {})}
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


if _PRELOAD in os.environ:  # this is the server
    with imports_kept():
        for _name in os.environ.pop(_PRELOAD).split():
            with contextlib.suppress(ImportError):
                importlib.import_module(_name)
