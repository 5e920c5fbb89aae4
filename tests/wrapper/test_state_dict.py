"""What `state_dict` of a wrapped model holds: keys, order, shapes, dtypes, values and memory, of each kind."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor

import fullshard
from fullshard.wrapper.state_dict import own_copy
from tests.checkpoint.state_dicts import (
    KINDS,
    assert_equal_states,
    build,
    is_compact,
    look,
    mesh_options,
    speaking,
    whole,
    wrapped,
)
from tests.fully_shard.cases import first_of
from tests.harness import World, ranks
from tests.harness.compare import mean_square
from tests.harness.models import random_batch, seeded
from tests.harness.wrapper import EACH_WRAPPER, HYBRID, ORIGINAL, STRATEGIES, WRAPPERS, assert_all_see, wrap

FSDP = fullshard.FullyShardedDataParallel
BATCH = random_batch(4, 6)


#: Local state dicts of original parameters have the fragments too with torch, and numbers in the gaps between them.
def kinds_of_torch(original: bool) -> tuple[str, ...]:
    return tuple(kind for kind in KINDS if kind != "LOCAL" or not original)


def part(model: Any, where: str) -> Any:
    """The module whose state dict is made, in a wrapped `Net`."""
    return {"root": lambda: model, "inner": lambda: model.module.blocks[1], "plain": lambda: model.module.blocks}[
        where
    ]()


@ranks(1, 2, 3)
@first_of("original", False, True)
def test_state_dicts_are_torchs(world: World, original: bool) -> None:
    def observe(fsdp: ModuleType, kind: str, strategy: str) -> Any:
        model = wrapped(fsdp, build(), strategy=strategy, original=original, **mesh_options(world, strategy, kind))
        seen = []
        for where in ("root", "inner", "plain"):
            with speaking(fsdp, part(model, where), kind):
                state = part(model, where).state_dict()
                seen.append(locally(state) if kind == "LOCAL" else look(state))
                seen.append(locally(part(model, where).state_dict(prefix="a.b.")))
            seen.append(look(part(model, where).state_dict()))
        return seen

    cases = list(itertools.product(kinds_of_torch(original), STRATEGIES))
    assert_all_see(lambda fsdp: {case: observe(fsdp, *case) for case in cases})


def locally(state: Any) -> Any:
    """What a state dict has on this rank; torch's flat parameters come in a class of its own."""
    seen = {}
    for name, value in state.items():
        local: Tensor = value
        if isinstance(value, DTensor):
            local = value.to_local()
        elif hasattr(value, "local_shards"):
            shards = value.local_shards()
            local = shards[0].tensor if shards else torch.empty(0)
        seen[name] = (list(value.size()), local.dtype, local.tolist())
    return seen


@pytest.mark.slow
@ranks(4)
@first_of("strategy", *HYBRID)
@first_of("original", False, True)
def test_state_dicts_of_hybrids(world: World, strategy: str, original: bool) -> None:
    options = mesh_options(world, strategy)

    def observe(fsdp: ModuleType, kind: str) -> Any:
        model = wrapped(fsdp, build(), strategy=strategy, original=original, **options)
        with speaking(fsdp, model, kind):
            return model.state_dict()

    for kind in KINDS:
        state = observe(fullshard, kind)
        sharded = {name: value for name, value in state.items() if isinstance(value, DTensor)}
        assert all(value.device_mesh == options["device_mesh"] for value in sharded.values())
        assert bool(sharded) == (kind != "FULL")
        if kind != "LOCAL":  # of which torch cannot make one here
            assert_equal_states(whole(state), build().state_dict())
            assert all(is_compact(value) for value in state.values())
    assert_all_see(lambda fsdp: {kind: look(observe(fsdp, kind)) for kind in ("FULL", "SHARDED")})


