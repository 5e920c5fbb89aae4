"""What the tests of optimizers share: optimizers by name, pairs of models, and a look for DTensors inside a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import fullshard
from fullshard import OffloadPolicy
from tests.fully_shard.cases import inputs, local
from tests.harness.compare import each_block
from tests.harness.models import OddParameters, seeded

LOOP, FOREACH, FUSED = {"foreach": False}, {"foreach": True}, {"fused": True}

#: Classes of torch.optim and arguments, each in every implementation that it has.
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    f"{cls.__name__}{''.join(f' {name}' for name in options)} {how_name}": (cls, {"lr": 0.02, **options, **how})
    for cls, choices in {
        torch.optim.SGD: [{}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {"maximize": True}],
        torch.optim.Adam: [{}, {"amsgrad": True, "weight_decay": 0.1}],
        torch.optim.AdamW: [{}, {"maximize": True}],
        torch.optim.Adagrad: [{}],
        torch.optim.NAdam: [{}],
        torch.optim.RAdam: [{}],
        torch.optim.Adamax: [{}],
        torch.optim.Adadelta: [{}],
        torch.optim.RMSprop: [{"momentum": 0.9, "centered": True}],
        torch.optim.ASGD: [{"t0": 1}],
        torch.optim.Rprop: [{}],
    }.items()
    for options in choices
    for how_name, how in {"loop": LOOP, "foreach": FOREACH, "fused": FUSED}.items()
    if how is not FUSED or cls in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
}

#: What torch cannot do on DTensors.
BEYOND_TORCH = [
    name
    for name in OPTIMIZERS
    if name.startswith("Rprop") or (name.startswith(("SGD", "Adagrad")) and name.endswith("fused"))
]


class Sign(Optimizer):
    """An optimizer of a user's own, which does what users do: counters in the state, in the options and on itself."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.calls += 1
        for group in self.param_groups:
            group["steps"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["count"] = state.get("count", 0) + 1
                state["mean"] = param.grad.lerp(state["mean"], 0.5) if "mean" in state else param.grad.clone()
                if state["count"] == 2:
                    state["low"] = param.grad.bfloat16()
                    state.pop("first")
                state.setdefault("first", param.detach().clone()) if state["count"] == 1 else None
                param.sub_(state["mean"].sign(), alpha=group["lr"])
        return loss


def on_dtensors(cls: type[Optimizer]) -> type[Optimizer]:
    """The same class under another name, which is left alone."""
    return type(f"{cls.__name__}OnDTensors", (cls,), {})


def sharded(build: Callable[[], nn.Module] = OddParameters, **options: Any) -> Any:
    """A seeded model with a group for each block and one for the rest."""
    model = seeded(build)
    each_block(**options)(fullshard, model)
    return model


def backward(model: nn.Module, seed: int, scale: float = 1.0) -> None:
    (model(inputs(seed)).square().mean() * scale).backward()


def assert_same(one: Iterable[Tensor], other: Iterable[Tensor], what: str = "parameter") -> None:
    """Equal to the last bit, here."""
    for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        assert torch.equal(local(mine), local(theirs)), f"{what} {number} differs"


def state_of(optimizer: Optimizer) -> list[tuple[str, type, Any]]:
    """Names, types and values of an optimizer's state, in the order of its parameters."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    assert set(optimizer.state) <= set(params), "the state is keyed by the optimizer's own parameters"
    return [
        (name, type(value), value)
        for param in params
        if param in optimizer.state
        for name, value in optimizer.state[param].items()
    ]


def assert_same_state(one: Optimizer, other: Optimizer) -> None:
    mine, theirs = state_of(one), state_of(other)
    assert [each[:2] for each in mine] == [each[:2] for each in theirs]
    for (name, _, value), (_, _, expected) in zip(mine, theirs, strict=True):
        if isinstance(value, Tensor):
            assert value.dtype == expected.dtype
            assert value.shape == expected.shape
            assert torch.equal(local(value), local(expected)), name
            if isinstance(value, DTensor):
                assert value.placements == expected.placements
        else:
            assert value == expected, name


class OperatorsOnDTensors(TorchDispatchMode):
    """Names the operators that were given a DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def runs_on_local(optimizer: Optimizer) -> bool:
    """Take a step; whether none of it was done on DTensors."""
    with OperatorsOnDTensors() as operators:
        optimizer.step()
    return not operators.found


class Pair:
    """Two equal sharded models: one is stepped on local tensors, the other on DTensors."""

    def __init__(
        self,
        cls: type[Optimizer] = torch.optim.AdamW,
        build: Any = OddParameters,
        offload_policy: Any = None,
        **options: Any,
    ) -> None:
        self.models = [sharded(build, offload_policy=offload_policy or OffloadPolicy()) for _ in range(2)]
        classes = (cls, on_dtensors(cls))
        self.optimizers = [
            each(model.parameters(), **{"lr": 0.02, **options})
            for each, model in zip(classes, self.models, strict=True)
        ]

    @property
    def both(self) -> Iterator[tuple[Any, Optimizer]]:
        return zip(self.models, self.optimizers, strict=True)

    def step(self, seed: int = 0) -> None:
        for model, _ in self.both:
            backward(model, seed)
        assert runs_on_local(self.optimizers[0])
        assert not runs_on_local(self.optimizers[1])
        self.check()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def check(self) -> None:
        assert_same(*(model.parameters() for model in self.models))
        assert_same_state(*self.optimizers)
