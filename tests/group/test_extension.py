"""Tensor-subclass parameters that say themselves what is gathered: a gather in bf16, and one in int8 with scales."""

from __future__ import annotations

import gc
import os
import weakref
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import fullshard
from tests.fully_shard.cases import BOTH, Library, assert_close, first_of, inputs, local
from tests.harness import World, ranks
from tests.harness.compare import whole
from tests.harness.models import seeded, shard_each

CALLS: list[str] = []


class Gathered(Tensor):
    """A weight stored in fp32, of which subclasses say how it is gathered. Operations give plain tensors or copies."""

    @staticmethod
    def __new__(cls, held: Tensor) -> Gathered:
        return Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            dtype=held.dtype,
            device=held.device,
            requires_grad=held.requires_grad,
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Gathered:
        return cls(inner["held"])

    KEEP: ClassVar = {
        torch.ops.aten.empty_like.default,
        torch.ops.aten.new_zeros.default,
        torch.ops.aten.slice.Tensor,
        torch.ops.aten.split.Tensor,
        torch.ops.aten.narrow.default,
        torch.ops.aten.copy_.default,
        torch.ops.aten.view.default,
        torch.ops.aten.as_strided.default,
        torch.ops.aten._to_copy.default,
        torch.ops.aten._pin_memory.default,
        torch.ops.aten.clone.default,
        torch.ops.aten.detach.default,
        torch.ops.aten.alias.default,
    }

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        opened_args, opened_kwargs = pytree.tree_map_only(cls, lambda tensor: tensor.held, (args, kwargs or {}))
        result = op(*opened_args, **opened_kwargs)
        if op in cls.KEEP:
            if op is torch.ops.aten.copy_.default:
                return args[0]
            return pytree.tree_map_only(Tensor, cls, result)
        return result


class Bf16Gathered(Gathered):
    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        CALLS.append("pre")
        return (self.held.to(torch.bfloat16),), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        CALLS.append("post")
        (data,) = outputs
        if out is not None:
            with torch.no_grad():
                out.copy_(data.to(param_dtype).view(out.shape))
            return None
        result = data.to(param_dtype)
        return result, (result,)


class Int8Gathered(Gathered):
    """Travels as int8 with a scale for each row; takes all five arguments."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        assert mesh.ndim == 1
        assert isinstance(module, nn.Linear)
        assert outer_size == (8, 6)
        assert outer_stride == (6, 1)
        assert hasattr(mp_policy, "param_dtype")
        scale = self.held.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        return ((self.held / scale).round().to(torch.int8), scale), "metadata"

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        assert metadata == "metadata"
        data, scale = outputs
        if out is not None:
            with torch.no_grad():
                out.copy_(data * scale)
            return None
        result = (data * scale).to(param_dtype)
        return result, (result,)


class Kept(Gathered):
    """Travels as it is. The unsharded parameter keeps what was gathered, and nothing is copied at later gathers."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        CALLS.append("pre")
        return (self.held,), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        if out is None:
            return Kept(outputs[0]), outputs
        assert isinstance(out, Kept)
        assert out.held.untyped_storage().data_ptr() == outputs[0].untyped_storage().data_ptr()
        return None


def as_bf16(weight: Tensor) -> Tensor:
    return weight.to(torch.bfloat16).float()


def as_int8(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round() * scale


def build(kind: type[Gathered] | None) -> Any:
    """Two layers; the weight of the first is gathered in a way of its own."""
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)))
    if kind is not None:
        model[0].weight = nn.Parameter(kind(model[0].weight.detach()))
    return model


KINDS = pytest.mark.parametrize(("kind", "expected"), [(Bf16Gathered, as_bf16), (Int8Gathered, as_int8)])