@ranks(1, 2, 3)
@first_of("strategy", *STRATEGIES)
@ORIGINAL
def test_values_are_those_of_the_plain_module(world: World, strategy: str, original: bool) -> None:
    """In private memory, of which nothing else is part."""
    model = wrapped(fullshard, build(), strategy=strategy, original=original)
    plain, names = build().state_dict(), [name for name, _ in build().named_parameters(remove_duplicate=False)]
    holds_shards = strategy != "NO_SHARD" and world.size > 1
    for kind, offload_to_cpu in itertools.product(KINDS, (False, True)):
        with speaking(fullshard, model, kind, offload_to_cpu=offload_to_cpu):
            state = model.state_dict()
        if kind == "LOCAL" and holds_shards:
            shards = {name: value for name, value in state.items() if name.endswith("_flat_param")}
            assert set(plain) - set(state) == set(names)
            numel = sum(parameter.numel() for parameter in build().parameters())
            aligned = 3 * 4 * 4 if original else 0  # at most 3 elements between parameters
            assert numel <= sum(value.numel() for value in shards.values()) <= numel + aligned
            continue
        assert_equal_states(whole(state), plain)
        owned = [state[name] for name in names]
        assert all(isinstance(value, DTensor) == (kind == "SHARDED" and holds_shards) for value in owned)
        assert all(is_compact(value) and value.device.type == "cpu" for value in owned)
        for value in owned:
            (value.to_local() if isinstance(value, DTensor) else value).fill_(9.0)
        with speaking(fullshard, model, kind, offload_to_cpu=offload_to_cpu):
            assert_equal_states(whole(model.state_dict()), plain)


@ranks(2, 3)
@first_of("strategy", *STRATEGIES)
@ORIGINAL
def test_one_rank_gets_all_and_the_others_nothing(world: World, strategy: str, original: bool) -> None:
    model = wrapped(fullshard, build(), strategy=strategy, original=original)
    for offload_to_cpu in (False, True):
        with speaking(fullshard, model, "FULL", rank0_only=True, offload_to_cpu=offload_to_cpu):
            found = [each.state_dict() for each in (model, model.module.blocks[1], model.module.blocks)]
        gets_all = world.rank == 0 or strategy == "NO_SHARD"
        plain = build()
        for state, module in zip(found, (plain, plain.blocks[1], plain.blocks), strict=True):
            assert_equal_states(state, module.state_dict() if gets_all else {})


@ranks(2)
@ORIGINAL
def test_ranks_that_get_nothing_get_what_they_get_with_torch(world: World, original: bool) -> None:
    """With buffers in a wrapper that has no parameters itself, and in one of which they are ignored."""

    def observe(fsdp: ModuleType, strategy: str) -> Any:
        model: Any = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 5))
        model.register_buffer("own", torch.zeros(2))
        model[0] = wrap(fsdp, model[0], strategy=strategy, original=original)
        model[2] = wrap(fsdp, model[2], strategy=strategy, original=original)
        model = wrap(fsdp, model, strategy=strategy, original=original, ignored_modules=[model[1]])
        with speaking(fsdp, model, "FULL", rank0_only=True):
            return list(model.state_dict())

    assert_all_see(lambda fsdp: {strategy: observe(fsdp, strategy) for strategy in STRATEGIES})


@pytest.mark.slow
@ranks(4)
def test_the_first_rank_of_each_node_of_a_hybrid_gets_all(world: World) -> None:
    model = wrapped(fullshard, build(), strategy="HYBRID_SHARD", **mesh_options(world, "HYBRID_SHARD"))
    with speaking(fullshard, model, "FULL", rank0_only=True):
        state = model.state_dict()
    assert_equal_states(state, build().state_dict() if world.rank % 2 == 0 else {})


def plain_root(fsdp: ModuleType, **options: Any) -> Any:
    model: Any = build()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = wrap(fsdp, block, **options)
    return model


def checkpoint_inside(fsdp: ModuleType, **options: Any) -> Any:
    model: Any = build()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = wrap(fsdp, checkpoint_wrapper(block), **options)
    return wrap(fsdp, model, **options)


