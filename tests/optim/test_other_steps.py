"""Steps that are left to DTensor, and optimizers of a user's own that are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.optim import Optimizer

from fullshard import CPUOffloadPolicy
from fullshard.group.home import HostHome
from fullshard.optim import local_step, steps
from fullshard.torch_private import local_of, make_dtensor, set_local, sharding_spec
from tests.fully_shard.cases import inputs, local
from tests.harness import World, ranks
from tests.harness.slow import slow
from tests.optim.cases import Pair, Sign, backward, on_dtensors, runs_on_local, sharded


@ranks(2)
@pytest.mark.parametrize("cls", [torch.optim.SGD, *slow(torch.optim.Adam)])
def test_a_closure_runs_on_dtensors(world: World, cls: type[Optimizer]) -> None:
    pair = Pair(cls)
    for seed in range(3):
        losses = []
        for model, optimizer in pair.both:

            def closure(model: Any = model, optimizer: Optimizer = optimizer, seed: int = seed) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = model(inputs(seed)).square().mean()
                loss.backward()
                return loss

            losses.append(optimizer.step(closure))  # type: ignore[arg-type]
        assert torch.equal(*losses)  # type: ignore[arg-type]
        pair.check()
        pair.step(seed)


@ranks(2)
def test_another_placement_of_a_gradient_is_left_to_dtensor(world: World) -> None:
    pair = Pair(torch.optim.SGD)
    refused = []
    for model, optimizer in pair.both:
        for param in model.parameters():
            if param.requires_grad:
                param.grad = distribute_tensor(torch.ones(param.shape), param.device_mesh, [Replicate()])
        try:
            optimizer.step()
        except RuntimeError as error:  # not before torch 2.12
            refused.append("placement changes are not supported" in str(error))
        optimizer.zero_grad()
    assert refused in ([], [True, True])
    pair.check()
    pair.step(1)


@ranks(2)
def test_a_partial_sum_is_left_to_dtensor(world: World) -> None:
    pair = Pair(torch.optim.SGD)
    for model, optimizer in pair.both:
        gain = model.gain
        spec = sharding_spec(gain.device_mesh, [Partial()], gain.shape, gain.stride(), gain.dtype)
        gain.grad = make_dtensor(torch.ones_like(local_of(gain)), spec)
        before = local(gain).clone()
        optimizer.step()
        assert torch.allclose(local(gain), before - 0.02 * world.size)
    pair.check()


@ranks(2)
def test_a_subclass_is_not_taken_for_its_base(world: World) -> None:
    model = sharded()
    optimizer = on_dtensors(torch.optim.AdamW)(model.parameters())
    backward(model, 0)
    assert not runs_on_local(optimizer)


@ranks(2)
def test_offloaded_state_is_moved_around_a_step_on_dtensors(world: World) -> None:
    """The CPU stands for the device too: what counts is when each state is moved."""
    pair, moved = Pair(offload_policy=CPUOffloadPolicy(parameters=False)), list[str]()

    def move(tensor: DTensor, local: Tensor) -> None:
        moved.append("moved")
        set_local(tensor, local)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostHome, "moves_state", lambda *_: True)
        patch.setattr(steps, "set_local", move)
        streams = SimpleNamespace(synchronize=lambda _: moved.append("whole"))
        patch.setattr(steps, "streams_of", lambda _: streams)
        for seed in range(2):
            for model, optimizer in pair.both:
                backward(model, seed)
                assert not runs_on_local(optimizer)
                optimizer.zero_grad()
                there = ["moved"] * 2 * len(optimizer.state)
                assert moved == [*there * seed, *there, "whole"]
                moved.clear()
            pair.check()


@ranks(1, 2, 3)
def test_an_optimizer_of_the_users_own(world: World) -> None:
    pair = Pair(Sign)
    assert local_step(pair.optimizers[0]) is pair.optimizers[0]
    for seed in range(4):
        pair.step(seed)
    served, other = pair.optimizers
    assert isinstance(served, Sign)
    assert served.calls == 4
    assert served.param_groups[0]["steps"] == other.param_groups[0]["steps"] == 4
    entry = served.state[pair.models[0].crossed]
    assert list(entry) == ["count", "mean", "low"]
    assert isinstance(entry["low"], DTensor)
    assert entry["low"].dtype == torch.bfloat16


@ranks(2)
def test_a_subclass_that_calls_the_step_of_its_base(world: World) -> None:
    class Noisy(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            calls.append(all(type(param) is nn.Parameter for param in self.param_groups[0]["params"]))
            return super().step(closure)

    calls: list[bool] = []
    hooked: list[Optimizer] = []
    pair = Pair(Noisy)
    backward(pair.models[0], 0)
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # from now on the step of the base has hooks too
    optimizer = local_step(pair.optimizers[0])
    optimizer.register_step_pre_hook(lambda optimizer, *_: hooked.append(optimizer))
    assert runs_on_local(optimizer)
    assert calls == [True]
    assert hooked == [optimizer]
    backward(pair.models[1], 0)
    pair.optimizers[1].step()
    pair.check()


@ranks(2)
def test_what_cannot_step_on_local_tensors_is_refused(world: World) -> None:
    model = sharded()
    for cls in (torch.optim.LBFGS, torch.optim.Adafactor):
        with pytest.raises(ValueError, match=f"{cls.__name__} does not compute element by element"):
            local_step(cls(model.parameters()))
    with pytest.raises(ValueError, match="this Sign has no parameter of a sharded module"):
        local_step(Sign([nn.Parameter(torch.ones(1))]))
    with pytest.raises(TypeError, match=r"expects a torch\.optim\.Optimizer, got list"):
        local_step([])  # type: ignore[type-var]


@ranks(2)
def test_adafactor_is_refused_by_name_before_it_steps_on_a_sharded_matrix(world: World) -> None:
    model = sharded()
    optimizer = torch.optim.Adafactor(model.parameters())
    before = [param.to_local().clone() for param in model.parameters()]
    model(torch.ones(2, 6)).sum().backward()
    with pytest.raises(RuntimeError, match=r"^Adafactor cannot step on 'crossed', which fully_shard .*such as AdamW"):
        optimizer.step()
    assert all(torch.equal(param.to_local(), value) for param, value in zip(model.parameters(), before, strict=True))
    assert not optimizer.state
    vectors = [param for param in model.parameters() if param.dim() < 2]
    torch.optim.Adafactor(vectors).step()
    assert any(
        not torch.equal(param.to_local(), value)
        for param, value in zip(model.parameters(), before, strict=True)
        if param.dim() < 2
    )


@ranks(2)
def test_offloaded_state_is_on_the_device_in_a_step_and_on_the_cpu_after_it(world: World) -> None:
    """cpu:0 stands for the CPU here, and cpu for the device."""
    model, home = sharded(offload_policy=CPUOffloadPolicy(parameters=False)), torch.device("cpu", 0)
    optimizer, moved = torch.optim.AdamW(model.parameters()), list[torch.device]()

    class Told:
        def __init__(self, value: DTensor) -> None:
            self._local = local_of(value)

        def to(self, device: torch.device, non_blocking: bool) -> Tensor:
            moved.append(device)
            return self._local

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostHome, "moves_state", lambda *_: True)
        patch.setattr(steps, "CPU", home)
        patch.setattr(steps, "local_of", Told)
        for seed in range(2):
            backward(model, seed)
            optimizer.step()
            optimizer.zero_grad()
            count = 2 * len(optimizer.state)
            assert moved == [torch.device("cpu")] * count * seed + [home] * count
            moved.clear()
