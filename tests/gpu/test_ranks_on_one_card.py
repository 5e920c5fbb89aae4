"""Two ranks on one card, over gloo, train as one process does. On a machine without an accelerator they use the CPU.

Only local shards are compared: a DTensor that becomes whole over gloo ends the process on CUDA, in torch itself.
"""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fullshard
from fullshard import checkpoint
from fullshard.optim import LocalSteps, ShardedGradScaler
from tests import test_finite
from tests.fully_shard.cases import shard_mlp
from tests.harness import RankPool, World, compare, ranks
from tests.harness.compare import Precision, Training, adamw, assert_equal_steps, each_block, sgd, train_sharded
from tests.harness.models import MLP, Transformer, random_batch, seeded, token_batch
from tests.harness.wrapper import no_sync_before, wrap_blocks
from tests.optim import test_local_steps
from tests.parity import test_wires

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
#: Of both ranks.
DEVICE = torch.device(card.type, 0) if (card := torch.accelerator.current_accelerator(check_available=True)) else CPU
ON_CARD = DEVICE != CPU
#: How far results may be apart on a card, where the order of sums depends on where a tensor begins.
EXACT, BF16, FP16 = 1e-5, 4e-2, 5e-3
WIDTHS = (24, 384, 384, 40, 8)  # two weights travel where they are, others together
LAST = 2


def there(batch: Callable[[int], tuple[Tensor, ...]]) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda seed: tuple(each.to(DEVICE) for each in batch(seed))


def mlp(**changes: Any) -> Training:
    defaults: dict[str, Any] = {"shard": each_block(), "batch": there(random_batch(4, WIDTHS[0])), "optimizer": adamw}
    return Training(build=lambda: seeded(lambda: MLP(WIDTHS)).to(DEVICE), **defaults | changes)


def transformer(**options: Any) -> Training:
    build = partial(seeded, partial(Transformer, **options))
    return Training(build=lambda: build().to(DEVICE), shard=each_block(), batch=there(token_batch(3, 5)))


def offloaded(fsdp: ModuleType, model: Any) -> None:
    each_block(offload_policy=fsdp.CPUOffloadPolicy(pin_memory=ON_CARD))(fsdp, model)


def compiled(fsdp: ModuleType, model: Any) -> None:
    for block in model.blocks:
        block.compile()
    each_block()(fsdp, model)


def prefetching(depth: int, fsdp: ModuleType, model: Any) -> None:
    each_block()(fsdp, model)
    model.set_prefetch_limit(depth)


def twin(fsdp: ModuleType, model: Any) -> Any:
    """A copy of a model that was sharded, and has run."""
    each_block()(fsdp, model)
    model(*there(random_batch(4, WIDTHS[0]))(0)).sum().backward()
    model.zero_grad()
    return copy.deepcopy(model)


def accumulating(model: Any, micro: int) -> None:
    if isinstance(model, fullshard.FSDPModule | torch.distributed.fsdp.FSDPModule):
        model.set_requires_gradient_sync(micro == LAST)


def clipping(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)


def in_precision(param_dtype: torch.dtype, reduce_dtype: torch.dtype, **changes: Any) -> Training:
    precision = Precision(param_dtype, reduce_dtype)
    return mlp(precision=precision, shard=each_block(precision=precision), **changes)


def staged(stage: int, **changes: Any) -> Training:
    return mlp(shard=each_block(zero_stage=stage), **changes)


def wrapped(strategy: str, original: bool, **changes: Any) -> Training:
    options = {name: changes.pop(name) for name in ("offload", "precision") if name in changes}
    shard = wrap_blocks(strategy=strategy, original=original, device=DEVICE, **options)
    return mlp(shard=shard, precision=options.get("precision", Precision()), **changes)


def scaler() -> ShardedGradScaler:
    return ShardedGradScaler(DEVICE.type, init_scale=2.0**10, growth_interval=2)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-2, fused=True)


