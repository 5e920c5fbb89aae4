"""Models whose ranks share memory: the same numbers as with messages however slow a rank is, and memory used once.

A *story* is what a program does with a sharded model; it returns tensors. Each is told twice, with messages between
ranks that keep step, and in shared memory with ranks that stop for a moment in every module, each in other places.
"""

from __future__ import annotations

import copy
import functools
import gc
import io
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard.buffer.shared import SharedBuffer
from fullshard.comm.shm import ShmTransport
from fullshard.comm.waits import WAITS
from fullshard.group.full_buffer import RELEASED
from tests.fully_shard.cases import EXCHANGED, assert_close, environment, first_of, groups_of, inputs, shard_mlp, twins
from tests.harness import World, ranks
from tests.harness.compare import each_block, kept, whole
from tests.harness.held import mappings, open_files
from tests.harness.models import MLP, Transformer, seeded, shard_each, token_batch
from tests.harness.slow import slow

Story = Callable[[World], Iterator[Any]]
STORIES: dict[str, Story] = {}


def story(tell: Story) -> Story:
    STORIES[tell.__name__] = tell
    return tell


class Pauses:
    """Lets this rank stop in modules, before and after the hooks by which they are sharded."""

    def __init__(self, world: World) -> None:
        self.random = random.Random(world.rank)
        self.on = False

    def __call__(self, *args: Any) -> None:
        if self.on and self.random.random() < 0.5:
            time.sleep(self.random.random() * 6e-3)

    def watch(self, model: nn.Module) -> Any:
        for module in model.modules():
            module.register_forward_pre_hook(self)
            module.register_forward_hook(self)
            if not list(module.children()):
                module.register_full_backward_hook(self)
        return model


pauses: Pauses


def mlp(**options: Any) -> Any:
    model = pauses.watch(seeded(MLP))
    each_block(**options)(fullshard, model)
    return pauses.watch(model)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def steps(world: World, model: Any, optimizer: Any, count: int = 3, x: Any = None) -> Iterator[Tensor]:
    for step in range(count):
        loss = model(inputs(step * world.size + world.rank) if x is None else x).square().mean()
        pauses()
        loss.backward()
        pauses()
        yield loss
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module) -> list[Tensor]:
    return [whole(parameter) for parameter in model.parameters()]


def tell(world: World, name: str, transport: str) -> list[Tensor]:
    global pauses
    pauses = Pauses(world)
    pauses.on = transport == "shm"
    torch.manual_seed(0)
    with environment(FULLSHARD_TRANSPORT=transport):
        told = [whole(each) for each in STORIES[name](world) if each is not None]
    gc.collect()
    return told


def compare_told(world: World, name: str) -> None:
    expected, found = tell(world, name, "p2p"), tell(world, name, "shm")
    assert len(expected) == len(found) > 0
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert_close(one, other, f"tensor {number} of '{name}'")


@story
def training_that_keeps_parameters(world: World) -> Iterator[Any]:
    model = mlp(reshard_after_forward=False)
    parameters = list(model.parameters())
    optimizer = sgd(model)
    for keep in (False, True):
        model.set_reshard_after_backward(not keep)
        yield from steps(world, model, optimizer)
    yield from map(whole, parameters)


@story
def training_in_low_precision_with_other_cuts(world: World) -> Iterator[Any]:
    policy = fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    place = lambda parameter: Shard(parameter.ndim - 1)  # noqa: E731
    for options in ({"mp_policy": policy}, {"shard_placement_fn": place}):
        model = mlp(**options)
        optimizer = sgd(model)
        yield from steps(world, model, optimizer)
        for written in (Tensor.detach, lambda chunk: chunk.data):  # with a new version, and without
            with torch.no_grad():
                model(inputs())  # here the ranks see what the optimizer wrote
            for parameter in optimizer.param_groups[0]["params"]:
                written(parameter.to_local()).mul_(0.9)
            yield from steps(world, model, optimizer, 1)


@story
def accumulation(world: World) -> Iterator[Any]:
    model = mlp(reshard_after_forward=True)
    parameters = list(model.parameters())
    optimizer = sgd(model)
    for how in (model.set_requires_gradient_sync, model.set_is_last_backward, model.set_reshard_after_backward):
        for last in (False, False, True):
            how(last)
            loss = model(inputs(world.rank + 2 * last)).sum()
            loss.backward()
            yield loss
        yield from [whole(parameter.grad) for parameter in parameters]
        optimizer.step()
        optimizer.zero_grad()


