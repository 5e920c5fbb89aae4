"""`fully_shard` beside what else people use: compile, autocast, clipping, scaling, checkpointing, and wrap policies."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fullshard
import fullshard.wrap
from fullshard.group.strategy import Placement
from tests.fully_shard.cases import (
    BOTH,
    Library,
    Twins,
    are_sharded,
    assert_close,
    first_of,
    groups_of,
    inputs,
    shard_mlp,
    twins,
)
from tests.harness import World, fake_world, ranks
from tests.harness.compare import each_block, whole
from tests.harness.models import MLP, Block, Transformer, seeded


def tokens(seed: int) -> Tensor:
    return (torch.arange(6).view(2, 3) + seed) % Transformer.VOCABULARY


@ranks(2, timeout=120)
@first_of("when", "a whole model", "blocks before sharding", "blocks after sharding")
@first_of("backend", "eager", "aot_eager")
def test_compiled(world: World, backend: str, when: str) -> None:
    model, reference = seeded(lambda: MLP((6, 6, 6))), seeded(lambda: MLP((6, 6, 6)))
    for block in model.blocks:
        if when == "blocks before sharding":
            block.compile(backend=backend)
        fullshard.fully_shard(block, reshard_after_forward=True)
        if when == "blocks after sharding":
            block.compile(backend=backend)
    fullshard.fully_shard(model)
    if when == "a whole model":
        model.compile(backend=backend)
    pair = Twins(world, model, reference)
    for _ in range(3):
        pair.step()


@ranks(2)
@BOTH
def test_autocast_computes_in_its_dtype_and_reduces_in_the_original(world: World, fsdp: Library) -> None:
    model = shard_mlp(fsdp)
    weight = model.blocks[0][0].weight
    seen: list[torch.dtype] = []
    model.blocks[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(inputs()).sum()
    loss.backward()
    assert seen == [torch.bfloat16]
    assert weight.grad.dtype is torch.float32


@ranks(2)
def test_selective_checkpointing(world: World) -> None:
    class Selective(MLP):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                context = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
                x = checkpoint(block, x, use_reentrant=False, context_fn=context)
            return x * self.scale

    pair = twins(world, lambda: seeded(Selective), reshard_after_forward=True)
    for _ in range(3):
        pair.step()


@ranks(2)
def test_checkpoints_that_do_not_stop_early(world: World) -> None:
    from torch.utils.checkpoint import set_checkpoint_early_stop

    pair = twins(world, lambda: seeded(lambda: Transformer(checkpointing="non-reentrant")))
    with set_checkpoint_early_stop(False):
        for _ in range(2):
            pair.step(batch=tokens)
    pair.step(batch=tokens)


@ranks(2)
@first_of("checkpointing", "non-reentrant", "reentrant", "none")
def test_dropout_is_the_same_in_a_recomputation(world: World, checkpointing: Any) -> None:
    class Dropping(Transformer):
        def __init__(self) -> None:
            super().__init__(checkpointing=checkpointing)
            for block in self.blocks:
                block.down = nn.Sequential(block.down, nn.Dropout(0.5))

    model, reference = seeded(Dropping), seeded(Dropping)
    each_block()(fullshard, model)
    parameters = list(model.parameters())
    for each in (model, reference):
        torch.manual_seed(3)
        each(tokens(0)).square().mean().backward()
    for parameter, expected in zip(parameters, reference.parameters(), strict=True):
        assert_close(whole(parameter.grad), expected.grad, "gradient")


@ranks(2)
def test_the_blocks_of_a_model_are_found(world: World) -> None:
    model, reference = seeded(lambda: Transformer(layers=3)), seeded(lambda: Transformer(layers=3))
    assert fullshard.fully_shard_blocks(model) is model
    assert isinstance(model, fullshard.FSDPModule)
    assert all(isinstance(block, fullshard.FSDPModule) for block in model.blocks)
    assert sum(isinstance(module, fullshard.FSDPModule) for module in model.modules()) == 4
    Twins(world, model, reference).step(batch=tokens)


def test_found_blocks_have_the_options_of_the_call_unless_they_are_sharded_already() -> None:
    with fake_world(2):
        model = seeded(Transformer)
        fullshard.fully_shard(model.blocks[0])
        state, kept = fullshard.fully_shard.state(model.blocks[0]), groups_of(model.blocks[0])
        policy = fullshard.MixedPrecisionPolicy(torch.bfloat16)
        fullshard.fully_shard_blocks(model, reshard_after_forward=False, mp_policy=policy)
        assert fullshard.fully_shard.state(model.blocks[0]) is state
        for group in groups_of(model):
            is_new = group not in kept
            assert (group.options.strategy.after_forward is Placement.REPLICATED) is is_new
            assert (group.options.mp_policy.param_dtype is torch.bfloat16) is is_new


@ranks(2)
def test_a_wrap_policy_picks_the_modules_and_passes_the_options_on(world: World) -> None:
    for library in (fullshard, torch_fsdp):
        model, reference = seeded(Transformer), seeded(Transformer)
        policy = library.wrap.ModuleWrapPolicy({Block, nn.Embedding})
        fullshard.fully_shard(model, auto_wrap_policy=policy, reshard_after_forward=False)
        picked = [name for name, module in model.named_modules() if isinstance(module, fullshard.FSDPModule)]
        assert picked == ["", "tokens", "blocks.0", "blocks.1"]
        pair = Twins(world, model, reference)
        pair.step(batch=tokens)
        pair.step(batch=tokens)
        model(tokens(0))
        assert not are_sharded(model)


@ranks(2)
def test_policies_of_torch_are_taken(world: World) -> None:
    model = seeded(lambda: nn.Linear(6, 5))
    seen: list[Any] = []
    model.register_forward_hook(lambda module, args, output: seen.append(module.weight.dtype))
    precision = torch_fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    offload = torch_fsdp.CPUOffloadPolicy(pin_memory=False)
    fullshard.fully_shard(model, mp_policy=precision, offload_policy=offload)
    assert model(inputs()).dtype is torch.float32
    assert seen == [torch.bfloat16]


@ranks(2)
def test_a_batch_norm_of_running_statistics(world: World) -> None:
    def build() -> Any:
        model = nn.Module()
        model.blocks = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        model.forward = model.blocks.forward
        return model

    model, reference = seeded(build), seeded(build)
    each_block()(fullshard, model)
    for seed in range(2):
        model(inputs(seed)).sum().backward()
        reference(inputs(seed)).sum().backward()
    assert_close(model.blocks[1].running_mean, reference.blocks[1].running_mean, "running mean")


@ranks(2)
def test_gathers_have_the_labels_of_torch_in_a_profile(world: World) -> None:
    model = shard_mlp()
    model(inputs()).sum().backward()
    for act in (lambda: model(inputs()).sum().backward(), model.blocks[1].unshard):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            act()
        assert "FSDP::all_gather (blocks.1)" in {event.key for event in profile.key_averages()}


def convolution() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))


@ranks(2)
def test_batch_norms_compute_in_the_dtype_of_their_statistics(world: World) -> None:
    """In bf16 their kernels refuse statistics in fp32. The rest of the group computes in bf16."""
    model, reference, x = seeded(convolution), seeded(convolution), torch.randn(4, 3, 8, 8)
    fullshard.fully_shard(model, mp_policy=fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    for module in (reference[0], reference[3]):
        module.to(torch.bfloat16)
    seen = []
    model[1].register_forward_hook(lambda module, args, output: seen.append((module.weight.dtype, output.dtype)))
    for net, batch in ((model, x), (reference, x.bfloat16())):
        net(batch).float().square().mean().backward()
    assert seen == [(torch.float32, torch.bfloat16)]
    assert torch.equal(model[1].running_mean, reference[1].running_mean)
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(param.grad.full_tensor(), expected.grad.float())
    assert torch.equal(model.eval()(x), reference.eval()(x.bfloat16()))


@ranks(2)
def test_the_users_choice_of_a_dtype_goes_before_that_for_batch_norms(world: World) -> None:
    model = seeded(convolution)
    asked: list[tuple[int, ...]] = []

    def chosen(param: nn.Parameter) -> torch.dtype | None:
        asked.append(tuple(param.shape))
        return torch.bfloat16 if param is first else None

    first = model[1].weight
    policy = fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32, param_dtype_override_fn=chosen)
    fullshard.fully_shard(model, mp_policy=policy)
    assert asked == [(4, 3, 3, 3), (4,), (4,), (2, 144), (2,)]
    model.unshard()
    assert [param.dtype for param in model[1].parameters()] == [torch.bfloat16, torch.float32]
    assert model[0].weight.dtype == model[3].bias.dtype == torch.bfloat16