BF16_POLICY = Precision(torch.bfloat16, torch.float32)
ACCUMULATED: dict[str, Any] = {"micro_batches": LAST + 1, "set_up_micro": accumulating}
#: What is trained, how far it may be from unsharded training on a card, and whether torch can do it too.
SETTINGS: dict[str, tuple[Callable[[], Training], float, bool]] = {
    "plain": (mlp, EXACT, True),
    "SGD": (partial(mlp, optimizer=sgd), EXACT, True),
    "fused AdamW": (partial(mlp, optimizer=fused), EXACT, True),
    "no reshard": (partial(mlp, shard=each_block(reshard_after_forward=False)), EXACT, True),
    "bf16": (partial(in_precision, torch.bfloat16, torch.float32), BF16, True),
    "bf16 reduced in bf16": (
        partial(in_precision, torch.bfloat16, torch.bfloat16, mean_dtype=torch.float32),
        BF16,
        ON_CARD,  # ours does not round the sum on the CPU, torch does
    ),
    "fp16 with a scaler": (partial(in_precision, torch.float16, torch.float32, scaler=scaler), FP16, False),
    "transformer": (transformer, EXACT, True),
    "tied": (partial(transformer, tied=True), EXACT, True),
    "recomputation": (partial(transformer, checkpointing="non-reentrant"), EXACT, True),
    "reentrant": (partial(transformer, checkpointing="reentrant"), EXACT, True),
    "accumulation": (partial(mlp, **ACCUMULATED), EXACT, True),
    "offload": (partial(mlp, shard=offloaded), EXACT, True),
    "offload, accumulation": (partial(mlp, shard=offloaded, **ACCUMULATED), EXACT, True),
    "clip": (partial(mlp, after_backward=clipping), EXACT, True),
    "deep copy": (partial(mlp, shard=twin), EXACT, False),
    **{f"stage {stage}": (partial(staged, stage), EXACT, False) for stage in range(4)},
    **{f"stage {stage}, accumulation": (partial(staged, stage, **ACCUMULATED), EXACT, False) for stage in range(3)},
    "threshold": (partial(mlp, shard=each_block(persistence_threshold=2**17)), EXACT, False),
    **{f"prefetch {depth}": (partial(mlp, shard=partial(prefetching, depth)), EXACT, False) for depth in (0, 1, 3)},
    "state offloaded": (
        partial(mlp, shard=each_block(offload_policy=fullshard.CPUOffloadPolicy(parameters=False))),
        EXACT,
        False,
    ),
    **{
        f"wrapper {strategy} {kind}": (partial(wrapped, strategy, kind == "original"), EXACT, True)
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
        for kind in ("flat", "original")
    },
    "wrapper in bf16": (partial(wrapped, "FULL_SHARD", True, precision=BF16_POLICY), BF16, True),
    "wrapper, accumulation": (
        partial(wrapped, "FULL_SHARD", False, micro_batches=LAST + 1, around_micro=no_sync_before(LAST)),
        EXACT,
        True,
    ),
    "wrapper, offload": (partial(wrapped, "FULL_SHARD", False, offload=True), EXACT, False),
    "compiled blocks": (partial(mlp, shard=compiled), EXACT, True),
}


def tolerance(on_card: float) -> Any:
    """On the CPU that of all tests."""
    return mock.patch.object(compare, "TOLERANCE", on_card if ON_CARD else compare.TOLERANCE)


@ranks(2)
@pytest.mark.parametrize("name", SETTINGS)
def test_training_is_that_of_one_process(world: World, name: str) -> None:
    build, on_card, with_torch = SETTINGS[name]
    with tolerance(on_card):
        compare.compare(world, build(), with_torch=with_torch)


@ranks(2)
@pytest.mark.parametrize(("name", "on_card"), [("bf16", 2e-2), ("fp8", 0.2), ("int8", 5e-2)])
def test_messages_are_encoded_as_in_one_process(world: World, name: str, on_card: float) -> None:
    policy = test_wires.POLICIES[name]
    training = mlp(shard=each_block(wire_policy=policy))
    with mock.patch.dict("os.environ", FULLSHARD_TRANSPORT="collective"), tolerance(on_card):
        found = train_sharded(training, fullshard, world.rank, world.size)
        assert_equal_steps(found, test_wires.train_with_wires(training, world.rank, world.size, policy), name)


@ranks(2)
@pytest.mark.parametrize("wait", [True, False], ids=["saved at once", "in the background"])
@pytest.mark.parametrize("original", [None, False], ids=["fully_shard", "wrapper"])
def test_training_goes_on_from_a_checkpoint(world: World, original: bool | None, wait: bool, tmp_path: Path) -> None:
    training = mlp() if original is None else wrapped("FULL_SHARD", original)

    def build() -> tuple[Any, torch.optim.Optimizer]:
        plain = training.build()
        model: Any = training.shard(fullshard, plain) or plain
        return model, training.optimizer(model.parameters())

    def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = training.loss(model, training.micro(step, world.rank, world.size, 0))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    one, two = build(), build()
    train(*one, range(2))
    checkpoint.save(tmp_path, *one, step=2, wait=wait)
    losses = train(*one, range(2, 5))
    checkpoint.wait_until_finished()
    assert checkpoint.load(tmp_path, *two) == {"step": 2}
    assert train(*two, range(2, 5)) == pytest.approx(losses, rel=EXACT if ON_CARD else 0)