def checkpoint_outside(fsdp: ModuleType, **options: Any) -> Any:
    model: Any = build()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(wrap(fsdp, block, **options))
    return wrap(fsdp, model, **options)


def ignoring(name: str) -> Callable[..., Any]:
    def make(fsdp: ModuleType, **options: Any) -> Any:
        model = build()
        return wrap(fsdp, model, ignored_modules=[model.get_submodule(name)], **options)

    return make


TREES: dict[str, Callable[..., Any]] = {
    "plain root": plain_root,
    "checkpoint inside": checkpoint_inside,
    "checkpoint outside": checkpoint_outside,
    **{f"ignored {name}": ignoring(name) for name in ("blocks.0", "blocks.1.1", "first")},
}


@ranks(2)
@first_of("original", True, False)
def test_state_dicts_of_other_trees_are_torchs(world: World, original: bool) -> None:
    """Names are without checkpoint wrappers, and what is ignored is there as it is."""

    def observe(fsdp: ModuleType, tree: str, kind: str) -> Any:
        model = TREES[tree](fsdp, original=original, **mesh_options(world, kind=kind))
        with speaking(fsdp, model, kind):
            state = model.state_dict()
        return locally(state) if kind == "LOCAL" else look(state)

    cases = list(itertools.product(TREES, kinds_of_torch(original)))
    assert_all_see(lambda fsdp: {case: observe(fsdp, *case) for case in cases})


@ranks(2)
@first_of("original", False, True)
def test_between_the_parts_of_a_step_and_after_steps(world: World, original: bool) -> None:
    """Making a state dict disturbs neither the step that is under way nor the next."""
    plain, model = build(), wrapped(fullshard, build(), original=original)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        losses = [mean_square(each, BATCH(step)) for each in (plain, model)]
        for kind in KINDS:
            with speaking(fullshard, model, kind):
                state = whole(model.state_dict())
            for name, value in plain.state_dict().items() if kind != "LOCAL" else ():
                assert torch.allclose(state[name], value, atol=1e-6), name
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in model.state_dict().items():
        assert torch.allclose(value, plain.state_dict()[name], atol=1e-6), name


@ranks(2)
@ORIGINAL
def test_buffers_have_their_own_dtype_under_mixed_precision(world: World, original: bool) -> None:
    """As have parameters; the model keeps buffers of low precision."""

    def observe(fsdp: ModuleType, kind: str) -> Any:
        options = {"original": original, "flags": {"buffer_dtype": torch.bfloat16}, **mesh_options(world, kind=kind)}
        model: Any = build()
        model.blocks[0] = wrap(fsdp, model.blocks[0], **options)
        model = wrap(fsdp, model, **options)
        assert model.check_is_root()  # which begins a tree, as a forward does
        with speaking(fsdp, model, kind):
            before = {name: value.dtype for name, value in model.state_dict().items()}
        return [before, {name: buffer.dtype for name, buffer in model.named_buffers()}]

    assert_all_see(lambda fsdp: {kind: observe(fsdp, kind) for kind in ("FULL", "SHARDED")})
    local, _ = observe(fullshard, "LOCAL")
    assert all(local[name] == buffer.dtype for name, buffer in build().named_buffers() if name != "scratch")


@ranks(2)
@EACH_WRAPPER
@ORIGINAL
def test_hooks_of_users_run(world: World, library: str, original: bool) -> None:
    fsdp = WRAPPERS[library]
    inner = build()
    calls: list[str] = []
    linear = inner.blocks[0][0]
    linear.register_state_dict_pre_hook(lambda *_: calls.append("before saving"))
    linear.register_state_dict_post_hook(lambda *_: calls.append("after saving"))
    linear.register_load_state_dict_pre_hook(lambda *_: calls.append("before loading"))
    linear.register_load_state_dict_post_hook(lambda *_: calls.append("after loading"))
    model = wrapped(fsdp, inner, original=original)
    model.register_state_dict_post_hook(lambda m, state, prefix, _: state.update({f"{prefix}extra": torch.ones(1)}))
    state = model.state_dict()
    assert list(state)[-1] == "extra"
    del state["extra"]
    model.load_state_dict(state)
    assert calls == ["before saving", "after saving", "before loading", "after loading"]


