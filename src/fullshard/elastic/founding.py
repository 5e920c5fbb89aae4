"""How the first processes of a job find each other in a directory that all of them see, without a launcher.

There is a number for each process. Each takes one, and waits until processes that answer have taken all of them.
One that ends meanwhile, or is left from an earlier job, loses its number to another. Owns the files of the numbers.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PREFIX = "founder-"


def key_of(directory: Path) -> bytes:
    """The key of the jobs in a directory, which only its user can read: made by the first process."""
    directory.mkdir(parents=True, exist_ok=True)
    _create(directory / "key", os.urandom(16).hex())
    return bytes.fromhex((directory / "key").read_text(encoding="utf-8"))


def take_number(directory: Path, processes: int, mine: Any, answers: Callable[[Any], bool]) -> int | None:
    """Takes one of the numbers for ``mine``, which says where this process is; returns it, or ``None`` if all are
    taken. ``answers`` says whether another one still is where it said."""
    for number in range(processes):
        file = directory / f"{_PREFIX}{number}.json"
        said = _read(file)
        if said == mine:
            return number
        if said is not None and not answers(said) and _read(file) == said:
            file.unlink(missing_ok=True)
            said = None
        if said is None and _create(file, json.dumps(mine)):
            return number
    return None


def founders(directory: Path, processes: int) -> list[Any] | None:
    """What all first processes have said, in the order of their numbers; ``None`` while some are missing."""
    said = [_read(directory / f"{_PREFIX}{number}.json") for number in range(processes)]
    return None if None in said else said


def write(file: Path, text: str) -> None:
    """Writes a whole file for this user only, in place of one that there may be."""
    _write_beside(file, text).replace(file)


def _write_beside(file: Path, text: str) -> Path:
    written = file.with_name(f".{uuid.uuid4().hex}")
    with open(written, "w", opener=lambda name, flags: os.open(name, flags, 0o600), encoding="utf-8") as opened:
        opened.write(text)
    return written


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _create(file: Path, text: str) -> bool:
    """Writes a whole file for this user only, unless there is one. Returns whether it did."""
    written = _write_beside(file, text)
    try:
        os.link(written, file)
    except FileExistsError:
        return False
    finally:
        written.unlink()
    return True