@ranks(2)
@BOTH
@KINDS
@first_of("reshard", True, False)
def test_a_subclass_says_what_is_gathered(world: World, fsdp: Library, kind: Any, expected: Any, reshard: bool) -> None:
    model, reference = build(kind), build(None)
    for layer in (model[0], model[2], model):
        fsdp.fully_shard(layer, reshard_after_forward=reshard)
    weight = model[0].weight
    assert isinstance(weight, DTensor)
    assert isinstance(local(weight), kind)
    assert local(weight).shape == (4, 6)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, foreach=False) for each in (model, reference)]
    for _ in range(3):
        plain = build(None)
        plain.load_state_dict(reference.state_dict())
        with torch.no_grad():
            plain[0].weight.copy_(expected(reference[0].weight))
        found = model(inputs(world.rank))
        assert_close(found, plain(inputs(world.rank)), "output with the weight as it travelled")
        found.square().mean().backward()
        for rank in range(world.size):
            (plain(inputs(rank)).square().mean() / world.size).backward()
        assert_close(_plain(weight.grad), plain[0].weight.grad, "gradient of the subclass")
        for parameter, other in zip(reference.parameters(), plain.parameters(), strict=True):
            parameter.grad = other.grad
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _local(tensor: Any) -> Tensor:
    held = local(tensor)
    return held.held if isinstance(held, Gathered) else held


def _plain(tensor: Any) -> Tensor:
    """All rows of a sharded gradient."""
    mine = _local(tensor).contiguous()
    parts = [torch.empty_like(mine) for _ in range(2)]
    torch.distributed.all_gather(parts, mine)
    return torch.cat(parts)


@ranks(2)
def test_the_hooks_run_once_for_each_gather(world: World) -> None:
    CALLS.clear()
    model = build(Bf16Gathered)
    fullshard.fully_shard(model, reshard_after_forward=True)
    model(inputs()).sum().backward()
    assert CALLS == ["pre", "post"] * 2, "in forward and in backward"


@ranks(2)
@BOTH
def test_one_hook_without_the_other_is_refused(world: World, fsdp: Library) -> None:
    class Half(Gathered):
        def fsdp_pre_all_gather(self, mesh: Any) -> Any:
            return (self.held,), None

    with pytest.raises(AssertionError, match="fsdp_post_all_gather"):
        fsdp.fully_shard(build(Half))


class Unpadded(Bf16Gathered):
    """Sends a row less than it should."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        return (self.held[1:].to(torch.bfloat16),), None


@ranks(2)
def test_a_subclass_of_uneven_rows_must_send_padded_rows(world: World) -> None:
    model = seeded(lambda: nn.Linear(6, 5))
    model.weight = nn.Parameter(Unpadded(model.weight.detach()))
    fullshard.fully_shard(model)
    with pytest.raises(AssertionError, match="padded"):
        model(inputs())


@ranks(2)
def test_summoned_parameters_of_a_subclass_are_its_plain_values(world: World) -> None:
    model, reference = build(Bf16Gathered), build(None)
    fullshard.fully_shard(model)
    with fullshard.summon_full_params(model, writeback=False):
        assert torch.equal(model[0].weight.detach() * 1, reference[0].weight)
    assert whole(model[2].weight).shape == (5, 8)


@ranks(2)
def test_summoned_gradients_of_a_subclass_are_zeros_where_a_rank_has_none(world: World) -> None:
    model = build(Bf16Gathered)
    fullshard.fully_shard(model)
    model(inputs(0)).sum().backward()
    expected = whole(model[0].weight.grad)
    rows = expected.chunk(2)
    if world.rank == 1:
        model[0].weight.grad = None
    with fullshard.summon_full_params(model, writeback=False, with_grads=True):
        assert_close(model[0].weight.grad, torch.cat([rows[0], torch.zeros_like(rows[1])]), "gradient")


EVERYWHERE = first_of("transport", "p2p", "shm", "collective")


def of_kind(kind: type[Gathered] | None, rows: int = 8, width: int = 5) -> Any:
    """Two layers, the weights of both gathered in a way of their own; that of the second is saved for backward."""
    model = seeded(lambda: nn.Sequential(nn.Linear(6, rows), nn.Tanh(), nn.Linear(rows, width)))
    for layer in (model[0], model[2]) if kind is not None else ():
        layer.weight = nn.Parameter(kind(layer.weight.detach()))
    return model


def losses(world: World, model: Any, alone: bool = False) -> list[float]:
    """Of some steps on batches that differ between ranks; a model that is not sharded sees the batches of all."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    found = []
    for step in range(4):
        seen = range(world.size) if alone else [world.rank]
        each = [model(inputs(10 * step + rank)).square().mean() for rank in seen]
        (sum(each) / len(each)).backward()
        found.append(each[world.rank if alone else 0].item())
        optimizer.step()
        optimizer.zero_grad()
    return found