@ranks(2)
def test_extra_state_of_modules_travels(world: World) -> None:
    class Extra(nn.Linear):
        told: Any = None

        def get_extra_state(self) -> Any:
            return {"weight": list(self.weight.shape)}

        def set_extra_state(self, state: Any) -> None:
            self.told = state

    for original in (False, True):
        model = wrap(fullshard, nn.Sequential(Extra(6, 5)), original=original)
        state = model.state_dict()
        assert state["0._extra_state"] == {"weight": [5, 6]}
        model.load_state_dict(state)
        assert model[0].told == {"weight": [5, 6]}


@ranks(2)
@ORIGINAL
def test_kept_variables_are_parameters_and_versions_those_of_the_plain_model(world: World, original: bool) -> None:
    model = wrapped(fullshard, build(), original=original)
    state, expected = model.state_dict(keep_vars=True), build().state_dict()
    assert isinstance(state["first.weight"], nn.Parameter)
    assert_equal_states({name: value.detach() for name, value in state.items()}, expected)
    assert not any(value.requires_grad for value in model.state_dict().values())
    found, metadata = model.state_dict()._metadata, expected._metadata  # type: ignore[attr-defined]
    assert {name: found[name] for name in metadata} == dict(metadata)


@ranks(2)
@EACH_WRAPPER
@ORIGINAL
@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
def test_inside_of_summon_full_params(world: World, library: str, original: bool, kind: str) -> None:
    """What was written there is seen, and what is shown there stays."""
    fsdp = WRAPPERS[library]
    model = wrapped(fsdp, build(), original=original, **mesh_options(world))
    expected = build()
    with fsdp.FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
        for each in (model.module, expected):
            each.gain.fill_(5.0)
            each.first.bias.copy_(torch.arange(7.0))
        with speaking(fsdp, model, kind):
            state = model.state_dict()
        shown = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
        assert shown == {name: list(parameter.shape) for name, parameter in expected.named_parameters()}
        assert_equal_states(whole(state), expected.state_dict())
        model.module.gain.fill_(6.0)
    assert whole(state)["gain"].item() == 5.0
    assert model.state_dict()["gain"].item() == 6.0


@ranks(2)
@EACH_WRAPPER
@ORIGINAL
def test_inside_of_a_forward_it_is_refused(world: World, library: str, original: bool) -> None:
    model = wrapped(WRAPPERS[library], build(), original=original)
    model.module.first.register_forward_hook(lambda *_: model.state_dict())
    with pytest.raises(AssertionError):
        model(*BATCH(0))


@ranks(2)
@ORIGINAL
def test_a_module_that_stands_in_two_places(world: World, original: bool) -> None:
    def shared() -> nn.Sequential:
        linear = seeded(lambda: nn.Linear(5, 5))
        return nn.Sequential(linear, nn.Tanh(), linear)

    model, plain = wrap(fullshard, shared(), original=original), shared().state_dict()
    for rank0_only in (False, True):
        with speaking(fullshard, model, "FULL", rank0_only=rank0_only):
            assert_equal_states(model.state_dict(), {} if rank0_only and world.rank else plain)
    with speaking(fullshard, model, "SHARDED"):
        state = model.state_dict()
        model.load_state_dict(state)
        assert_equal_states(whole(state), plain)


def test_a_copy_has_memory_of_its_own_in_the_usual_order() -> None:
    channels_last = torch.arange(16.0).view(1, 2, 2, 4).to(memory_format=torch.channels_last)
    copied = own_copy(channels_last, to_cpu=True)
    assert torch.equal(copied, channels_last)
    assert copied.is_contiguous()
    assert copied.untyped_storage().data_ptr() != channels_last.untyped_storage().data_ptr()
