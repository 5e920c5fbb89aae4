"""Stores for tests: an S3 server on this machine, and a store of our own that fails, delays and reorders."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec
import pytest
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

    def _happens(self, fault: str, path: str) -> bool:
        """Whether a fault happens now: by chance, and at most twice in a row to an object unless it is certain, because
        a request that is repeated often enough must succeed."""
        chance = FAULTS.get(fault, 0.0)
        happens = random.random() < chance and (chance == 1.0 or IN_A_ROW[fault, path] < 2)
        IN_A_ROW[fault, path] = IN_A_ROW[fault, path] + 1 if happens else 0
        return happens

    def _request(self, kind: str, path: str) -> None:
        if random.random() < FAULTS.get("late", 0.0):
            time.sleep(random.random() * 0.02)
        LOG.append((kind, path))
        for hook in HOOKS:
            hook(kind, path)
        if self._happens("fail", path):
            raise ConnectionResetError(f"the store refused to {kind} {path}")

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self._request("put", path)
        if self._happens("late put", path):
            LATE.append(partial(self._put, path, bytes(value), mode))
            raise ConnectionResetError(f"no answer to put {path}, which is still under way")
        self._put(path, value, mode)
        if self._happens("lost answer", path):
            raise ConnectionResetError(f"no answer to put {path}")

    def _put(self, path: str, value: bytes, mode: str) -> None:
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
#: How often each fault has happened to an object since it last did not.
IN_A_ROW: Counter[tuple[str, str]] = Counter()
#: Requests: what, and to which path. Functions that see each of them first.
LOG: list[tuple[str, str]] = []
HOOKS: list[Callable[[str, str], object]] = []
#: Writes whose requests have failed, and that happen later.
LATE: list[Callable[[], object]] = []


def deliver() -> int:
    """Lets the late writes happen. Returns how many there were."""
    late = LATE[:]
    LATE.clear()
    for each in late:
        with suppress(FileExistsError):
            each()
    return len(late)


def in_a_fork(call: Callable[[], object]) -> int:
    """Calls a function in a copy of this process. Returns its exit status, or less than 0 for a signal."""
    if not (child := os.fork()):
        try:
            call()
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


fsspec.register_implementation("faulty", FaultyStore, clobber=True)


@contextmanager
def faults(**probabilities: float) -> Iterator[None]:
    """Let requests of this process go wrong."""
    FAULTS.update({name.replace("_", " "): value for name, value in probabilities.items()})
    try:
        yield
    finally:
        for name in probabilities:
            FAULTS.pop(name.replace("_", " "))


class _WebHandler(SimpleHTTPRequestHandler):
    """Sends whole files below a directory, refuses listings and HEAD requests, and redirects from /old."""

    def do_GET(self) -> None:
        if self.path.startswith("/old/"):
            self.send_response(302)
            self.send_header("Location", self.path.replace("/old/", "/"))
            self.end_headers()
        elif self.path.endswith("/") or Path(self.translate_path(self.path)).is_dir():
            self.send_error(403)
        else:
            super().do_GET()

    def do_HEAD(self) -> None:
        self.send_error(405)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def web_server(directory: Path) -> Iterator[str]:
    """A web server of the files in a directory; gives its address."""
    handler = partial(_WebHandler, directory=str(directory))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


#: Servers on this machine, of which `make test-all` installs all but moto: how each is started (``{port}``,
#: ``{folder}``), the URL of a bucket, and what fsspec has to know.
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # Azurite's own
_NPM = Path(sys.prefix) / "stores" / "node_modules" / ".bin"
SERVERS: dict[str, tuple[str, str, dict[str, str]]] = {
    "moto": (
        f"{sys.executable} -m moto.server -H 127.0.0.1 -p {{port}}",
        "s3://bucket",
        {"endpoint_url": "http://127.0.0.1:{port}", "key": "user", "secret": "password"},
    ),
    "s3rver": (
        f"{_NPM}/s3rver -d {{folder}} -p {{port}} --configure-bucket bucket",
        "s3://bucket",
        {"endpoint_url": "http://127.0.0.1:{port}", "key": "S3RVER", "secret": "S3RVER"},
    ),
    "azurite": (
        f"{_NPM}/azurite-blob --silent --disableTelemetry --inMemoryPersistence --skipApiVersionCheck "
        "--blobPort {port}",
        "abfs://bucket",
        {
            "connection_string": f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={AZURE_KEY};"
            "BlobEndpoint=http://127.0.0.1:{port}/devstoreaccount1;"
        },
    ),
    "gcs": (
        f"{sys.executable} -m gcp_storage_emulator start --port={{port}} --in-memory",
        "gs://bucket",
        {"endpoint_url": "http://127.0.0.1:{port}", "token": "anon", "project": "project"},
    ),
}


def skip_without(name: str) -> None:
    """Skip the test if one of :data:`SERVERS`, or what speaks with it, is not installed."""
    command, url, _ = SERVERS[name]
    program, *arguments = command.split()
    module = arguments[1].partition(".")[0] if arguments[0] == "-m" else "pytest"
    if shutil.which(program) is None or find_spec(module) is None:
        pytest.skip(f"the server {name} is not installed: `make test-all` installs it")
    try:
        fsspec.get_filesystem_class(url.partition(":")[0])
    except ImportError as error:
        pytest.skip(f"{error}: `make test-all` does")


@contextmanager
def bucket_of(name: str, folder: Path = Path()) -> Iterator[str]:
    """A bucket of one of :data:`SERVERS`, as a URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # it asks for what the emulator does not have
    command, url, options = SERVERS[name]
    program, silent = command.format(port=port, folder=folder).split(), subprocess.DEVNULL
    server = subprocess.Popen(program, stdout=silent, stderr=silent)
    protocol = url.partition(":")[0]
    access = {key: value.replace("{port}", str(port)) for key, value in options.items()}
    fsspec.config.conf[protocol] = access
    try:
        for _ in range(300):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        if name != "s3rver":
            fsspec.filesystem(protocol).mkdir("bucket")
        yield url
    finally:
        del fsspec.config.conf[protocol]
        fsspec.filesystem(protocol, **access).clear_instance_cache()
        server.terminate()
        server.wait()