@ranks(2)
def test_an_average_of_models_is_that_of_one_process(world: World) -> None:
    training = mlp()
    sharded, plain = training.build(), training.build()
    each_block()(fullshard, sharded)
    averages = list[Any]()
    for model, its_ranks in ((sharded, [world.rank]), (plain, range(world.size))):
        optimizer = sgd(model.parameters())
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for step in range(3):
            for rank in its_ranks:
                loss = training.loss(model, training.micro(step, rank, world.size, 0))
                (loss / len(its_ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
        averages.append([compare.kept(param) for param in average.module.parameters()])
    for found, whole in zip(*averages, strict=True):
        assert compare.deviation(found.local, found.part_of(whole), whole) < (EXACT if ON_CARD else compare.TOLERANCE)


CASES = {
    "average": {},
    "fragments": {"outer": test_local_steps.nesterov, "fragments": 3},
    "overlap": {"outer": test_local_steps.nesterov, "overlap": 2},
    "state offloaded": {"outer": test_local_steps.nesterov, "fragments": 2, "overlap": 3, "offload": True},
}


@ranks(2)
@pytest.mark.parametrize("name", CASES)
def test_replicas_that_meet_every_few_steps(world: World, name: str) -> None:
    case = test_local_steps.Case(inner=test_local_steps.plain_sgd, **CASES[name])
    mesh = init_device_mesh(DEVICE.type, (2, 1), mesh_dim_names=("replicate", "shard"))
    model, simulation = shard_mlp(mesh=mesh), test_local_steps.Simulation(case)
    optimizer = case.inner(model.parameters())
    LocalSteps(model, optimizer, **case.arguments)
    for number in range(3 * case.every):
        test_local_steps.step(model, optimizer, test_local_steps.batch_of(world.rank, number).to(DEVICE))
        simulation.step()
        for param, expected in zip(model.parameters(), simulation.models[world.rank].parameters(), strict=True):
            assert isinstance(param, DTensor)
            assert param.to_local().device.type == DEVICE.type
            torch.testing.assert_close(param.to_local().cpu(), expected, rtol=1e-5, atol=1e-5)


@ranks(2)
def test_parameters_on_a_disk_train_as_in_memory(world: World, tmp_path: Path) -> None:
    losses = []
    for policy in (fullshard.OffloadPolicy(), fullshard.DiskOffloadPolicy(tmp_path)):
        training = mlp(shard=each_block(offload_policy=policy))
        model: Any = training.build()
        training.shard(fullshard, model)
        optimizer = adamw(model.parameters())
        for step in range(4):
            loss = training.loss(model, training.micro(step, world.rank, world.size, 0))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[4:] == pytest.approx(losses[:4], rel=EXACT)
    assert losses[3] < losses[0]


@ranks(2)
def test_a_value_that_is_not_finite_is_named(world: World) -> None:
    chain, batch = test_finite.model(), test_finite.inputs().to(DEVICE)
    chain(batch).sum().backward()
    with fullshard.detect_nan(chain), pytest.raises(fullshard.NanError, match=rf"rank {world.rank}.*'layers\.1'.*inf"):
        chain(batch, spoil_output=True)


@ranks(2)
def test_the_doctor_looks_at_ranks_of_one_card(world: World) -> None:
    model = mlp().build()
    before = {each.name: each.result for each in fullshard.doctor(model).checks}
    each_block()(fullshard, model)
    after = {each.name: each.result for each in fullshard.doctor(model).checks}
    assert (before["initial values"], before["finite values"], after["finite values"]) == ("ok", "ok", "ok")


def ends_in_backward(world: World) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = "collective"
    training = mlp()
    model = training.build()
    training.shard(fullshard, model)
    for step in range(3):
        loss = training.loss(model, training.micro(step, world.rank, world.size, 0))
        if step == 2 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()


def test_who_loses_a_rank_says_where() -> None:
    with RankPool() as pool:
        survivor, killed = pool.run(ends_in_backward, 2)
    assert killed.kind == "died"
    assert survivor.kind == "raised"
    assert "PeerFailureError: rank 0 lost its connection to another rank in " in survivor.summary