@story
def evaluation_between_and_two_forwards(world: World) -> Iterator[Any]:
    model = mlp()
    optimizer = sgd(model)
    with torch.inference_mode():
        yield model(inputs()).clone()
    for _ in range(2):
        first, second = model(inputs(world.rank)).sum(), model(inputs(5)).square().sum()
        with torch.no_grad():
            yield model(inputs(9))
        (first + second).backward()
        optimizer.step()
        optimizer.zero_grad()
    yield from values(model)


@story
def writes_in_forward(world: World) -> Iterator[Any]:
    """They reach no other rank, and are thrown away."""
    for after_forward in (True, False):
        model = nn.Sequential(nn.Embedding(16, 4, max_norm=0.5), pauses.watch(nn.Linear(4, 4)))
        shard_each(model[0], model[1], model, reshard_after_forward=after_forward)

        def spoil(module: nn.Module, args: Any) -> None:
            if not torch.is_grad_enabled():  # the last groups of a forward keep in backward what a slot has
                module.weight.data[0] = world.rank  # type: ignore[operator,union-attr]

        model[1].register_forward_pre_hook(spoil)
        parameters = list(model.parameters())
        optimizer = sgd(model)
        x = torch.arange(8).view(2, 4) + world.rank
        for _ in range(3):
            with torch.no_grad():
                yield model(x)
                for parameter in parameters:
                    parameter.mul_(0.7)
        yield from steps(world, model, optimizer, 3, x)
        yield from map(whole, parameters)


@story
def recomputation(world: World) -> Iterator[Any]:
    tokens = token_batch(2, 6)(world.rank)[0]
    for how in ("reentrant", "non-reentrant"):
        model = seeded(functools.partial(Transformer, checkpointing=how, tied=True))
        each_block()(fullshard, pauses.watch(model))
        yield from steps(world, model, sgd(model), 2, tokens)
        model.reshard()
        yield from values(model)
    model = mlp()  # all of it
    for reentrant in (True, False):
        x = inputs(world.rank).requires_grad_()
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        model.reshard()
        yield from [x.grad, *[whole(parameter.grad) for parameter in model.parameters()]]


