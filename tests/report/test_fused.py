"""What operators keep for backward on a GPU, traced without one, and predictions beside what one GPU took."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from benchmarks.gpu_steps import MODELS, Setting, shard
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

import fullshard
from fullshard import ShardingStrategy
from fullshard.buffer.slots import LARGE
from fullshard.report.explain import explain
from fullshard.report.fused import fused_operators

ROWS, WIDTH, HEADS = 512, 256, 4
INPUT = 2 * ROWS * WIDTH  # bytes


def attend(x: Tensor, mask: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    heads = x.view(1, ROWS, HEADS, -1).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, mask, dropout)


@pytest.mark.parametrize(
    ("run", "least", "beside"),
    [
        (lambda x: F.rms_norm(x, (WIDTH,), x.new_ones(WIDTH)), INPUT, 4 * ROWS + 2 * WIDTH),
        (lambda x: nn.Dropout()(x), INPUT // 2, 0),
        (attend, 2 * INPUT, 4 * ROWS * HEADS + 64),
        (lambda x: attend(x, dropout=0.1), 2 * INPUT, 4 * ROWS * HEADS + 64),
        (lambda x: attend(x.float(), dropout=0.1), 4 * INPUT, 4 * ROWS * HEADS + 64),
        (lambda x: attend(x, x.new_ones(ROWS, ROWS, dtype=torch.bool)), 2 * INPUT + 2 * ROWS**2, 4 * ROWS * HEADS + 64),
        (lambda x: attend(x.double()), 8 * HEADS * ROWS**2, 16 * INPUT),  # which no GPU fuses
    ],
    ids=["rms norm", "dropout", "attention", "with dropout", "in fp32", "with a mask", "in fp64"],
)
def test_a_fused_operator_keeps_what_a_gpu_keeps(run: Callable[[Tensor], Tensor], least: int, beside: int) -> None:
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    with FakeTensorMode(), fused_operators():
        x = torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            output = run(x)
        output.sum().backward()
        assert x.grad is not None
    assert least <= sum(kept.values()) <= least + beside


def test_other_threads_and_what_follows_compute_as_ever() -> None:
    x = torch.rand(4, 8, dtype=torch.float64)
    expected = F.rms_norm(x, (8,))
    with fused_operators(), ThreadPoolExecutor(1) as other:
        assert not torch.equal(F.rms_norm(x.float(), (8,)).double(), expected), "a layer norm stands for it"
        assert torch.equal(other.submit(F.rms_norm, x, (8,)).result(), expected)
    assert torch.allclose(F.rms_norm(x.float(), (8,)).double(), expected)


def in_slow_lane(*given: object) -> object:
    return pytest.param(*given, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("model", "recompute", "rest", "peak"),
    [
        ("1 B", False, 2.51, 18.00),
        in_slow_lane("7 B", False, 11.00, 31.54),
        in_slow_lane("7 B", True, 11.04, 16.42),
        in_slow_lane("many", False, 0.371, 0.968),
    ],
)
def test_predictions_are_near_what_was_measured_on_a_gpu(model: str, recompute: bool, rest: float, peak: float) -> None:
    """GiB that torch's allocator had allocated for one rank of eight, on one H100. Three slots of the root's size were
    kept between steps then, however large, and fewer of gradients."""
    setting, sizes = Setting(model, recompute=recompute), MODELS[model]

    def build() -> nn.Module:
        sharded = shard(fullshard, setting, sizes)
        sharded.set_reshard_after_forward(True, recurse=False)  # type: ignore[operator]
        return sharded

    found = explain(build, ranks=8, batch=sizes.tokens(torch.device("cpu")), device="cuda")
    phases = {phase.name: phase.on_device for phase in found.memory}
    slot = max(group.whole for group in found.groups)
    kept = 3 * slot if slot >= LARGE else 0
    assert (phases["between steps"] + kept) / 2**30 == pytest.approx(rest, rel=0.1)
    assert max(phases.values()) / 2**30 == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize("strategy", [in_slow_lane(ShardingStrategy.FULL_SHARD), ShardingStrategy.HYBRID_SHARD])
def test_a_wrapped_model_is_planned_for_gpus(strategy: ShardingStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")

    def build() -> nn.Module:
        layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        policy = fullshard.wrap.ModuleWrapPolicy({nn.Linear})
        return fullshard.FullyShardedDataParallel(layers, auto_wrap_policy=policy, sharding_strategy=strategy)

    group, *_ = explain(build, ranks=8, batch=torch.ones(2, 64), device="cuda").groups
    assert (group.is_host, group.transport) == (False, "collective")
    assert group.ranks == (8 if strategy is ShardingStrategy.FULL_SHARD else 4)