@ranks(2)
def test_what_was_gathered_is_freed_with_the_group_unless_its_storage_is_kept(world: World) -> None:
    model = of_kind(Kept)
    fullshard.fully_shard(model, reshard_after_forward=True)
    for keep in (False, True):
        model.set_keep_unsharded_storage(keep)
        model(inputs())
        model.unshard()
        held = model[0].weight.held
        assert held.untyped_storage().nbytes() == held.nbytes
        model.reshard()
        assert held.untyped_storage().nbytes() == (held.nbytes if keep else 0)


@ranks(2)
def test_a_subclass_is_made_of_its_own_tensors_and_has_the_attributes_of_users(world: World) -> None:
    model = of_kind(Kept)
    model[0].weight.note = "kept"
    whole_before = weakref.ref(model[0].weight.held)
    fullshard.fully_shard(model)
    gc.collect()
    assert whole_before() is None, "the whole weight is freed"
    assert model[0].weight.note == "kept"
    model(inputs())
    model.unshard()
    assert model[0].weight.note == "kept"
    assert isinstance(model[0].weight, Kept)


class WithInside(torch.autograd.Function):
    """Computes with what is inside of a weight, and saves that for backward, as torchao's int8 training does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.save_for_backward(x, weight.held)
        return x @ weight.held.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, held = ctx.saved_tensors
        return grad @ held, grad.T @ x


class Copied(Kept):
    """Is made of a copy, to which later gathers write."""

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        if out is None:
            copied = outputs[0].clone()
            return Copied(copied), (copied,)
        out.held.copy_(outputs[0])  # type: ignore[attr-defined]
        return None


class Inside(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = WithInside.apply(x, self.weight) if isinstance(self.weight, Gathered) else super().forward(x)
        return found


def inside(kind: type[Gathered] | None) -> Any:
    model = seeded(lambda: nn.Sequential(Inside(6, 6, bias=False), Inside(6, 6, bias=False)))
    for layer in model if kind is not None else ():
        layer.weight = nn.Parameter(kind(layer.weight.detach()))
    return model


@ranks(1, 2, 3)
@EVERYWHERE
@pytest.mark.parametrize(
    ("build", "kind"),
    [
        pytest.param(of_kind, Kept, id="kept"),
        pytest.param(partial(of_kind, rows=6, width=6), Bf16Gathered, id="written"),
        pytest.param(partial(of_kind, rows=7, width=2), Kept, id="padded"),
        pytest.param(inside, Kept, id="inside"),
        pytest.param(inside, Copied, id="inside of a copy"),
    ],
)
def test_what_was_gathered_is_saved_for_backward(world: World, build: Any, kind: Any, transport: str) -> None:
    """The weight of the second layer is gathered a second time between its forward and its backward."""
    os.environ["FULLSHARD_TRANSPORT"] = transport
    model = build(kind)
    shard_each(model[0], model[-1], model, reshard_after_forward=True)
    model(inputs())
    found = losses(world, model)
    how = 0.05 if kind is Bf16Gathered else 1e-5
    assert found == pytest.approx(losses(world, build(None), alone=True), rel=how)
    assert found[-1] < found[0]


@ranks(2)
@pytest.mark.parametrize("kind", [Kept, Copied])
def test_what_is_inside_of_a_subclass_is_not_read_after_its_group_was_resharded(world: World, kind: Any) -> None:
    model = inside(kind)
    fullshard.fully_shard(model[1], reshard_after_forward=True)
    fullshard.fully_shard(model)
    model(inputs())
    model[1].unshard()
    out = WithInside.apply(torch.randn(4, 6, requires_grad=True), model[1].weight)
    model[1].reshard()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@ranks(2)
@BOTH
def test_a_subclass_may_be_sharded_along_its_columns(world: World, fsdp: Library) -> None:
    model = of_kind(Kept)
    for layer in (model[0], model[2]):
        fsdp.fully_shard(layer, shard_placement_fn=lambda param: Shard(param.ndim - 1) if param.ndim > 1 else None)
    fsdp.fully_shard(model)
    assert losses(world, model) == pytest.approx(losses(world, of_kind(None), alone=True), rel=1e-5)


@ranks(2)
@BOTH
def test_a_subclass_is_not_sharded_along_columns_that_do_not_divide(world: World, fsdp: Library) -> None:
    model = of_kind(Kept, rows=7)
    with pytest.raises(NotImplementedError, match=r"along dim 1|on dim 1"):
        fsdp.fully_shard(model[2], shard_placement_fn=lambda param: Shard(param.ndim - 1))


@ranks(1, 2)
@EVERYWHERE
@pytest.mark.parametrize("how", ["set", "assign"])
@first_of("when", "between", "before")
def test_a_local_tensor_that_is_set_after_sharding_says_what_is_gathered(
    world: World, how: str, when: str, transport: str
) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = transport
    model, reference = build(None), build(None)
    fullshard.fully_shard(model[0])
    fullshard.fully_shard(model)
    if when == "between":
        model(inputs()).sum().backward()
        model.zero_grad()
    weight = model[0].weight
    if how == "set":
        given = weight._local_tensor = Bf16Gathered(local(weight).detach().clone())
    else:
        given = Bf16Gathered(local(weight).detach().clone())
        shown = DTensor.from_local(given, weight.device_mesh, weight.placements, run_check=False)
        model.load_state_dict({"0.weight": shown}, strict=False, assign=True)
    with torch.no_grad():
        reference[0].weight.copy_(as_bf16(reference[0].weight))
    CALLS.clear()
    for _ in range(2):
        found = model(inputs())
        assert_close(found, reference(inputs()), "output")
        found.sum().backward()
    assert CALLS == ["pre", "post"] * 4
    assert isinstance(local(model[0].weight), Bf16Gathered)
    if how == "set":
        assert model[0].weight._local_tensor is given


@ranks(2)
@EVERYWHERE
@BOTH
def test_a_subclass_may_take_the_place_of_another(world: World, fsdp: Library, transport: str) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = transport
    model, reference = build(Bf16Gathered), build(None)
    fsdp.fully_shard(model)
    model(inputs()).sum().backward()
    model.zero_grad()
    model.reshard()
    weight = model[0].weight
    weight._local_tensor = Bf16Gathered(2 * local(weight).held)
    with torch.no_grad():
        reference[0].weight.copy_(as_bf16(2 * reference[0].weight))
    for _ in range(2):
        assert_close(model(inputs()), reference(inputs()), "output")


@ranks(2)
@EVERYWHERE
def test_a_plain_tensor_may_take_the_place_of_a_subclass(world: World, transport: str) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = transport
    model, reference = build(Bf16Gathered), build(None)
    fullshard.fully_shard(model)
    model(inputs()).sum().backward()
    model.zero_grad()
    model[0].weight._local_tensor = local(model[0].weight).held.clone()
    CALLS.clear()
    assert losses(world, model) == pytest.approx(losses(world, reference, alone=True), rel=1e-5)
    assert not CALLS
