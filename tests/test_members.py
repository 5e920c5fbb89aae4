"""What cannot be sharded is refused before anything is changed: the model is then what it was."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import MixedPrecisionPolicy, ShardPlacementResult, WirePolicy, fully_shard, fully_shard_blocks
from fullshard.members import attribute_parameters
from fullshard.policies import Shard
from fullshard.wrap import ModuleWrapPolicy
from tests.harness import World, ranks
from tests.harness.models import seeded


class Final(nn.Linear):
    def __init_subclass__(cls) -> None:
        raise SyntaxError("no class may be derived from this one")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("counts", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x)
        return output


class Model(nn.Module):
    """Two blocks, and a module that some of the tests exchange."""

    def __init__(self, last: Callable[[], nn.Module] = lambda: nn.Linear(4, 4)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = last()


def _in_a_tuple(model: Any, world: World) -> None:
    model.pair = (model.last.weight, model.last.bias)


def _script(model: Any, world: World) -> None:
    model.last = torch.jit.script(nn.Linear(4, 4))


def _alias(model: Any, world: World) -> None:
    model.last.weight = nn.Parameter(model.blocks[1].inner.weight.data)


def _freeze(model: Any, world: World) -> None:
    model.last.weight.requires_grad_(False)


def _hook(model: Any, world: World) -> None:
    model.last.weight.register_post_accumulate_grad_hook(lambda param: None)


def _sparse(model: Any, world: World) -> None:
    model.last = nn.Embedding(4, 4, sparse=True)


def _final(model: Any, world: World) -> None:
    model.__class__ = type("FinalModel", (Model,), {})
    type(model).__init_subclass__ = Final.__init_subclass__  # type: ignore[method-assign]


def _differ(model: Any, world: World) -> None:
    model.last = nn.Linear(4, 4 + world.rank)


def _nothing(model: Any, world: World) -> None:
    pass


def _choose_dtype(param: Tensor) -> torch.dtype | None:
    if param.ndim == 1:
        raise LookupError("no dtype for it")
    return None


def _other_mesh(param: Tensor) -> ShardPlacementResult:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("r", "s"))
    return ShardPlacementResult(Shard(0), None if param.ndim == 2 else mesh)  # type: ignore[arg-type]


POLICY = ModuleWrapPolicy([Block])
REFUSED: dict[str, tuple[Callable[..., object], Callable[[Any, World], None], str]] = {
    "tuple": (fully_shard_blocks, _in_a_tuple, "in a tuple"),
    "script": (fully_shard_blocks, _script, "torch.jit.script"),
    "alias": (fully_shard_blocks, _alias, "one memory"),
    "sparse": (fully_shard_blocks, _sparse, "'last.weight' .* sparse gradients"),
    "class": (fully_shard_blocks, _final, "cannot get one: no class may be derived"),
    "ranks": (fully_shard_blocks, _differ, "do not shard the same"),
    "dtype": (
        partial(fully_shard, mp_policy=MixedPrecisionPolicy(param_dtype_override_fn=_choose_dtype)),
        _nothing,
        "no",
    ),
    "placement": (partial(fully_shard, shard_placement_fn=lambda param: Shard(1)), _nothing, "dim 1"),
    "wires": (
        partial(
            fully_shard,
            mesh=None,
            shard_placement_fn=_other_mesh,
            outer_wire_policy=WirePolicy(gather="int8"),
            outer_zero_stage=1,
        ),
        _nothing,
        "",
    ),
    "wrapped, tuple": (partial(FSDP, auto_wrap_policy=POLICY), _in_a_tuple, "in a tuple"),
    "wrapped, alias": (partial(FSDP, auto_wrap_policy=POLICY), _alias, "one memory"),
    "wrapped, sparse": (partial(FSDP, auto_wrap_policy=POLICY), _sparse, "'last.weight' .* sparse gradients"),
    "wrapped, frozen": (partial(FSDP, auto_wrap_policy=POLICY), _freeze, "is frozen"),
    "wrapped, hook": (partial(FSDP, auto_wrap_policy=POLICY), _hook, "has hooks"),
    "wrapped, ranks": (partial(FSDP, auto_wrap_policy=POLICY), _differ, "do not shard the same"),
}


def state_of(model: nn.Module) -> list[object]:
    """Everything of a model that sharding changes."""
    found: list[object] = []
    for name, module in model.named_modules():
        found += [name, id(module), type(module), [*module.__dict__], len(module._forward_hooks)]
        found += [(key, id(each), type(each)) for key, each in module.named_parameters(recurse=False)]
        found += [(key, id(each)) for key, each in module._buffers.items()]
    return found


@ranks(2)
@pytest.mark.parametrize("why", REFUSED)
def test_a_model_that_is_refused_is_what_it_was(world: World, why: str) -> None:
    shard, change, message = REFUSED[why]
    model = seeded(Model)
    change(model, world)
    before = state_of(model)
    with pytest.raises(Exception, match=message):
        shard(model)
    assert state_of(model) == before


@ranks(2)
def test_a_conversion_that_fails_leaves_a_model_that_can_be_used(world: World) -> None:
    """What it has converted is converted, as in a plain module, and gradients are not lost."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for param in model.parameters():
        param.grad_dtype = torch.float32
    fully_shard(model)
    model(torch.ones(1, 4)).sum().backward()
    before, calls = model.state_dict(), list[int]()

    def convert(tensor: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 2:
            raise MemoryError
        return tensor.double()

    with pytest.raises(MemoryError):
        model._apply(convert)
    assert all(param.grad is not None for param in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor(), before[name].full_tensor().to(value.dtype))


def test_parameters_in_attributes_are_found_with_their_path() -> None:
    linear = nn.Linear(2, 2)
    linear.kept = {"a": [linear.weight]}  # type: ignore[assignment]
    assert attribute_parameters(linear) == [(("kept", "a", 0), linear.weight)]
