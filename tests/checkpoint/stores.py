"""Stores for tests: an S3 server on this machine, and a store of our own that fails, delays and reorders."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem


class FaultyStore(LocalFileSystem):
    """Objects in a directory of this machine, which all processes see. Requests fail and come late as its file
    ``faults`` says, and listings may lack what was written recently.

    It is reached as ``faulty:///directory``.
    """

    protocol = "faulty"
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.removeprefix("faulty://") if isinstance(path, str) else path)

    @property
    def _faults(self) -> dict[str, float]:
        return FAULTS

    def _request(self, kind: str, path: str) -> None:
        if random.random() < FAULTS.get("late", 0.0):
            time.sleep(random.random() * 0.02)
        LOG.append((kind, path))
        for hook in HOOKS:
            hook(kind, path)
        if random.random() < FAULTS.get("fail", 0.0):
            raise ConnectionResetError(f"the store refused to {kind} {path}")

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self._request("put", path)
        target = Path(self._strip_protocol(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        work = target.parent / f".{target.name}.{os.getpid()}.{random.random()}.put"
        work.write_bytes(value)
        try:
            if mode == "create":
                os.link(work, target)  # raises FileExistsError
            else:
                work.replace(target)
        finally:
            work.unlink(missing_ok=True)
        if random.random() < FAULTS.get("lost answer", 0.0):
            raise ConnectionResetError(f"no answer to put {path}")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        self._request("get", path)
        return Path(self._strip_protocol(path)).read_bytes()[slice(start, end)]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        self._request("info", path)
        return super().info(path, **kwargs)

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> list[Any]:
        self._request("list", path)
        root, now = Path(self._strip_protocol(path)), time.time()
        fresh = FAULTS.get("listing lag", 0.0)
        files = sorted(each for each in root.iterdir() if not each.name.endswith(".put"))
        found = [str(each) for each in files if now - each.stat().st_mtime >= fresh]
        return [super(FaultyStore, self).info(each) for each in found] if detail else found

    def find(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
        self._request("list", path)
        root = Path(self._strip_protocol(path))
        found = [str(each) for each in root.rglob("*") if each.is_file() and not each.name.endswith(".put")]
        return {each: super(FaultyStore, self).info(each) for each in found} if detail else found

    def rm_file(self, path: str) -> None:
        self._request("delete", path)
        target = Path(self._strip_protocol(path))
        target.unlink()
        if not any(target.parent.iterdir()):  # stores have no directories
            shutil.rmtree(target.parent, ignore_errors=True)


#: What goes wrong: probabilities, and the seconds by which listings are late.
FAULTS: dict[str, float] = {}
#: Requests: what, and to which path. Functions that see each of them first.
LOG: list[tuple[str, str]] = []
HOOKS: list[Callable[[str, str], object]] = []

fsspec.register_implementation("faulty", FaultyStore, clobber=True)


@contextmanager
def faults(**probabilities: float) -> Iterator[None]:
    """Let requests of this process go wrong."""
    FAULTS.update({name.replace("_", " "): value for name, value in probabilities.items()})
    try:
        yield
    finally:
        FAULTS.clear()


@contextmanager
def s3_server() -> Iterator[str]:
    """An S3 server on this machine (moto); gives its address."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert server.stdout is not None
        address = next(line.split()[-1] for line in server.stdout if "Running on http" in line)
        threading.Thread(target=server.stdout.read, daemon=True).start()  # a full pipe would stop it
        yield address
    finally:
        server.terminate()
        server.wait()


@contextmanager
def s3_bucket() -> Iterator[str]:
    """A bucket of a server on this machine, as a URL."""
    with s3_server() as address:
        access = {"endpoint_url": address, "key": "user", "secret": "password"}
        fsspec.config.conf["s3"] = access
        try:
            fsspec.filesystem("s3").mkdir("bucket")
            yield "s3://bucket"
        finally:
            del fsspec.config.conf["s3"]
            fsspec.filesystem("s3", **access).clear_instance_cache()
