"""Replicas that train apart and synchronize every few steps, against a simulation of the replicas in one process."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.traffic import Traffic
from torch import nn
from torch.func import functional_call
from torch.optim import SGD, Adam, AdamW, Optimizer

import fullshard
from fullshard import checkpoint
from fullshard.comm.waits import WAITS, Wait, describe
from fullshard.group.parameter import local_tensor
from fullshard.optim import LocalSteps, ShardedGradScaler
from fullshard.wire_policy import EXACT, WirePolicy
from tests.fully_shard.cases import inputs, shard_mlp
from tests.harness import RankPool, World, failure_report, ranks
from tests.harness.compare import whole
from tests.harness.models import MLP, seeded
from tests.harness.slow import slow, some

EVERY = 4
INT4 = WirePolicy("int4", "int4", min_numel=0)


def nesterov(params: list[nn.Parameter]) -> Optimizer:
    return SGD(params, lr=0.7, momentum=0.9, nesterov=True)


def adam(params: list[nn.Parameter]) -> Optimizer:
    return Adam(params, lr=0.01)


def plain_sgd(params: Any) -> Optimizer:
    return SGD(params, lr=0.1)


def adamw(params: Any) -> Optimizer:
    return AdamW(params, lr=0.01)


@dataclass(frozen=True)
class Case:
    inner: Callable[[Any], Optimizer] = adamw
    every: int = EVERY
    outer: Callable[[list[nn.Parameter]], Optimizer] | None = None
    fragments: int = 1
    overlap: int = 0
    offload: bool = False
    wire_policy: WirePolicy = EXACT

    @property
    def arguments(self) -> dict[str, Any]:
        names = ("every", "outer", "fragments", "overlap", "offload", "wire_policy")
        return {name: getattr(self, name) for name in names}


def mesh_of(world: World, replicas: int = 2) -> Any:
    return world.mesh(replicas, world.size // replicas, names=("replicate", "shard"))


def training(world: World, case: Case, **options: Any) -> tuple[Any, Optimizer, LocalSteps]:
    model = shard_mlp(mesh=mesh_of(world), **options)
    optimizer = case.inner(model.parameters())
    return model, optimizer, LocalSteps(model, optimizer, **case.arguments)


def step(model: Any, optimizer: Optimizer, batch: torch.Tensor) -> None:
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def gathered(value: torch.Tensor) -> list[torch.Tensor]:
    every = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(every, value.detach().contiguous())
    return every


def batch_of(rank: int, number: int) -> torch.Tensor:
    return inputs(1000 * number + rank)


class Simulation:
    """Replicas as plain models in one process, each of which sees the batches of its ranks."""

    def __init__(self, case: Case, replicas: int = 2, ranks: int = 1) -> None:
        self.case, self.ranks, self.steps = case, ranks, 0
        self.models = [seeded(MLP) for _ in range(replicas)]
        self.optimizers = [case.inner(model.parameters()) for model in self.models]
        model = self.models[0]
        groups = [[model.scale], *([*block.parameters()] for block in model.blocks)]  # the root's group is the first
        index = {id(param): number for number, param in enumerate(model.parameters())}
        numbers = [[index[id(param)] for param in group] for group in groups]
        self.fragments = [[*chain(*numbers[k :: case.fragments])] for k in range(case.fragments)]
        self.anchors = [param.detach().clone() for param in model.parameters()]
        anchors = [[self.anchors[i] for i in fragment] for fragment in self.fragments]
        self.outer = [case.outer(each) if case.outer else None for each in anchors]
        self.under_way: dict[int, list[torch.Tensor]] = {}

    @torch.no_grad()
    def synchronize(self) -> None:
        params = [[*model.parameters()] for model in self.models]
        for k, fragment in enumerate(self.fragments):
            since = (self.steps - self.case.every * (k + 1) // self.case.fragments) % self.case.every
            if since == 0:
                changes = [torch.stack([self.anchors[i] - own[i] for own in params]).mean(0) for i in fragment]
                self.under_way[k] = changes
            if since != self.case.overlap or k not in self.under_way:
                continue
            for i, mean in zip(fragment, self.under_way.pop(k), strict=True):
                self.anchors[i].grad = mean
            outer = self.outer[k]
            if outer is not None:
                outer.step()
            for i in fragment:
                if outer is None:
                    self.anchors[i] -= self.anchors[i].grad
                for own in params:
                    own[i].copy_((own[i] + self.anchors[i]) / 2 if self.case.overlap else self.anchors[i])

    def step(self) -> None:
        for replica, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            for rank in range(self.ranks):
                loss = model(batch_of(replica * self.ranks + rank, self.steps)).square().mean()
                (loss / self.ranks).backward()
            optimizer.step()
            optimizer.zero_grad()
        self.steps += 1
        self.synchronize()


CASES = {
    "average": Case(),
    "nesterov": Case(outer=nesterov),
    "fragments": Case(outer=nesterov, fragments=3),
    "overlap": Case(outer=nesterov, overlap=2),
    "all of it": Case(outer=adam, fragments=2, overlap=3, offload=True),
    "every step": Case(inner=plain_sgd, every=1),
}


def check(world: World, case: Case, shards: int) -> None:
    model, optimizer, local_steps = training(world, case)
    simulation = Simulation(case, 2, shards)
    replica = world.rank // shards
    for number in range(3 * case.every):
        step(model, optimizer, batch_of(world.rank, number))
        simulation.step()
        for param, expected in zip(model.parameters(), simulation.models[replica].parameters(), strict=True):
            torch.testing.assert_close(whole(param), expected.detach(), msg=lambda why, n=number: f"step {n}: {why}")
    assert local_steps.steps == 3 * case.every
    with local_steps.global_parameters():
        for param, anchor in zip(model.parameters(), simulation.anchors, strict=True):
            torch.testing.assert_close(whole(param), anchor)
        plain = seeded(MLP)
        agreed = dict(zip(dict(plain.named_parameters()), simulation.anchors, strict=True))
        torch.testing.assert_close(model(inputs()), functional_call(plain, agreed, inputs()))
    for param, expected in zip(model.parameters(), simulation.models[replica].parameters(), strict=True):
        torch.testing.assert_close(whole(param), expected.detach())


@ranks(2)
@pytest.mark.parametrize("name", some(CASES, ("nesterov", "fragments", "overlap", "all of it")))
def test_replicas_train_as_in_one_process(world: World, name: str) -> None:
    check(world, CASES[name], 1)


@pytest.mark.slow
@ranks(2)
def test_replicas_exchange_changes_by_collectives(world: World) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = "collective"
    check(world, CASES["all of it"], 1)


@ranks(2, transport="checked")
@pytest.mark.parametrize("name", ["all of it", *slow("nesterov")])
def test_synchronizations_are_ordered_on_a_device(world: World, name: str) -> None:
    check(world, CASES[name], 1)


@pytest.mark.slow
@ranks(4)
def test_replicas_of_two_ranks_train_as_in_one_process(world: World) -> None:
    check(world, CASES["all of it"], 2)


@ranks(2)
def test_replicas_exchange_nothing_between_synchronizations(world: World) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = "p2p"
    model, optimizer, _ = training(world, Case(outer=nesterov))
    for number in range(EVERY - 1):
        with Traffic() as traffic:
            step(model, optimizer, batch_of(world.rank, number))
        if number:  # the first step compares the replicas' parameters
            assert (traffic.asked, traffic.unknown) == (0, set())
    with Traffic() as traffic:
        step(model, optimizer, batch_of(world.rank, EVERY))
    exchanged = sum(param.numel() * 4 for param in model.parameters())
    assert exchanged <= traffic.asked < exchanged + 300, "half of the changes, half of their mean, and a comparison"


@pytest.mark.slow
@ranks(4)
def test_the_norm_of_gradients_and_gradients_are_those_of_a_replica(world: World) -> None:
    model, optimizer, _ = training(world, Case())
    plain, replica = seeded(MLP), world.rank // 2
    for rank in (2 * replica, 2 * replica + 1):
        (plain(batch_of(rank, 0)).square().mean() / 2).backward()
    model(batch_of(world.rank, 0)).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
    torch.testing.assert_close(whole(norm), expected)
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(param.grad), other.grad)
    optimizer.step()


@ranks(2)
@pytest.mark.parametrize("method", ["set_requires_all_reduce", *slow("set_requires_gradient_sync")])
def test_gradients_accumulate(world: World, method: str) -> None:
    model, optimizer, _ = training(world, Case(inner=plain_sgd, every=2))
    simulation = Simulation(Case(inner=plain_sgd, every=2))
    for number in range(2):
        for micro, last in ((0, False), (1, True)):
            getattr(model, method)(last)
            model(batch_of(world.rank, 2 * number + micro)).square().mean().backward()
            for replica, plain in enumerate(simulation.models):
                plain(batch_of(replica, 2 * number + micro)).square().mean().backward()
        for each in (optimizer, *simulation.optimizers):
            each.step()
            each.zero_grad()
        simulation.steps += 1
        simulation.synchronize()
    for param, expected in zip(model.parameters(), simulation.models[0].parameters(), strict=True):
        torch.testing.assert_close(whole(param), expected.detach())


@ranks(2)
def test_an_error_in_a_step_does_not_count(world: World) -> None:
    case = Case(outer=nesterov, every=2)
    model, optimizer, local_steps = training(world, case)
    simulation = Simulation(case)
    for number in range(4):
        step(model, optimizer, batch_of(world.rank, number))
        simulation.step()
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(2, 5))
        model.reset_iter_state()
    assert local_steps.steps == 4
    for param, expected in zip(model.parameters(), simulation.models[0].parameters(), strict=True):
        torch.testing.assert_close(whole(param), expected.detach())


@ranks(2)
def test_frozen_parameters_stay_and_are_not_exchanged(world: World) -> None:
    model = shard_mlp(mesh=mesh_of(world))
    model.blocks[1].requires_grad_(False)
    optimizer = adamw([param for param in model.parameters() if param.requires_grad])
    local_steps = LocalSteps(model, optimizer, every=2, outer=nesterov, fragments=2)
    for number in range(4):
        step(model, optimizer, batch_of(world.rank, number))
    plain = seeded(MLP)
    assert torch.equal(whole(model.blocks[1][0].weight), plain.blocks[1][0].weight)
    assert not any("blocks.1" in name for name in local_steps.state_dict()["anchor"])
    assert torch.equal(*gathered(local_steps.state_dict()["anchor"]["blocks.0.0.weight"].to_local()))


@ranks(2)
def test_mixed_precision_keeps_the_anchor_in_fp32(world: World) -> None:
    model = seeded(MLP).to(torch.bfloat16)
    fullshard.fully_shard(model, mesh=mesh_of(world))
    optimizer = plain_sgd(model.parameters())
    local_steps = LocalSteps(model, optimizer, every=2)
    for number in range(4):
        step(model, optimizer, batch_of(world.rank, number).bfloat16())
        anchors = local_steps.state_dict()["anchor"]
        for name, param in model.named_parameters():
            assert anchors[name].dtype == torch.float32
            if number % 2:
                assert torch.equal(whole(param), whole(anchors[name]).bfloat16())


@ranks(2)
def test_gathers_in_low_precision_see_the_anchor(world: World) -> None:
    policy = fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model, optimizer, local_steps = training(world, Case(every=2), mp_policy=policy)
    step(model, optimizer, batch_of(world.rank, 0))
    with torch.no_grad():
        before = model(inputs())
        with local_steps.global_parameters():
            shown = model(inputs())
        assert torch.equal(before, model(inputs()))
    plain: Any = seeded(MLP).bfloat16()
    torch.testing.assert_close(shown, plain(inputs().bfloat16()), rtol=0.02, atol=0.02)
    assert not torch.equal(before, shown)


def resume(path: Path, world: World, case: Case) -> tuple[Any, Optimizer, LocalSteps]:
    model, optimizer, local_steps = training(world, case)
    checkpoint.load(path, model, optimizer, state={"local_steps": local_steps})
    return model, optimizer, local_steps


@ranks(2)
@pytest.mark.parametrize("name", ["average", "nesterov"])
@pytest.mark.parametrize("wire", [WirePolicy(), INT4], ids=["exact", "int4"])
def test_a_resumed_training_goes_on_as_an_uninterrupted_one(
    world: World, name: str, wire: WirePolicy, tmp_path: Path
) -> None:
    case = replace(CASES[name], wire_policy=wire)
    model, optimizer, local_steps = training(world, case)
    for number in range(2 * EVERY):
        step(model, optimizer, batch_of(world.rank, number))
    checkpoint.save(tmp_path, model, optimizer, state={"local_steps": local_steps})
    resumed, its_optimizer, its_steps = resume(tmp_path, world, case)
    assert its_steps.steps == 2 * EVERY
    for number in range(2 * EVERY, 4 * EVERY):
        step(model, optimizer, batch_of(world.rank, number))
        step(resumed, its_optimizer, batch_of(world.rank, number))
        for one, two in zip(model.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(whole(one), whole(two))


@ranks(2)
def test_replicas_that_differ_are_not_saved(world: World, tmp_path: Path) -> None:
    case = Case(outer=nesterov)
    model, optimizer, local_steps = training(world, case)
    for number in range(EVERY + 1):
        step(model, optimizer, batch_of(world.rank, number))
    with pytest.raises(Exception, match=r"trained apart .* such as 'scale'.*global_parameters\(\)"):
        checkpoint.save(tmp_path, model, optimizer)
    with pytest.raises(Exception, match="a copy of a model whose replicas train apart"):
        checkpoint.save(tmp_path, copy.deepcopy(model))
    with local_steps.global_parameters():
        agreed = [whole(param).clone() for param in model.parameters()]
        checkpoint.save(tmp_path, model, optimizer, state={"local_steps": local_steps})
    resumed, _, its_steps = resume(tmp_path, world, case)
    assert its_steps.differing == []
    assert its_steps.steps == EVERY + 1
    for one, two in zip(agreed, resumed.parameters(), strict=True):
        assert torch.equal(one, whole(two))


def save_on(world: World, path: Path, case: Case) -> None:
    model, optimizer, local_steps = training(world, case)
    for number in range(EVERY):
        step(model, optimizer, batch_of(world.rank, number))
    checkpoint.save(path, model, optimizer, state={"local_steps": local_steps})


def load_on(world: World, path: Path, case: Case, replicas: int) -> None:
    simulation = Simulation(case)
    for _ in range(EVERY):
        simulation.step()
    model = shard_mlp(mesh=mesh_of(world, replicas))
    optimizer = case.inner(model.parameters())
    local_steps = LocalSteps(model, optimizer, **{**case.arguments, "fragments": 2})
    checkpoint.load(path, model, optimizer, state={"local_steps": local_steps})
    replica = world.rank // (world.size // replicas)
    same = simulation.optimizers[replica if replica < 2 else 0]
    state, outer = local_steps.state_dict(), simulation.outer[0]
    assert outer is not None
    for (name, param), anchor, before in zip(
        model.named_parameters(), simulation.anchors, same.param_groups[0]["params"], strict=True
    ):
        torch.testing.assert_close(whole(param), anchor)
        torch.testing.assert_close(whole(state["anchor"][name]), anchor)
        momentum = state["outer"][name]["state"]["momentum_buffer"]
        torch.testing.assert_close(whole(momentum), outer.state[anchor]["momentum_buffer"])
        torch.testing.assert_close(whole(optimizer.state[param]["exp_avg"]), same.state[before]["exp_avg"])


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 4])
def test_a_checkpoint_is_loaded_by_more_ranks_and_replicas(rank_pool: RankPool, replicas: int, tmp_path: Path) -> None:
    case = Case(outer=nesterov)
    for outcomes in (rank_pool.run(save_on, 2, tmp_path, case), rank_pool.run(load_on, 4, tmp_path, case, replicas)):
        assert all(each.kind == "returned" for each in outcomes), failure_report(outcomes)


@ranks(2)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"every": [4, 8]}, "rank 0 has every=4 where rank 1 has every=8"),
        pytest.param({"overlap": [0, 1]}, "rank 0 has overlap=0 where rank 1 has overlap=1", marks=pytest.mark.slow),
        pytest.param({"fragments": [1, 2]}, "rank 0 has fragments=1 where rank 1 has", marks=pytest.mark.slow),
        ({"outer": [nesterov, adam]}, r"rank 0 has outer=SGD with .*'lr': 0.7.* where rank 1 has outer=Adam with"),
        ({"outer": [nesterov, None]}, r"rank 0 has outer=SGD with .* where rank 1 has outer=None"),
    ],
)
def test_ranks_that_disagree_are_told_so(world: World, arguments: dict[str, Any], said: str) -> None:
    mine = {name: values[world.rank] for name, values in arguments.items()}
    model = shard_mlp(mesh=mesh_of(world))
    optimizer = adamw(model.parameters())
    with pytest.raises(ValueError, match=said):
        LocalSteps(model, optimizer, **{"every": EVERY, **mine})
    step(model, optimizer, batch_of(world.rank, 0))  # together, as before
    assert torch.equal(*gathered(whole(model.scale)))


@ranks(2)
def test_replicas_that_begin_with_different_parameters_are_told_so(world: World) -> None:
    model: Any = seeded(MLP, seed=world.rank)
    fullshard.fully_shard(model, mesh=mesh_of(world))
    optimizer = plain_sgd(model.parameters())
    LocalSteps(model, optimizer, every=2)
    with pytest.raises(ValueError, match="begin with different values"):
        step(model, optimizer, batch_of(world.rank, 0))


@ranks(2)
def test_what_it_cannot_work_with_is_refused_by_name(world: World) -> None:
    def refuses(said: str, error: type[Exception] = ValueError, sharded: Any = None, **changes: Any) -> None:
        model = shard_mlp(mesh=mesh_of(world)) if sharded is None else sharded
        optimizer = changes.pop("optimizer", None) or adamw(model.parameters())
        with pytest.raises(error, match=said):
            LocalSteps(model, optimizer, **{"every": EVERY, **changes})

    refuses("every is 0 .*; expected 1 or more", every=0)
    refuses("every is .*; expected an int", TypeError, every="4")
    refuses("fragments is 9 .*; expected 1 to 4", fragments=9)
    refuses("overlap is 4 .*; expected 0 or more, and less than every", overlap=4)
    refuses("wire_policy is 'int8' .*; expected a WirePolicy", TypeError, wire_policy="int8")
    refuses("optimizer is .*; expected a torch.optim.Optimizer", TypeError, optimizer=object())
    refuses("what outer returns is", TypeError, outer=lambda params: params)
    refuses("LBFGS, which does not compute element by element", outer=torch.optim.LBFGS)
    refuses("sharded by fully_shard", sharded=nn.Linear(2, 2))
    refuses("has no replicas: use a 2-D mesh", sharded=shard_mlp())
    refuses("has no replicas", sharded=shard_mlp(mesh=mesh_of(world, 1)))
    refuses(r"is not sharded \(zero_stage=0\)", sharded=shard_mlp(mesh=mesh_of(world), zero_stage=0))
    refuses("use outer_zero_stage=0", sharded=shard_mlp(mesh=mesh_of(world), outer_zero_stage=1))
    hybrid: dict[str, Any] = {
        "device_mesh": mesh_of(world),
        "sharding_strategy": fullshard.ShardingStrategy.HYBRID_SHARD,
    }
    refuses("shard it with fully_shard", sharded=fullshard.FullyShardedDataParallel(seeded(MLP), **hybrid))
    model = shard_mlp(mesh=mesh_of(world))
    refuses("lacks 8 trainable parameters, such as 'blocks.0", sharded=model, optimizer=adamw([model.scale]))
    refuses("also trains 'a parameter of another model'", optimizer=adamw([nn.Parameter(torch.ones(3))]))
    model(inputs()).sum().backward()
    local_steps = LocalSteps(model, adamw(model.parameters()), every=EVERY)
    refuses("takes local steps already", sharded=model)
    assert local_steps.steps == 0


@ranks(2)
def test_garbage_of_one_rank_does_not_refuse_another_local_steps(world: World) -> None:
    model = shard_mlp(mesh=mesh_of(world))
    model(inputs()).sum().backward()
    gc.disable()
    try:
        LocalSteps(model, adamw(model.parameters()), every=EVERY)
        if world.rank == 1:
            gc.collect()
        LocalSteps(model, adamw(model.parameters()), every=EVERY)
    finally:
        gc.enable()


@ranks(2)
def test_steps_that_nobody_counts_are_refused(world: World) -> None:
    model, optimizer, local_steps = training(world, Case())
    step(model, optimizer, batch_of(world.rank, 0))
    with pytest.raises(RuntimeError, match="no LocalSteps counts the steps of this SGD"):
        step(model, plain_sgd(model.parameters()), batch_of(world.rank, 1))
    twin = copy.deepcopy(model)
    its_optimizer = adamw(twin.parameters())
    with pytest.raises(RuntimeError, match="no LocalSteps counts"):
        step(twin, its_optimizer, batch_of(world.rank, 1))
    with local_steps.global_parameters(), pytest.raises(RuntimeError, match="inside of global_parameters"):
        optimizer.step()
    twin.load_state_dict(shard_mlp(mesh=mesh_of(world)).state_dict())
    LocalSteps(twin, its_optimizer, every=1)
    step(twin, its_optimizer, batch_of(world.rank, 2))
    assert torch.equal(*gathered(whole(twin.scale)))


@ranks(2)
def test_a_replica_skips_steps_for_itself(world: World) -> None:
    mesh = mesh_of(world)
    model = shard_mlp(mesh=mesh)
    optimizer = plain_sgd(model.parameters())
    local_steps = LocalSteps(model, optimizer, every=2)
    scaler = ShardedGradScaler("cpu", init_scale=2.0, process_group=mesh["shard"].get_group())
    for number in range(2 + world.rank):
        loss = model(batch_of(world.rank, number)).square().mean()
        scaler.scale(loss * float("inf") if world.rank and not number else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert local_steps.steps == 2
    assert torch.equal(*gathered(whole(model.scale)))


@ranks(2)
def test_a_state_is_loaded_while_an_exchange_is_under_way(world: World) -> None:
    model, optimizer, local_steps = training(world, Case(every=3, overlap=2, outer=nesterov))
    for number in range(5):
        step(model, optimizer, batch_of(world.rank, number))
    state = copy.deepcopy(whole_state(local_steps.state_dict()))
    step(model, optimizer, batch_of(world.rank, 5))
    local_steps.load_state_dict(local_steps.state_dict())
    assert local_steps.differing == []
    for name, param in model.named_parameters():
        assert torch.equal(whole(param), state["anchor"][name])
    for number in range(3):  # the dropped exchange is not merged
        step(model, optimizer, batch_of(world.rank, number))
    assert torch.equal(whole(local_steps.state_dict()["anchor"]["scale"]), state["anchor"]["scale"])


def whole_state(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: whole_state(value) for key, value in state.items()}
    return whole(state) if isinstance(state, torch.Tensor) else state


@ranks(2)
def test_a_state_that_does_not_fit_is_refused(world: World) -> None:
    case = Case(every=1, outer=nesterov)
    model, optimizer, local_steps = training(world, case)
    step(model, optimizer, batch_of(world.rank, 0))
    state = local_steps.state_dict()
    _, _, other = training(world, Case(outer=adam))
    with pytest.raises(ValueError, match=r"has \['momentum_buffer'\] for parameter .* Adam needs \['exp_avg', "):
        other.load_state_dict(state)
    del state["anchor"]["scale"]
    with pytest.raises(ValueError, match=r"only one of both has \['scale'\]"):
        local_steps.load_state_dict(state)


@ranks(2)
def test_a_late_replica_is_waited_for_at_the_synchronization(world: World) -> None:
    waits: list[Wait] = []
    change = type(WAITS).change

    def noticed(self: Any, wait: Wait | None) -> Wait | None:
        if wait is not None:
            waits.append(wait)
        return change(self, wait)

    model, optimizer, _ = training(world, Case(every=3, overlap=1))
    step(model, optimizer, batch_of(world.rank, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(WAITS), "change", noticed)
        store: Any = dist.distributed_c10d._get_default_store()
        if world.rank:
            store.wait(["the other has passed the beginning of the exchange"])
        for number in range(1, 4):
            step(model, optimizer, batch_of(world.rank, number))
            if number == 2:  # the exchange has begun
                store.set("the other has passed the beginning of the exchange", "")
                assert [describe(wait) for wait in waits] == ["the synchronization of replicas"]  # what it posted
                waits.clear()
    assert [(describe(wait), dist.get_process_group_ranks(wait.process_group)) for wait in waits] == [
        ("the synchronization of replicas", [0, 1])
    ]


@ranks(2)
def test_replicas_that_are_at_different_steps_are_told_so(world: World) -> None:
    model, optimizer, local_steps = training(world, Case(every=2))
    step(model, optimizer, batch_of(world.rank, 0))
    local_steps.steps += 2 * world.rank
    with pytest.raises(RuntimeError, match=r"synchronize at different steps: rank \d brings fragment 0 after step"):
        step(model, optimizer, batch_of(world.rank, 1))


@ranks(2)
@pytest.mark.parametrize("outer", [nesterov, *slow(None)])
def test_changes_travel_encoded_and_replicas_agree(world: World, outer: Any) -> None:
    trained = list[list[torch.Tensor]]()
    for policy in (WirePolicy(), WirePolicy("int8", "int8", min_numel=0), replace(INT4, min_numel=43)):
        model, optimizer, _ = training(world, Case(outer=outer, wire_policy=policy))
        for number in range(3 * EVERY):
            step(model, optimizer, batch_of(world.rank, number))
        params = [local_tensor(param).detach() for param in model.parameters()]
        assert all(torch.equal(*gathered(param)) for param in params)
        trained.append(params)
    assert not all(map(torch.equal, trained[0], trained[1]))
    assert all(map(torch.equal, trained[0], trained[2])), "each has fewer elements than min_numel"
    for exact, near in zip(*trained[:2], strict=True):  # a change of some hundredths has an error of a 255th of that
        torch.testing.assert_close(near, exact, rtol=0, atol=2e-3)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 5), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


@pytest.mark.slow
@ranks(4)
@pytest.mark.parametrize("transport", ["shm", "p2p", "collective"])
def test_all_ranks_agree_on_a_scalar(world: World, transport: str) -> None:
    os.environ["FULLSHARD_TRANSPORT"] = transport
    model: Any = fullshard.fully_shard(seeded(Scaled), mesh=mesh_of(world))
    optimizer = adamw(model.parameters())
    LocalSteps(model, optimizer, every=2, outer=nesterov, wire_policy=INT4)
    for number in range(6):
        step(model, optimizer, batch_of(world.rank, number))
    first, *others = gathered(local_tensor(model.scale))
    assert all(torch.equal(first, other) for other in others)
