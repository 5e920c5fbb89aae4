"""The simulated network: torch.distributed in a process that is one rank of many, and whose peers do not exist.

:func:`connect` registers the backend ``rehearsal``, and lets every process group of the process have it. Collectives
take ``latency + bytes / bandwidth``, and their results are those that they would have if all ranks had this rank's
tensors. The backend is built from ``network.cpp``; without a compiler a process group in Python does the same. What
needs another rank in a different way is an error that says so.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, reduce
from operator import add
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from fullshard.torch_private import device_sleep

NAME = "rehearsal"
_SOURCE = Path(__file__).with_name("network.cpp")


@dataclass(frozen=True)
class Total:
    """All collectives of one kind: their number, the bytes that this rank sends or receives, and their seconds."""

    count: int
    bytes: int
    seconds: float


class RehearsalError(RuntimeError):
    """A program needs what a simulated network cannot give."""


@dataclass(frozen=True)
class Network:
    """A network to which this process is connected.

    Args:
        native: the module built from ``network.cpp``, or the substitute in Python.
        why: why there is a substitute; empty if there is none.
    """

    native: Any
    why: str = ""

    def totals(self) -> dict[str, Total]:
        """What went over the network so far, by kind of collective."""
        return {kind: Total(*found) for kind, found in self.native.totals().items()}

    def seconds_of_a_call(self) -> float:
        """Seconds that the host takes for a collective, where Python simulates the network."""
        return _PythonNetwork.seconds_called / max(1, sum(int(count) for count, *_ in _PythonNetwork.by_kind.values()))

    def waited(self) -> float:
        """Seconds for which the host has waited for works so far."""
        return float(self.native.waited())


def connect(rank: int, size: int, latency: float, bandwidth: float, in_python: bool = False) -> Network:
    """Connects this process, as a rank of so many, to a network of so many seconds and bytes per second.

    Call it before the program creates a process group: its default process group is then a simulated one, whatever
    backend, store and address it names. On CUDA the network passes for NCCL.
    """
    why = "asked for" if in_python else ""
    native: Any = _PythonNetwork
    if not in_python:
        try:
            native = _build()
        except Exception as error:  # no compiler, no ninja, no headers
            why = f"network.cpp cannot be built: {str(error).strip().splitlines()[-1]}"
    native.connect(latency, bandwidth)
    device_type = accelerator.type if (accelerator := torch.accelerator.current_accelerator()) else ""
    kinds = ["cpu", *filter(None, [device_type])]
    dist.Backend.register_backend(NAME, lambda _, rank, size, __: native.make(rank, size), devices=kinds)
    _redirect(rank, size, ",".join(f"{kind}:{NAME}" for kind in kinds))
    return Network(native, why)


def _build() -> Any:
    """The module of ``network.cpp``, with CUDA if torch has it and its headers are found. Built once for each torch."""
    extension = importlib.import_module("torch.utils.cpp_extension")
    flags, includes, links = ["-O1"], list[str](), list[str]()
    if torch.version.cuda and torch.cuda.is_available():
        site = Path(torch.__file__).parent.parent
        folders = [Path(extension.CUDA_HOME or "/usr/local/cuda", "include"), *site.glob("nvidia/*/include")]
        includes = [str(folder) for folder in folders if (folder / "cuda_runtime.h").is_file()][:1]
        if not includes:
            raise RuntimeError("no cuda_runtime.h: set CUDA_HOME")
        flags.append("-DWITH_CUDA")
        links = [f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10_cuda", "-ltorch_cuda"]
    version = "".join(letter if letter.isalnum() else "_" for letter in torch.__version__)
    return extension.load(
        f"fullshard_rehearsal_{version}",
        [str(_SOURCE)],
        extra_cflags=flags,
        extra_include_paths=includes,
        extra_ldflags=links,
        with_cuda=False,
    )


def _redirect(rank: int, size: int, backends: str) -> None:
    """Let functions of torch.distributed make simulated process groups, in all modules, and refuse the rest."""
    nccl = backends.replace(f"cuda:{NAME}", "cuda:nccl")
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    initialize, new_group, names = dist.init_process_group, dist.new_group, dist.get_backend_config
    backend = dist.get_backend

    store = _RankStore(rank)  # torch keeps what is in C++ of it

    def init_process_group(
        _: Any = None, init_method: Any = None, timeout: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        asked = args[0] if args else kwargs.get("world_size", -1)
        if asked not in (-1, size):
            raise RehearsalError(f"the program makes a process group of {asked} ranks, and rehearses one of {size}")
        initialize(backends, timeout=timeout, world_size=size, rank=rank, store=store)

    def make_group(ranks: Any = None, timeout: Any = None, *_: Any, **kwargs: Any) -> Any:
        known = {name: value for name, value in kwargs.items() if name in ("use_local_synchronization", "group_desc")}
        return new_group(ranks, timeout, **known)

    def refuse(what: str, advice: str, *_: Any, **__: Any) -> None:
        raise RehearsalError(f"the program calls {what}, and only one rank is there: {advice}")

    replacements: list[tuple[Any, Any]] = [
        (initialize, init_process_group),
        (new_group, make_group),
        (names, lambda group=None: names(group).replace(backends, nccl)),
        (backend, lambda group=None: "nccl" if "nccl" in nccl and NAME in backend(group) else backend(group)),
    ]
    start = "rehearse the program that each rank runs, without its launcher"
    for where, name, advice in (
        ("torch.multiprocessing", "spawn", start),
        ("torch.multiprocessing", "start_processes", start),
        ("torch.distributed.rpc", "init_rpc", "torch.distributed.rpc cannot be simulated"),
    ):
        if function := getattr(importlib.import_module(where), name, None):
            replacements.append((function, partial(refuse, f"{where}.{name}", advice)))
    by_id = {id(old): new for old, new in replacements}
    for module in [each for each in sys.modules.values() if isinstance(each, ModuleType) and each.__name__ != __name__]:
        for name, value in list(vars(module).items()):
            if id(value) in by_id:
                setattr(module, name, by_id[id(value)])


class _RankStore(dist.Store):  # type: ignore[name-defined]
    """A store in which nobody else writes: a wait for what is not there would last forever, and is an error."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank, self._values = rank, dist.HashStore()  # type: ignore[attr-defined]

    def _expect(self, keys: Sequence[str]) -> None:
        if missing := [key for key in keys if not self._values.check([key])]:
            raise RehearsalError(
                f"rank {self._rank} waits in the store for {missing[0]!r}, which another rank would set: none is there"
            )

    def set(self, key: str, value: Any) -> None:
        self._values.set(key, value)

    def get(self, key: str) -> bytes:
        self._expect([key])
        return bytes(self._values.get(key))

    def add(self, key: str, number: int) -> int:
        return int(self._values.add(key, number))

    def check(self, keys: list[str]) -> bool:
        return bool(self._values.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._expect(keys)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return bytes(self._values.compare_set(key, expected, desired))

    def delete_key(self, key: str) -> bool:
        return bool(self._values.delete_key(key))

    def num_keys(self) -> int:
        return int(self._values.num_keys())

    def set_timeout(self, timeout: timedelta) -> None:
        return


class _SimulatedWork(dist.Work):
    """What a collective in Python leaves behind: a point in time, or a point in a stream."""

    def __init__(self, deadline: float, event: Any, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._deadline, self._event, self._tensors = deadline, event, tensors

    def is_completed(self) -> bool:
        return bool(self._event.query()) if self._event is not None else time.perf_counter() >= self._deadline

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        elif (seconds := self._deadline - time.perf_counter()) > 0:
            time.sleep(seconds)
            _PythonNetwork.seconds_waited += seconds
        self._tensors = ()
        return True


_Group: Any = dist.ProcessGroup  # its names differ between releases


class _PythonNetwork(_Group):
    """The process group of a machine without a compiler: like ``network.cpp``, but its calls take the host longer."""

    latency, bandwidth, seconds_waited, seconds_called = 0.0, 1e9, 0.0, 0.0
    clock_rate = 0.0  # cycles of the device in a second
    by_kind: ClassVar[dict[str, list[float]]] = defaultdict(lambda: [0, 0, 0.0])

    @classmethod
    def make(cls, rank: int, size: int) -> _PythonNetwork:
        return cls(rank, size)

    @classmethod
    def connect(cls, latency: float, bandwidth: float) -> None:
        cls.latency, cls.bandwidth = latency, bandwidth

    @classmethod
    def totals(cls) -> dict[str, tuple[int, int, float]]:
        return {kind: (int(count), int(nbytes), seconds) for kind, (count, nbytes, seconds) in cls.by_kind.items()}

    @classmethod
    def waited(cls) -> float:
        return cls.seconds_waited

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._free = 0.0  # when the link has carried everything, by the host's clock
        self._end: torch.Event | None = None  # the same on the device
        self._stream: torch.cuda.Stream | None = None
        self._sent: dict[int, torch.Tensor] = {}

    def getBackendName(self) -> str:
        return NAME

    def _get_backend(self, _: torch.device) -> _PythonNetwork:
        return self

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def _run(
        self, kind: str, nbytes: float, rounds: int, opts: Any, tensors: Sequence[torch.Tensor], copy: Callable[[], Any]
    ) -> _SimulatedWork:
        begin = time.perf_counter()
        seconds = 0.0 if self._size == 1 else rounds * self.latency + nbytes / self.bandwidth
        total = self.by_kind[kind]
        total[0], total[1], total[2] = total[0] + 1, total[1] + nbytes, total[2] + seconds
        if tensors and tensors[0].is_cuda:
            work = self._on_device(seconds, getattr(opts, "asyncOp", True), tensors, copy)
        else:
            copy()
            self._free = max(begin, self._free) + seconds
            work = _SimulatedWork(self._free, None, tensors)
        _PythonNetwork.seconds_called += time.perf_counter() - begin
        return work

    def _on_device(
        self, seconds: float, is_async: bool, tensors: Sequence[torch.Tensor], copy: Callable[[], Any]
    ) -> _SimulatedWork:
        current = torch.cuda.current_stream()
        if not self.clock_rate:
            for _ in range(2):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                device_sleep(20_000_000)
                end.record()
                end.synchronize()
                _PythonNetwork.clock_rate = 2e10 / begin.elapsed_time(end)
        if is_async:
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(current)
        stream = self._stream if is_async and self._stream else current
        with torch.cuda.stream(stream):
            if self._end is not None and not torch.cuda.is_current_stream_capturing():
                stream.wait_event(self._end)
            device_sleep(int(seconds * self.clock_rate))
            copy()
            event = stream.record_event()
        self._end = None if torch.cuda.is_current_stream_capturing() else event
        return _SimulatedWork(0.0, event, tensors)

    def _reduce(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], op: Any) -> None:
        kind, given = op.__getstate__()
        if kind in (dist.ReduceOp.PRODUCT.value, dist.ReduceOp.BXOR.value):
            raise RehearsalError("products and XORs of ranks cannot be simulated")
        factor = self._size if kind == dist.ReduceOp.SUM.value else 1 if given is None else self._size * given
        for output, source in zip(outputs, inputs, strict=True):
            same = source.view_as(output)
            output.copy_(same if same.dtype is torch.bool or factor == 1 else same * factor)

    def broadcast(self, tensors: Any, opts: Any = None) -> _SimulatedWork:
        return self._run("broadcast", _bytes(tensors), 1, opts, tensors, lambda: None)

    def allreduce(self, tensors: Any, opts: Any) -> _SimulatedWork:
        nbytes = 2 * _bytes(tensors) * self._share
        return self._run("all-reduce", nbytes, 2, opts, tensors, lambda: self._reduce(tensors, tensors, opts.reduceOp))

    allreduce_coalesced = allreduce

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> _SimulatedWork:
        def copy() -> None:
            for every, source in zip(outputs, inputs, strict=True):
                for output in every:
                    output.copy_(source.view_as(output))

        flat = reduce(add, outputs)
        return self._run("all-gather", _bytes(flat) * self._share, 1, opts, [*flat, *inputs], copy)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> _SimulatedWork:
        return self.allgather([list(output.view(self._size, -1)) for output in outputs], inputs, opts)

    def _allgather_base(self, output: Any, source: Any, opts: Any = None) -> _SimulatedWork:
        return self.allgather_into_tensor_coalesced([output], [source], opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> _SimulatedWork:
        flat = reduce(add, map(list, inputs))
        own = [chunks[self._rank] for chunks in inputs]
        copy = partial(self._reduce, outputs, own, opts.reduceOp)
        return self._run("reduce-scatter", _bytes(flat) * self._share, 1, opts, [*outputs, *flat], copy)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> _SimulatedWork:
        return self.reduce_scatter(outputs, [source.view(self._size, -1) for source in inputs], opts)

    def _reduce_scatter_base(self, output: Any, source: Any, opts: Any) -> _SimulatedWork:
        return self.reduce_scatter_tensor_coalesced([output], [source], opts)

    def alltoall_base(
        self, output: Any, source: Any, output_sizes: Any, sizes: Any, opts: Any = None
    ) -> _SimulatedWork:
        def parts(tensor: torch.Tensor, given: Any) -> list[torch.Tensor]:
            return list(tensor.split(list(given) or tensor.shape[0] // self._size))

        outputs, inputs = parts(output, output_sizes), parts(source, sizes)

        def copy() -> None:
            own = inputs[self._rank].reshape(-1)
            for each in outputs:
                numel = min(each.numel(), own.numel())
                each.view(-1)[:numel].copy_(own[:numel])
                each.view(-1)[numel:].zero_()

        nbytes = max(_bytes(outputs), _bytes(inputs)) * self._share
        return self._run("all-to-all", nbytes, 1, opts, [output, source], copy)

    def send(self, tensors: Any, target: int, tag: int) -> _SimulatedWork:
        def copy() -> None:
            self._sent[tag] = tensors[0].clone()

        return self._run("send", _bytes(tensors), 1, None, tensors, copy)

    def recv(self, tensors: Any, source: int, tag: int) -> _SimulatedWork:
        sent = self._sent.get(tag)
        if sent is None or sent.nbytes != tensors[0].nbytes:
            raise RehearsalError(
                f"a message of {tensors[0].nbytes} bytes from rank {source} (tag {tag}) cannot be simulated: rank "
                f"{self._rank} is alone, and has not sent such a message itself. Programs whose ranks do different "
                f"things cannot be rehearsed"
            )
        return self._run(
            "receive", _bytes(tensors), 1, None, tensors, lambda: tensors[0].copy_(sent.view_as(tensors[0]))
        )

    def barrier(self, opts: Any = None) -> _SimulatedWork:
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return self._run("barrier", 0, 2, None, (), lambda: None)

    # The names of newer releases.
    all_gather_single, reduce_scatter_single, all_to_all_single = _allgather_base, _reduce_scatter_base, alltoall_base

    @property
    def _share(self) -> float:
        return (self._size - 1) / self._size


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