class Force(nn.Module):
    """The negative gradient of an energy, computed inside of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=self.training)
        return -force


@story
def a_gradient_in_forward(world: World) -> Iterator[Any]:
    model = pauses.watch(seeded(Force))
    fullshard.fully_shard(model)
    optimizer = sgd(model)
    yield from steps(world, model, optimizer, 2)
    model.eval()
    with torch.no_grad():
        yield model(inputs(3))
    model.train()
    yield from steps(world, model, optimizer, 1)


@story
def several_trees(world: World) -> Iterator[Any]:
    """A teacher, an average, and two that are trained in turn."""
    teacher, one, other = mlp(), mlp(), mlp()
    average = copy.deepcopy(one)
    optimizers = sgd(one), sgd(other)
    for step in range(3):
        with torch.no_grad():
            target = teacher(inputs(step))
        yield (one(inputs(step + world.rank)) - target).square().mean()
        loss = (one(inputs(step + world.rank)) - target).square().mean() + other(inputs(step)).sum()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        one.reshard()
        with torch.no_grad():
            for kept, new in zip(average.parameters(), one.parameters(), strict=True):
                kept.lerp_(new, 0.5)
            yield average(inputs(step))
            average.reshard()
    average(inputs()).sum().backward()
    average.reshard()
    yield from [whole(parameter.grad) for parameter in average.parameters()]


@story
def by_hand(world: World) -> Iterator[Any]:
    """unshard, reshard, summon_full_params with writes, and a submodule alone."""
    model = mlp(reshard_after_forward=True)
    optimizer = sgd(model)
    for asynchronous in (False, True):
        handle = model.blocks[1].unshard(async_op=asynchronous)
        if asynchronous:
            handle.wait()
        yield model.blocks[1][0].weight.detach().clone()
        with torch.no_grad():
            model.blocks[1][0].weight.mul_(2)  # shows in the next forward, and is thrown away after it
            yield model(inputs(world.rank))
            yield model(inputs(world.rank))
        with fullshard.summon_full_params(model), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        yield from steps(world, model, optimizer, 1)
        yield model.blocks[2](torch.ones(1, 5))
    yield from values(model)


@story
def an_optimizer_in_backward(world: World) -> Iterator[Any]:
    model = mlp()
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def step(parameter: Tensor, optimizer: torch.optim.SGD = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    for number in range(4):
        loss = model(inputs(number * world.size + world.rank)).square().mean()
        loss.backward()
        yield loss
    model.reshard()
    yield from values(model)


@story
def frozen_unused_and_rebuilt(world: World) -> Iterator[Any]:
    model = mlp()
    parameters = list(model.parameters())
    model.set_reduce_scatter_unused_params(True)
    model.blocks[1].requires_grad_(False)
    optimizer = sgd(model)
    yield from steps(world, model, optimizer, 2)
    model.blocks[1].requires_grad_(True)
    yield from steps(world, model, optimizer, 1)
    yield model.blocks[3](model.blocks[2](torch.ones(2, 5))).sum()
    del optimizer
    model.to(torch.float64)
    yield from steps(world, model, sgd(model), 2, inputs(world.rank).double())
    model.reshard()
    assert [parameter.dtype for parameter in model.parameters()] == [torch.float64] * len(parameters)
    yield from values(model)


@pytest.mark.slow
@ranks(2, 3)
@pytest.mark.parametrize("name", STORIES)
def test_shared_memory_and_messages_tell_the_same(world: World, name: str) -> None:
    compare_told(world, name)


@ranks(2)
def test_debug_mode_tells_the_same(world: World) -> None:
    with environment(FULLSHARD_DEBUG="1"):
        compare_told(world, "by_hand")


def replicas(world: World) -> Iterator[Any]:
    model = mlp(mesh=world.mesh(2, 2, names=("replicate", "shard")))
    yield from steps(world, model, sgd(model))


def tensor_parallel(world: World) -> Iterator[Any]:
    mesh = world.mesh(2, 2, names=("dp", "tp"))
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fullshard.fully_shard(model, mesh=mesh["dp"])
    yield from steps(world, pauses.watch(model), sgd(model), 3, inputs(world.rank // 2))


@pytest.mark.slow
@ranks(4)
@first_of("tell", replicas, tensor_parallel)
def test_on_meshes_of_two_dims(world: World, tell: Story) -> None:
    STORIES[tell.__name__] = tell
    compare_told(world, tell.__name__)


def write(model: Any, parameters: dict[str, Any], news: dict[str, Tensor], how: str, folder: Path) -> None:
    """Let the parameters have new values, in one of the ways in which programs do."""
    new = {name: distribute_tensor(news[name], p.device_mesh, p.placements) for name, p in parameters.items()}
    if how in ("load", "assign"):
        model.reshard()
        model.load_state_dict(new, assign=how == "assign")
    elif how == "checkpoint":
        model.reshard()
        dcp.save(new, checkpoint_id=folder)
        dcp.load(model.state_dict(), checkpoint_id=folder)
    else:
        with torch.no_grad():
            for name, parameter in parameters.items():
                if how == "copy":
                    parameter.copy_(new[name])
                elif how == "local":
                    parameter.to_local().copy_(new[name].to_local())
                else:
                    parameter.to_local().data.copy_(new[name].to_local())


@ranks(2, transport="shm")
@first_of("slow", 0, 1)
@pytest.mark.parametrize("between", ["forward and backward", *slow("steps")])
def test_writes_are_read_by_all_afterwards_and_by_none_before(
    world: World, tmp_path: Path, between: str, slow: int
) -> None:
    """One rank writes at once, while the other is still in the pass before."""
    for how in ("copy", "local", "data", "load", "checkpoint", "assign"):
        if (how, between) == ("assign", "forward and backward"):  # then parameters would have no gradients in this step
            continue
        model, reference = shard_mlp(reshard_after_forward=True), seeded(MLP)
        for block in (1, 3):
            for register in ("register_forward_hook", "register_full_backward_hook"):
                getattr(model.blocks[block], register)(lambda *_: time.sleep(0.01) if world.rank == slow else None)
        for step in range(2):
            parameters = dict(model.named_parameters())
            news = {name: (p * 0.8 + 0.02 * step).detach() for name, p in reference.named_parameters()}

            def renew() -> None:
                write(model, parameters, news, how, tmp_path / f"{how}-{step}")  # noqa: B023
                for name, parameter in reference.named_parameters():  # noqa: B023
                    parameter.data.copy_(news[name])  # noqa: B023

            found, expected = model(inputs(step)), reference(inputs(step))
            assert_close(found, expected, f"output after {how}")
            if between != "steps":
                renew()
            found.sum().backward()
            expected.sum().backward()
            gradients = {name: p.grad for name, p in reference.named_parameters()}
            for name, parameter in parameters.items():
                assert_close(kept(parameter.grad), gradients[name], f"{name} after {how}")
            if between == "steps":
                renew()
            model.zero_grad()
            reference.zero_grad()


WIDTH, COUNT = 256, 4
BLOCK = (WIDTH * WIDTH + WIDTH) * 4  # bytes


def large(**options: Any) -> Any:
    """Equal blocks of 257 KiB, and a root without parameters of its own."""
    model = nn.Module()
    model.blocks = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(COUNT)])
    model.forward = model.blocks.forward
    each_block(**options)(fullshard, model)
    return model


def step(model: Any) -> None:
    model(torch.ones(1, WIDTH)).sum().backward()


def resident(world: World) -> float:
    """Bytes of shared memory that all ranks have together, each page once."""
    sizes = re.findall(r"memfd:fullshard(?:.*\n)+?Pss: +(\d+) kB", Path("/proc/self/smaps").read_text())
    total = torch.tensor([1024.0 * sum(map(int, sizes))])
    dist.barrier()
    dist.all_reduce(total)
    return float(total)


@ranks(2, 4, transport="shm")
def test_parameters_exist_once_a_host(world: World) -> None:
    before = resident(world)
    model = large()
    with torch.no_grad():
        for _ in range(2):
            model(torch.ones(1, WIDTH))
    used = resident(world) - before
    assert 0.9 * COUNT * BLOCK <= used <= 1.1 * COUNT * BLOCK + 16384 * world.size
    for parameter in model.parameters():
        local = parameter.to_local()
        assert local.untyped_storage().nbytes() == local.numel() * local.itemsize
        file = io.BytesIO()
        torch.save(local, file)
        assert file.tell() < local.numel() * local.itemsize + 4096


@EXCHANGED
@ranks(2, transport="shm", fresh=True)
@first_of("buffers", 2, 1, 3)
def test_gradient_buffers_are_bounded_and_given_back(world: World, buffers: int) -> None:
    model = large()
    (transport,) = {group.transport for group in groups_of(model.blocks)}
    assert isinstance(transport, ShmTransport)
    with torch.no_grad():
        model(torch.ones(1, WIDTH))  # from here on the ranks share
    at_rest, used = mappings(), resident(world)
    model.set_reduce_scatter_max_input_buffers(buffers)
    for _ in range(3):
        step(model)
    assert len(transport._slots) == buffers
    assert sum(map(len, transport._opened)) == buffers * (world.size - 1)
    dist.barrier()
    assert model.free_buffers() >= buffers * BLOCK
    assert mappings() <= at_rest  # a thread that has ended since gave its own back
    assert resident(world) <= used + 16384
    step(model)
    dist.barrier()


@ranks(2, transport="shm")
def test_gradients_stay_until_a_slow_rank_has_read_them(world: World) -> None:
    def read(transport: ShmTransport, rank: int, reading: Any) -> Any:
        time.sleep(0.02)
        return read_at_once(transport, rank, reading)

    pair, read_at_once = twins(world, lambda: seeded(lambda: MLP((6,) * 7))), ShmTransport._slot_of
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(ShmTransport, "_slot_of", read)
        for _ in range(2):
            pair.step()


@ranks(2, transport="shm")
def test_nothing_is_left_of_models(world: World) -> None:
    def live() -> None:
        model = shard_mlp()
        optimizer = sgd(model)
        model(inputs()).sum().backward()
        optimizer.step()
        model.blocks[0].unshard()
        model.reshard()
        twin = copy.deepcopy(model)
        twin(inputs()).sum().backward()
        del optimizer
        model.to(torch.float64)
        model(inputs().double()).sum().backward()
        empty = seeded(MLP).to("meta")
        each_block()(fullshard, empty)
        empty.to_empty(device="cpu")
        with torch.no_grad():
            empty(inputs())

    left = []
    for _ in range(3):
        live()
        dist.barrier()
        left.append((mappings(), open_files()))
    assert left[1] == left[-1], left


@ranks(2, transport="shm")
def test_many_groups_need_few_files(world: World) -> None:
    before = open_files()
    model = nn.Module()
    model.blocks = nn.Sequential(*[nn.Linear(2, 2) for _ in range(60)])
    model.forward = model.blocks.forward
    each_block()(fullshard, model)
    model(torch.ones(1, 2)).sum().backward()
    assert all(group.shard.shared is not None for group in groups_of(model.blocks))
    assert open_files() - before < 10


@ranks(2, transport="shm")
@first_of("reentrant", False, True)
def test_a_root_that_is_recomputed_reads_what_is_shared(world: World, reentrant: bool) -> None:
    model = shard_mlp()

    def refuse(buffer: SharedBuffer) -> None:
        raise AssertionError("a private copy was made")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedBuffer, "be_private", refuse)
        for _ in range(2):
            checkpoint(model, inputs().requires_grad_(), use_reentrant=reentrant).sum().backward()
        with pytest.raises(AssertionError, match="private copy"):
            model.blocks[0].unshard()
    dist.barrier()


class NestedForce(nn.Module):
    """The same with an energy whose parts are sharded one by one: an inner backward runs through groups of the tree."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            (force,) = torch.autograd.grad(self.outer(self.inner(x).tanh()).sum(), x)
        return force


