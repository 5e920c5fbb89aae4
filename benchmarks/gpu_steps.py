"""Steps of one setting on a device: fullshard beside torch's FSDP2, and beside a model that is not sharded.

Owns the models, how they are sharded, and what is measured of a step. :mod:`benchmarks.gpu` says which settings there
are. A process is one rank of the setting, over a simulated network if the setting has more than one.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard.rehearsal.network import Network, connect
from fullshard.rehearsal.rank import streams_of

#: In the order in which they are measured: an error of the device may spoil what comes after it.
LIBRARIES = {"torch FSDP2": torch_fsdp, "not sharded": None, "fullshard": fullshard}
_WARM_UP = 3
#: Seconds of a collective, besides those of its bytes.
_LATENCY = 20e-6
#: Kinds of kernels, and what their names have in them.
KINDS = {
    "collectives": ("nccl", "spin"),
    "copies": ("copy", "memcpy", "cat", "split"),
    "matrix products": ("gemm", "cutlass", "xmma", "flash", "fmha", "aten::mm", "aten::addmm"),
}


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model, and what one rank sees of it in a step."""

    width: int
    layers: int
    heads: int
    inner: int
    vocabulary: int
    sequence: int
    batch: int

    def tokens(self, device: torch.device) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.vocabulary, (self.batch, self.sequence), generator=generator).to(device)

    @property
    def operations(self) -> float:
        """Floating-point operations of a step of one rank: products with each parameter, and causal attention."""
        inside = self.layers * (4 * self.width**2 + 3 * self.width * self.inner) + self.vocabulary * self.width
        return self.batch * self.sequence * (6.0 * inside + 6.0 * self.layers * self.sequence * self.width)


MODELS = {
    "7 B": Sizes(4096, 32, 32, 11008, 32_000, 2048, 2),
    "1 B": Sizes(2048, 16, 16, 8192, 32_000, 2048, 4),
    "many": Sizes(512, 64, 8, 1376, 1024, 512, 1),
}
TINY = Sizes(64, 2, 2, 96, 128, 8, 2)


@dataclass(frozen=True)
class Setting:
    """What is trained, and on which network: ``rate`` bytes a second, none with one rank."""

    model: str
    rate: float = 300e9
    ranks: int = 8
    recompute: bool = False
    compile: bool = False
    offload: bool = False
    accumulate: int = 1
    wire: Any = ""
    graph: bool = False
    libraries: tuple[str, ...] = ("torch FSDP2", "fullshard")


class Block(nn.Module):
    """Attention and SwiGLU, before each a norm: nine parameters."""

    def __init__(self, sizes: Sizes, recompute: bool) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.heads, self.recompute = sizes.heads, recompute
        self.attention_norm, self.mlp_norm = nn.RMSNorm(sizes.width), nn.RMSNorm(sizes.width)
        self.query, self.key, self.value, self.output = (linear(sizes.width, sizes.width) for _ in range(4))
        self.gate, self.up = (linear(sizes.width, sizes.inner) for _ in range(2))
        self.down = linear(sizes.inner, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._run, x, use_reentrant=False) if self.recompute else self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        each_head = (each(normed).unflatten(-1, (self.heads, -1)) for each in (self.query, self.key, self.value))
        query, key, value = (each.transpose(1, 2) for each in each_head)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Transformer(nn.Module):
    """Embedding, blocks, norm and head; returns the loss of predicting each token from those up to it."""

    def __init__(self, sizes: Sizes, recompute: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes, recompute) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens.flatten())


def shard(library: Any, setting: Setting, sizes: Sizes) -> nn.Module:
    """The model, with a group for each block and one for the rest: fp32 shards that compute in bf16."""
    model = Transformer(sizes, setting.recompute)
    options: dict[str, Any] = {}
    if setting.offload:
        options["offload_policy"] = library.CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    if setting.wire and library is fullshard:
        options["wire_policy"] = fullshard.WirePolicy(gather=setting.wire, reduce=setting.wire)
    policy = library.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        if setting.compile:
            block.compile()
        library.fully_shard(block, mp_policy=policy, **options)
    library.fully_shard(model, mp_policy=policy, **options)
    return model


class Trained:
    """A model on a device, one step of which is measured. One that is not sharded is in bf16, under SGD."""

    def __init__(self, library: Any, setting: Setting, sizes: Sizes, device: torch.device) -> None:
        torch.manual_seed(0)
        with device:
            model = Transformer(sizes, setting.recompute) if library is None else shard(library, setting, sizes)
        self.model: Any = model.bfloat16() if library is None else model
        self.optimizer: Any = (
            torch.optim.SGD(self.model.parameters(), 1e-4, foreach=True)
            if library is None
            else torch.optim.AdamW(self.model.parameters(), 1e-4, fused=True, capturable=captures(setting, device))
        )
        self.accumulate, self.is_sharded = setting.accumulate, library is not None
        self.tokens = sizes.tokens(device)

    def step(self) -> None:
        for at in range(self.accumulate):
            if self.is_sharded and self.accumulate > 1:
                self.model.set_requires_gradient_sync(at == self.accumulate - 1)
            self.model(self.tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def captures(setting: Setting, device: torch.device) -> bool:
    """Whether steps are replayed from a CUDA graph: off the card a setting with one runs the steps as they are."""
    return setting.graph and device.type == "cuda"


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """What replays a step, after the first steps, all on the stream that captures."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph.replay


def timed(step: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Seconds that the device takes for a step, and the host until it has asked for all of it."""
    if device.type == "cpu":
        begin = time.perf_counter()
        step()
        return (seconds := time.perf_counter() - begin), seconds
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    events[0].record()
    step()
    events[1].record()
    asked = time.perf_counter() - begin
    events[1].synchronize()
    return events[0].elapsed_time(events[1]) / 1e3, asked


def synchronizations(step: Callable[[], object], device: torch.device) -> int:
    """How often the host waits in a step, as torch's own check of synchronizing operations sees it."""
    if device.type == "cpu":
        return 0
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in caught)


