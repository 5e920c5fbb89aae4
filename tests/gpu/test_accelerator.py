"""One rank on an accelerator: what the CPU cannot show, streams and device memory, behaves as training unsharded."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fullshard.device import move_to_device
from fullshard.optim import ShardedGradScaler
from fullshard.optim.clip import clip_local_shards

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator, and there is none"),
]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return out


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29555")
    backends = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"  # offload needs the CPU's
    dist.init_process_group(backends, rank=0, world_size=1)
    yield init_device_mesh(device.type, (1,))
    dist.destroy_process_group()


def build(width: int = 64, blocks: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(width) for _ in range(blocks)])


def shard(model: nn.Sequential, mesh: DeviceMesh, **options: Any) -> nn.Sequential:
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def steps_agree(model: nn.Module, reference: nn.Module, device: torch.device, tolerance: float) -> None:
    optimizers = [torch.optim.AdamW(each.parameters(), 1e-2, eps=1e-3) for each in (model, reference)]
    for step in range(4):
        torch.manual_seed(step)
        x = torch.randn(8, 16, 64, device=device)
        losses = []
        for each in (model, reference):
            loss = each(x).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=tolerance)
        for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            grad = param.grad.full_tensor().to(device)  # type: ignore[union-attr,attr-defined]
            scale = expected.grad.abs().max()  # type: ignore[union-attr]
            assert (grad - expected.grad).abs().max() <= tolerance * scale, name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_streams_do_not_change_the_numbers(mesh: DeviceMesh, limit: int) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    model, reference = shard(build().to(device), mesh), build().to(device)
    model.set_prefetch_limit(limit)  # type: ignore[operator]
    steps_agree(model, reference, device, 1e-5)


def test_parameters_offloaded_to_the_cpu_train_alike(mesh: DeviceMesh) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    model, reference = shard(build(), mesh, offload_policy=CPUOffloadPolicy()), build().to(device)
    assert {param.device.type for param in model.parameters()} == {"cpu"}
    steps_agree(model, reference, device, 1e-5)


def test_optimizer_state_rests_on_the_cpu_between_steps(mesh: DeviceMesh) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    model = shard(build().to(device), mesh, offload_policy=CPUOffloadPolicy(parameters=False))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(2):
        model(torch.randn(2, 4, 64, device=device)).sum().backward()
        optimizer.step()
        moments = [state["exp_avg"] for state in optimizer.state.values()]
        assert {moment.to_local().device.type for moment in moments} == {"cpu"}


def test_low_precision_gathers_and_full_precision_reductions(mesh: DeviceMesh) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(build().to(device), mesh, mp_policy=policy)
    model(torch.randn(2, 4, 64, device=device)).float().sum().backward()
    assert {param.grad.dtype for param in model.parameters()} == {torch.float32}  # type: ignore[union-attr]


def test_memory_does_not_grow_after_the_second_step(mesh: DeviceMesh) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    model = shard(build(256, 8).to(device), mesh)
    peaks = []
    for _ in range(6):
        torch.accelerator.reset_peak_memory_stats()
        model(torch.randn(2, 4, 256, device=device)).sum().backward()
        model.zero_grad()
        torch.accelerator.synchronize()
        peaks.append(torch.accelerator.max_memory_allocated())
    assert len(set(peaks[2:])) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs graphs of CUDA")
@pytest.mark.parametrize("keep", [False, True])
def test_a_step_is_captured_in_a_graph_and_replayed(mesh: DeviceMesh, keep: bool) -> None:
    device = torch.device(mesh.device_type, torch.accelerator.current_device_index())
    model, reference = shard(build().to(device), mesh), build().to(device)
    model.set_keep_unsharded_storage(keep)  # type: ignore[operator]
    batch = torch.empty(8, 16, 64, device=device)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1, 0.9) for each in (model, reference)]

    def step(each: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = each(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for seed in range(3):
            batch.copy_(torch.randn(batch.shape, generator=torch.Generator().manual_seed(seed)))
            step(model, optimizers[0])
            step(reference, optimizers[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        loss = step(model, optimizers[0])
    for seed in range(3, 6):
        batch.copy_(torch.randn(batch.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert loss.item() == pytest.approx(step(reference, optimizers[1]).item(), rel=1e-5)
    eager = step(model, optimizers[0])  # afterwards without the graph
    assert eager.item() == pytest.approx(step(reference, optimizers[1]).item(), rel=1e-5)


def test_a_deep_copy_shares_nothing(mesh: DeviceMesh) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    model = shard(build().to(device), mesh)
    twin = copy.deepcopy(model)
    steps_agree(twin, build().to(device), device, 1e-5)
    assert torch.equal(model[0].up.weight.full_tensor(), build().to(device)[0].up.weight)  # type: ignore[union-attr]


def test_gradients_and_buffers_move_along_with_parameters(mesh: DeviceMesh) -> None:
    device = torch.device(mesh.device_type, torch.accelerator.current_device_index())
    model = nn.Linear(2, 2)
    weight = model.weight
    weight.grad = torch.ones(2, 2)
    model.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
    move_to_device(model.parameters(), [model], device, torch.bfloat16)
    assert model.weight is weight
    assert weight.grad.tolist() == [[1, 1], [1, 1]]
    assert {tensor.device for tensor in (weight, weight.grad, model.bias, model.steps)} == {device}
    assert model.steps.dtype is torch.int64


@pytest.mark.parametrize("poisoned", [None, 0, 1], ids=["finite", "on the accelerator", "on the CPU"])
def test_gradients_on_two_devices_share_one_scale(mesh: DeviceMesh, poisoned: int | None) -> None:
    params = [nn.Parameter(torch.ones(3, device=device)) for device in (mesh.device_type, "cpu")]
    optimizer, scaler = torch.optim.SGD(params, lr=1.0), ShardedGradScaler(mesh.device_type, init_scale=8.0)
    scaler.scale(torch.ones((), device=mesh.device_type))
    for param in params:
        param.grad = torch.full_like(param, 8.0)
    if poisoned is not None:
        params[poisoned].grad[0] = torch.inf  # type: ignore[index]
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (8.0 if poisoned is None else 4.0)
    assert all((param == (0.0 if poisoned is None else 1.0)).all() for param in params)


def test_clipping_gradients_on_two_devices(mesh: DeviceMesh) -> None:
    params = [nn.Parameter(torch.ones(1, device=device)) for device in (mesh.device_type, "cpu")]
    for param, value in zip(params, (3.0, 4.0), strict=True):
        param.grad = torch.full_like(param, value)
    total = clip_local_shards({params[0]: 1}, params[1:], 1.0, 2.0, None, torch.device(mesh.device_type))
    assert total.device.type == mesh.device_type
    assert total.item() == pytest.approx(5.0)
    assert [param.grad.item() for param in params] == pytest.approx([0.6, 0.8])  # type: ignore[union-attr]
