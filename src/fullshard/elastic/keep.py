"""Keeps the process of an elastic job running while torchrun restarts its workers::

    torchrun --nnodes=1:4 --max-restarts=100 ... -m fullshard.elastic.keep examples/elastic.py

When a worker fails or a node comes, torchrun ends the workers of all nodes and starts them again. A worker that is this
module starts the program in a session of its own, and waits for it. If torchrun ends the worker, the program runs on,
and the next worker of the same agent waits for it. If the agent itself has ended, the program gets SIGTERM.

Owns a directory of files, one for each worker of an agent. The process that keeps a program has the lock of its file,
and writes down how the program has ended.
"""

from __future__ import annotations

import getpass
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_KEEPER = "--keeper"
_POLL = 0.2  # seconds between two looks at the program and the agent


def main(arguments: list[str]) -> int:
    """The worker. Returns the exit status of the program; 1 if a signal has ended it."""
    from fullshard.platforms import lock  # not with the module: what keeps a program does so without torch

    if not arguments:
        sys.exit("usage: torchrun ... -m fullshard.elastic.keep PROGRAM.py [ARGUMENT ...]")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))  # the program runs on
    directory, agent = Path(tempfile.gettempdir()) / f"fullshard-keep-{getpass.getuser()}", os.getppid()
    directory.mkdir(mode=0o700, exist_ok=True)
    place = directory / f"{agent}-{os.environ.get('LOCAL_RANK', '0')}"
    with open(place, "a+b") as file, suppress(BlockingIOError):  # somebody keeps the program
        lock(file.fileno())
        if not place.stat().st_size:  # else it has ended between two workers
            command = [sys.executable, __file__, _KEEPER, str(file.fileno()), str(agent), *arguments]
            subprocess.Popen(command, pass_fds=[file.fileno()], start_new_session=True)  # the lock is its own now
    with open(place, "rb") as file:
        lock(file.fileno(), shared=True)
        status = file.read()
        place.unlink(missing_ok=True)
    return int(status or 1)


def _keep(file: int, agent: int, program: list[str]) -> None:
    """Runs the program, and writes down how it has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    running, is_asked = subprocess.Popen([sys.executable, *program]), False
    while running.poll() is None:
        time.sleep(_POLL)
        if not is_asked and not _lives(agent):
            is_asked = True
            running.terminate()
    os.write(file, str(running.returncode if running.returncode >= 0 else 1).encode())


def _lives(process: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(process, 0)
        return True
    return False


if __name__ == "__main__":
    if sys.argv[1:2] == [_KEEPER]:
        _keep(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    else:
        sys.exit(main(sys.argv[1:]))