def profiled(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Seconds of kernels in a step by kind (on the CPU: of operations), and what each stream of the device did."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type != "cpu":
        activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        if device.type != "cpu":
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(str(file := Path(folder, "trace.json")))
        streams = streams_of(json.loads(file.read_text())["traceEvents"])
    found: Counter[str] = Counter()
    for each in profile.key_averages():
        seconds = each.self_cpu_time_total if device.type == "cpu" else each.self_device_time_total
        kinds = (kind for kind, names in KINDS.items() if any(name in each.key.lower() for name in names))
        found[next(kinds, "others")] += seconds / 1e6
    return {"kernels, s": {kind: found[kind] for kind in (*KINDS, "others")}, "streams": streams}


def memory(device: torch.device) -> dict[str, float]:
    """GiB that are allocated now, that were at most, and that are reserved; none on the CPU."""
    if device.type == "cpu":
        return {"rest": 0.0, "peak": 0.0, "reserved": 0.0}
    read = (torch.cuda.memory_allocated, torch.cuda.max_memory_allocated, torch.cuda.memory_reserved)
    return {name: each(device) / 2**30 for name, each in zip(("rest", "peak", "reserved"), read, strict=True)}


def measure(
    library: Any, setting: Setting, sizes: Sizes, device: torch.device, network: Network | None, steps: int
) -> dict[str, Any]:
    """What is measured of one library: the median of so many steps, or of those that fit into ten seconds."""
    if device.type != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    before = memory(device)["rest"]
    trained = Trained(library, setting, sizes, device)
    if device.type != "cpu":
        torch.cuda.empty_cache()  # what the whole model took is not the step's
    is_captured, asks = captures(setting, device), _Asked(trained.step, network)
    step = captured(asks) if is_captured else trained.step
    for _ in range(0 if is_captured else _WARM_UP):
        asks()
    if device.type != "cpu":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    times, until = list[tuple[float, float]](), time.perf_counter() + 10
    while len(times) < steps and (len(times) < 2 or time.perf_counter() < until):
        times.append(timed(step, device))
    seconds, asked = (statistics.median(each) for each in zip(*times, strict=True))
    found: dict[str, Any] = {"seconds": seconds, "host seconds": asked, "steps": len(times)}
    found |= {"operations/s": sizes.operations * setting.accumulate / seconds, "GiB before": before}
    if setting.graph:
        found["graph"] = "captured" if is_captured else f"not captured on {device.type}: a step as it is"
    if not is_captured:  # the memory of a graph is its own, whether a step uses it or not
        found |= {f"{name} GiB": value for name, value in memory(device).items()}
    found |= asks.sent
    try:
        found |= {"synchronizations": synchronizations(step, device)}
        if not is_captured:  # CUPTI may end a process that has graphs
            found |= profiled(step, device)
    except Exception as error:  # the figures above are right without
        found["profiler failed"] = str(error)[:2000]
    return found


class _Asked:
    """A step that keeps what it asked of the network. A graph that replays it asks for nothing again."""

    def __init__(self, step: Callable[[], object], network: Network | None) -> None:
        self._step, self._network, self.sent = step, network, dict[str, float]()

    def __call__(self) -> None:
        before = self._total()
        self._step()
        self.sent = {name: now - before[name] for name, now in self._total().items()}

    def _total(self) -> dict[str, float]:
        totals = [] if self._network is None else self._network.totals().values()
        return {name: sum(getattr(each, name) for each in totals) for name in ("count", "bytes")}


def compare(setting: Setting, device: torch.device, steps: int, is_tiny: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is measured of each library in turn, or its error. Memory of the one before it is given back."""
    network, device_name = None, torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    backend = "gloo" if device.type == "cpu" else "nccl"
    if setting.ranks > 1:
        network = connect(0, setting.ranks, _LATENCY, setting.rate)
        dist.init_process_group(backend)
    elif dist.is_torchelastic_launched():
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    how = {"device": device_name, "torch": torch.__version__, "network in Python": network.why if network else ""}
    sizes = TINY if is_tiny else MODELS[setting.model]
    for name in setting.libraries:
        try:
            yield name, how | measure(LIBRARIES[name], setting, sizes, device, network, steps)
        except Exception as error:  # what one library cannot do must not hide the other
            yield name, how | {"error": f"{type(error).__name__}: {error}"[:2000]}
        gc.collect()


def predict(setting: Setting, is_tiny: bool, device_type: str) -> dict[str, float]:
    """The GiB that ``fullshard.explain`` predicts between steps and at the peak, without a device."""
    sizes = TINY if is_tiny else MODELS[setting.model]
    build = partial(shard, fullshard, setting, sizes)
    found = fullshard.explain(build, ranks=setting.ranks, batch=sizes.tokens(torch.device("cpu")), device=device_type)
    phases = {phase.name: phase.on_device / 2**30 for phase in found.memory}
    return {"rest GiB": phases["between steps"], "peak GiB": max(phases.values())}