@ranks(2, transport="shm")
def test_a_backward_inside_of_a_forward_does_not_end_it(world: World) -> None:
    model, reference = seeded(NestedForce), seeded(NestedForce)
    shard_each(model.inner, model.outer, model)
    for _ in range(2):
        assert torch.equal(model(torch.ones(2, 4)), reference(torch.ones(2, 4)))
        assert not groups_of(model.inner)[0].step.now.reads_shared, "the forward has ended, and ranks may write again"


@ranks(2, transport="shm")
@first_of("begin", 20, 0)
def test_writes_through_data_in_forward_are_thrown_away_at_once_whenever_they_begin(world: World, begin: int) -> None:
    model = seeded(MLP)
    each_block(reshard_after_forward=True)(fullshard, model)
    expected = seeded(MLP)(inputs())
    spoils = False

    def spoil(module: nn.Module, args: Any) -> None:
        if spoils:
            module.weight.data.add_(1 + world.rank)  # type: ignore[operator,union-attr]

    model.blocks[1][0].register_forward_pre_hook(spoil)
    with torch.no_grad():
        for step in range(begin + 3):
            spoils = step == begin
            found = model(inputs())
            assert torch.equal(found, expected) == (not spoils), step


@ranks(2, transport="shm")
@first_of("api", "fully_shard", "flat", "original", quick=2)
def test_writes_through_data_in_forward_that_begin_late_are_no_part_of_training(world: World, api: str) -> None:
    """The forwards that write compute with what they wrote; the steps and forwards after them do not."""
    model, reference = seeded(MLP), seeded(MLP)
    written = model.blocks[1][0]
    if api == "fully_shard":
        each_block(reshard_after_forward=True)(fullshard, model)
    else:
        model = fullshard.FullyShardedDataParallel(model, use_orig_params=api == "original")
    spoils = False

    def spoil(module: Any, args: Any) -> None:
        if spoils:
            module.weight.data.add_(1 + world.rank)

    written.register_forward_pre_hook(spoil)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, reference)]
    for step in range(24):
        spoils = step in (20, 22)
        found, expected = model(inputs(step)), reference(inputs(step))
        if spoils:
            assert not torch.equal(found, expected)
            del found
            continue
        assert_close(found, expected, f"output of step {step}")
        found.square().mean().backward()
        expected.square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@ranks(2, transport="shm")
def test_a_rank_knows_at_which_group_it_is_where_nothing_is_sent(world: World) -> None:
    model = shard_mlp()
    doing: list[str] = []
    for block in model.blocks[:2]:
        block.register_forward_hook(lambda *_: doing.append(WAITS.position().doing))
        block.register_full_backward_hook(lambda *_: doing.append(WAITS.position().doing))
    model(inputs().requires_grad_()).sum().backward()
    where = [text.rpartition(", at ")[2] for text in doing]
    assert where == ["'blocks.0'", "'blocks.1'", "'blocks.1'", "'blocks.0'"]


@ranks(2, transport="shm")
def test_after_a_backward_autograd_reads_nothing_that_ranks_share(world: World) -> None:
    """Others may write to it then."""
    model = shard_mlp()
    for _ in range(2):
        model(inputs()).sum().backward()
        versions = {leaf._version for group in groups_of(model) for leaf in group.full.leaves}
        assert versions == {RELEASED}
