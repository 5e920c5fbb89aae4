"""What a step of an optimizer costs where parameters are DTensors: its CPU time over that of a step on plain tensors.

One process simulates a rank of two, for a step communicates nothing. Many small parameters are sharded by
fullshard and by torch; a third model has as many plain ones, of the size of a shard. All run a backward in each round,
and only the step is timed.
"""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.contenders import FSDP2, ours
from benchmarks.ranks import run_simulated

PLAIN = "plain tensors"
_RANKS = 2
_WARM_UP = 4
_PROCESSES = 4  # how memory happens to lie in one moves a step by a fifth
_KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {}),
    "SGD, momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "Adam": (torch.optim.Adam, {}),
    "AdamW": (torch.optim.AdamW, {}),
}
_HOW: dict[str, dict[str, bool]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def measure_optimizer(count: int, width: int, rounds: int) -> dict[str, Any]:
    """CPU seconds of a step for each optimizer and contender, by round; none where torch cannot do it."""
    runs = [run_simulated(_measure, _RANKS, count, width, rounds) for _ in range(_PROCESSES)]
    kinds = {
        kind: {name: {"cpu": [taken for run in runs for taken in run[kind][name]["cpu"]]} for name in contenders}
        for kind, contenders in runs[0].items()
    }
    return {"count": count, "width": width, "kinds": kinds}


class _Weights(nn.Module):
    def __init__(self, count: int, rows: int, width: int) -> None:
        super().__init__()
        for number in range(count):
            self.register_parameter(f"weight{number}", nn.Parameter(torch.randn(rows, width)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(weight * x).sum() for weight in self.parameters()]).sum()


def _measure(count: int, width: int, rounds: int) -> dict[str, Any]:
    models: dict[str, nn.Module] = {PLAIN: _Weights(count, width // _RANKS, width)}
    for contender in (*ours(every_transport=False), FSDP2):
        models[contender.name] = contender.wrap(_Weights(count, width, width), [])
    return {
        f"{kind}, {how}": _measure_kind(models, cls, {"lr": 1e-6, **options, **_HOW[how]}, rounds)
        for kind, (cls, options) in _KINDS.items()
        for how in _HOW
    }


def _measure_kind(models: dict[str, nn.Module], cls: Any, options: dict[str, Any], rounds: int) -> dict[str, Any]:
    optimizers = {name: cls(model.parameters(), **options) for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for number in range(-_WARM_UP, rounds):
        order = list(optimizers)
        random.Random(number).shuffle(order)
        for name in order:
            models[name](torch.ones(1)).backward()
            begin = time.process_time()
            try:
                optimizers[name].step()
            except NotImplementedError:  # an operator for which DTensor has no rule
                del optimizers[name]
                continue
            taken = time.process_time() - begin
            optimizers[name].zero_grad()
            if number >= 0:
                seconds[name].append(taken)
    return {name: {"cpu": taken} for name, taken in seconds.items() if taken}
