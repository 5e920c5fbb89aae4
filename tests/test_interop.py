"""Functions of torch that look for torch's own FSDP find ours too, and torch's as before.

A front end is `flat` or `original` (the wrapper without and with `use_orig_params`), `composable` (`fully_shard`) or
`plain`. All ranks see the same batches, so that the model that is not sharded is trained as all the others are.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

import fullshard
from tests.harness import World, ranks
from tests.harness.compare import LIBRARIES, adamw, each_block
from tests.harness.models import MLP, MixedDtypes, OddParameters, Transformer, random_batch, seeded, token_batch
from tests.harness.wrapper import HYBRID, wrap_blocks

FULL = StateDictOptions(full_state_dict=True)
ON_FIRST = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
WRAPPED = ("flat", "original")
FRONT_ENDS = (*WRAPPED, "composable", "plain")
EACH_WRAPPED = pytest.mark.parametrize("kind", WRAPPED)
FLOATS = random_batch(4, 6)
State = dict[str, Any]


class Trained:
    """A model of one front end, and its optimizer."""

    def __init__(
        self,
        kind: str,
        build: Callable[[], nn.Module] = MLP,
        seed: int = 0,
        steps: int = 0,
        library: ModuleType = fullshard,
        batch: Callable[[int], tuple[Tensor]] = FLOATS,
        **options: Any,
    ) -> None:
        self.model, self.batch = seeded(build, seed), batch
        if kind in WRAPPED:
            self.model = wrap_blocks(original=kind == "original", **options)(library, self.model)
        elif kind == "composable":
            each_block(**options)(library, self.model)
        self.optimizer = adamw(self.model.parameters())
        self.step(range(steps))

    def step(self, seeds: Iterable[int]) -> list[float]:
        """Train, and return the losses."""
        losses = []
        for seed in seeds:
            self.optimizer.zero_grad()
            loss = self.model(*self.batch(seed)).square().mean()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def state(self, options: StateDictOptions | None = None) -> State:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return {"model": model, "optimizer": optimizer}

    def state_for(self, options: StateDictOptions | None) -> State:
        """What this rank loads of it with these options."""
        state = self.state(options if options != FROM_FIRST else FULL)
        is_empty = options == FROM_FIRST and dist.get_rank() > 0
        return {"model": {}, "optimizer": {}} if is_empty else state

    def load(self, state: State, options: StateDictOptions | None = None) -> None:
        if options != FROM_FIRST:
            set_state_dict(
                self.model,
                self.optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
                options=options,
            )
        else:  # set_state_dict() takes nothing to mean that the model is not to be loaded
            set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=options)
            set_model_state_dict(self.model, state["model"], options=options)


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Keys, types and values; DTensors count as the tensors that they stand for."""
    if isinstance(expected, dict):
        assert set(found) == set(expected), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}/{index}")
    elif isinstance(expected, Tensor):
        found = found.full_tensor() if isinstance(found, DTensor) else found
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=lambda text: f"{where}: {text}")
    else:
        assert found == expected, where


def sorted_groups(state: State) -> State:
    """The same, where the order of the parameters in a group does not count."""
    for group in state["optimizer"].get("param_groups", ()):
        group["params"] = sorted(group["params"])
    return state


def tied_transformer() -> Transformer:
    """A model with one weight under two names."""
    return Transformer(tied=True)


# -- by itself ---------------------------------------------------------------------------------------------------------

ALONE = """
import os
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
import sys
import torch
import torch.distributed as dist
{imports}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for original in (False, True):
    torch.manual_seed(0)
    plain = torch.nn.Linear(3, 2)
    model = fullshard.FullyShardedDataParallel(torch.nn.Linear(3, 2), use_orig_params=original)
    model.load_state_dict(plain.state_dict())
    states = []
    for each in (plain, model):
        optimizer = torch.optim.Adam(each.parameters())
        each(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        states.append(get_optimizer_state_dict(each, optimizer)["state"])
    assert states[0].keys() == states[1].keys(), states
    for name, state in states[0].items():
        found = states[1][name]["exp_avg"]
        assert torch.equal(state["exp_avg"], getattr(found, "full_tensor", lambda: found)()), name
"""
BOUND = "from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict"

SHARDED = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
fullshard.fully_shard(torch.nn.Linear(2, 2))
"""


def run_alone(code: str) -> str:
    """Run a program in a process that imported nothing yet; returns what it prints."""
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        f"import fullshard\n{BOUND}",
        f"{BOUND}\nimport fullshard",
        f"import torch.distributed.fsdp\nimport fullshard\n{BOUND}",
        f"import fullshard\nimport fullshard.interop\n{BOUND}",
    ],
    ids=["before", "after", "between", "asked"],
)
def test_nobody_has_to_ask_for_it(imports: str) -> None:
    run_alone(ALONE.format(imports=imports))


def test_nothing_of_torchs_sharding_and_nothing_optional_is_imported_when_nobody_did() -> None:
    """Nor does ``patch()`` take what knows both libraries: ``unpatch()`` would take it back, and a model that is
    sharded later would be unknown."""
    code = """
import fullshard, fullshard.interop, sys
print([name for name in sys.modules if name.startswith({!r})])
from torch.distributed.checkpoint import state_dict
fullshard.patch()
print(state_dict.FSDP.torch_class.__module__)
"""
    packages = ("torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed._composable.fsdp")
    optional = ("wrapper", "checkpoint", "report", "rehearsal", "testing", "optim.local_steps", "optim.synchronization")
    packages += tuple(f"fullshard.{name}" for name in optional)
    assert run_alone(code.format(packages)) == "[]\ntorch.distributed.fsdp.fully_sharded_data_parallel"


@pytest.mark.slow
def test_it_takes_effect_in_stages_of_pipelines_whenever_they_are_imported() -> None:
    code = """
{}
print(fullshard.FSDPModule in stage.FSDPModule, fullshard.FSDPModule in schedules.FSDPModule)
"""
    ours, theirs = "import fullshard", "from torch.distributed.pipelining import schedules, stage"
    for imports in (f"{ours}\n{SHARDED}\n{theirs}", f"{ours}\n{theirs}\n{SHARDED}", f"{theirs}\n{ours}\n{SHARDED}"):
        assert run_alone(code.format(imports)) == "True True"


@pytest.mark.slow
def test_a_module_that_is_loaded_anew_is_served_again() -> None:
    code = f"""
import fullshard, importlib
{SHARDED}
from torch.distributed.pipelining import stage
importlib.reload(stage)
print(fullshard.FSDPModule in stage.FSDPModule)
"""
    assert run_alone(code) == "True"


def test_a_release_of_torch_without_a_name_says_so() -> None:
    module = ModuleType("some.module")
    with pytest.warns(RuntimeWarning, match=r"some\.module of torch .* has no \['FSDP'\]"):
        fullshard.interop._replace(module, {"FSDP": str})
    assert not hasattr(module, "FSDP")


def test_gradients_of_parameters_from_a_generator_are_clipped() -> None:
    """One function clips; a list is only what most callers give."""
    param = nn.Parameter(torch.ones(4))
    param.grad = torch.full((4,), 8.0)
    fullshard.interop.install()
    clip = importlib.import_module("torch.nn.utils.clip_grad")._clip_grads_with_norm_
    clip((each for each in [param]), 1.0, torch.tensor(16.0))
    assert param.grad.norm().item() == pytest.approx(1.0)


# -- whole state dicts -------------------------------------------------------------------------------------------------


@ranks(1, 2, 3)
@EACH_WRAPPED
@pytest.mark.parametrize("offload", [False, True], ids=["everywhere", "first"])
def test_whole_state_dicts_are_those_of_the_plain_model(world: World, kind: str, offload: bool) -> None:
    found = sorted_groups(Trained(kind, steps=2).state(ON_FIRST if offload else FULL))
    if offload and world.rank > 0:
        assert found == {"model": {}, "optimizer": {}}
    else:
        assert_same(found, sorted_groups(Trained("plain", steps=2).state()))


@ranks(1, 3)
@pytest.mark.parametrize(
    ("kind", "build"),
    [("original", OddParameters), *((kind, build) for kind in WRAPPED for build in (MixedDtypes, tied_transformer))],
)
def test_whole_state_dicts_of_odd_models(world: World, kind: str, build: Any) -> None:
    batch = token_batch(2, 4) if isinstance(build(), Transformer) else FLOATS
    trained, plain = (Trained(each, build, steps=2, batch=batch) for each in (kind, "plain"))
    state = trained.state(FULL)
    assert_same(state["model"], plain.state()["model"])
    other = Trained(kind, build, seed=1, batch=batch)
    other.load(state, FULL)
    assert_same(other.state(FULL), trained.state(FULL))
    assert other.step(range(2, 4)) == trained.step(range(2, 4))


@ranks(2, 3)
@EACH_WRAPPED
@pytest.mark.parametrize("options", [FULL, FROM_FIRST, None], ids=["full", "broadcast", "sharded"])
@pytest.mark.parametrize("steps", [0, 1], ids=["new", "trained"])
def test_state_dicts_are_loaded(world: World, kind: str, options: StateDictOptions | None, steps: int) -> None:
    for model in ({}, {"build": tied_transformer, "batch": token_batch(2, 4)}):
        trained, other = Trained(kind, steps=2, **model), Trained(kind, seed=1, steps=steps, **model)  # type: ignore[arg-type]
        other.load(trained.state_for(options), options)
        assert_same(other.state(FULL), trained.state(FULL))
        assert other.step(range(2, 4)) == trained.step(range(2, 4))


@ranks(2)
@pytest.mark.parametrize("strategy", [fullshard.ShardingStrategy.FULL_SHARD, fullshard.ShardingStrategy.NO_SHARD])
def test_a_parameter_with_names_in_two_wrapped_modules_comes_from_the_first_rank(
    world: World, strategy: fullshard.ShardingStrategy
) -> None:
    def wrapped(seed: int) -> Any:
        model = seeded(tied_transformer, seed)
        for name in ("head", "tokens"):
            setattr(model, name, fullshard.FullyShardedDataParallel(getattr(model, name), sharding_strategy=strategy))
        return fullshard.FullyShardedDataParallel(model, sharding_strategy=strategy)

    one, other = wrapped(0), wrapped(1)
    state = get_model_state_dict(one, options=FULL)
    set_model_state_dict(other, state if world.rank == 0 else {}, options=FROM_FIRST)
    assert_same(get_model_state_dict(other, options=FULL), state)


@ranks(2)
@EACH_WRAPPED
@pytest.mark.parametrize(("full", "steps"), [(True, 0), (False, 0), (False, 1)])
def test_flattened_optimizer_state_is_loaded(world: World, kind: str, full: bool, steps: int) -> None:
    trained, other = Trained(kind, steps=2), Trained(kind, seed=1, steps=steps)
    how = StateDictOptions(full_state_dict=full, flatten_optimizer_state_dict=True)
    state = trained.state(how)
    assert "state.blocks.0.0.weight.exp_avg" in state["optimizer"]
    other.load(state, how)
    assert_same(other.state(FULL), trained.state(FULL))


@ranks(4)
@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        pytest.param(strategy, kind, marks=() if (strategy, kind) == ("HYBRID_SHARD", "original") else pytest.mark.slow)
        for strategy in HYBRID
        for kind in WRAPPED
    ],
)
def test_state_dicts_of_hybrid_strategies(world: World, kind: str, strategy: str) -> None:
    mesh = world.mesh(2, 2, names=("replicate", "shard"))
    trained, other = (Trained(kind, seed=seed, strategy=strategy, device_mesh=mesh) for seed in range(2))
    trained.step(range(2))
    plain = sorted_groups(Trained("plain", steps=2).state())
    assert_same(sorted_groups(trained.state(FULL)), plain)
    found = trained.state(ON_FIRST)
    assert bool(found["model"]) == bool(found["optimizer"]) == (world.rank == 0)
    other.load(trained.state())
    assert_same(sorted_groups(other.state(FULL)), plain)


@ranks(4)
@EACH_WRAPPED
def test_ranks_that_are_not_all_of_the_world(world: World, kind: str) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = world.rank // 2
    trained, other = (Trained(kind, seed=seed + half, process_group=groups[half]) for seed in (0, 2))
    trained.step(range(half + 1))
    other.load(trained.state(FULL), FULL)
    assert_same(sorted_groups(other.state(FULL)), sorted_groups(Trained("plain", seed=half, steps=half + 1).state()))


# -- options -----------------------------------------------------------------------------------------------------------


@ranks(2)
@EACH_WRAPPED
def test_names_can_be_missing_where_nothing_is_strict(world: World, kind: str) -> None:
    trained, other = Trained(kind), Trained(kind, seed=1)
    state = get_model_state_dict(trained.model)
    before = get_model_state_dict(other.model, options=FULL)
    del state["scale"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\).*"scale"'):
        set_model_state_dict(other.model, dict(state))
    missing, unexpected = set_model_state_dict(other.model, state, options=StateDictOptions(strict=False))
    assert (missing, unexpected) == (["scale"], [])
    after = get_model_state_dict(other.model, options=FULL)
    assert_same(after, {**get_model_state_dict(trained.model, options=FULL), "scale": before["scale"]})


@ranks(2)
@EACH_WRAPPED
def test_submodules_and_frozen_parameters(world: World, kind: str) -> None:
    trained = Trained(kind, lambda: freeze(MLP()))
    names = ["blocks.1.0.weight", "blocks.1.0.bias"]
    with pytest.warns(FutureWarning, match="submodules"):
        state = get_model_state_dict(trained.model, submodules={trained.model.blocks[1]}, options=FULL)
    assert list(state) == names
    state = get_model_state_dict(trained.model, options=StateDictOptions(ignore_frozen_params=True))
    assert not set(names) & set(state)
    assert len(state) == len(list(MLP().parameters())) - 2


def freeze(model: MLP) -> MLP:
    model.blocks[1].requires_grad_(False)
    return model


class Renamed(nn.Module):
    """A module that hides a level of its names from state dicts, and says so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MLP()
        self.register_state_dict_post_hook(self._hide)
        self.register_load_state_dict_pre_hook(self._show)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out

    @staticmethod
    def _hide(module: nn.Module, state: State, prefix: str, metadata: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}inner.")]:
            state[prefix + key.removeprefix(f"{prefix}inner.")] = state.pop(key)

    @staticmethod
    def _show(module: nn.Module, state: State, prefix: str, *rest: Any) -> None:
        for key in [key for key in state if key.startswith(prefix)]:
            state[f"{prefix}inner.{key.removeprefix(prefix)}"] = state.pop(key)

    def _fqn_modifiers(self) -> dict[str, str]:
        return dict.fromkeys(("blocks", "scale"), "inner")


@ranks(2)
def test_modules_that_rename_their_keys(world: World) -> None:
    """Below a wrapper: torch's functions look at no other place."""
    models = [
        fullshard.FullyShardedDataParallel(seeded(lambda: nn.Sequential(Renamed()), seed), use_orig_params=True)
        for seed in range(2)
    ]
    state = get_model_state_dict(models[0], options=FULL)
    assert list(state) == [f"0.{name}" for name in MLP().state_dict()]
    set_model_state_dict(models[1], state, options=FULL)
    assert_same(get_model_state_dict(models[1], options=FULL), get_model_state_dict(models[0], options=FULL))


# -- checkpoints -------------------------------------------------------------------------------------------------------


@ranks(3)
@pytest.mark.parametrize("kind", [*(pytest.param(each, marks=pytest.mark.slow) for each in WRAPPED), "composable"])
def test_a_checkpoint_is_loaded_by_other_numbers_of_ranks(world: World, kind: str, tmp_path: Path) -> None:
    plain = Trained("plain")
    for number, count in enumerate((2, 3, 1, 2)):
        plain.step([number])
        group = dist.new_group(list(range(count)))
        if world.rank < count:
            where = {"mesh" if kind == "composable" else "device_mesh": DeviceMesh.from_group(group, "cpu")}
            trained = Trained(kind, seed=number, **where)
            if number > 0:
                state = trained.state()
                dcp.load(state, checkpoint_id=tmp_path / str(number - 1), process_group=group)
                trained.load(state)
            trained.step([number])
            state = trained.state()
            if count > 1:
                assert all(value.placements == (Shard(0),) for value in state["model"].values())
            assert_same(sorted_groups(state), sorted_groups(plain.state()), f"{count} ranks")
            dcp.save(trained.state(), checkpoint_id=tmp_path / str(number), process_group=group)
        dist.barrier()


@ranks(2)
@pytest.mark.parametrize(
    "options",
    [*(pytest.param(each, marks=pytest.mark.slow) for each in (FULL, FROM_FIRST)), None],
    ids=["full", "broadcast", "dcp"],
)
def test_from_any_front_end_to_any(world: World, options: StateDictOptions | None, tmp_path: Path) -> None:
    plain = Trained("plain", steps=1)
    before = Trained("flat", steps=1)
    chain = ("composable", "plain", "original", "flat", "plain", "composable", "original", "composable", "flat")
    for number, kind in enumerate(chain, 1):
        trained = Trained(kind, seed=number)
        if options is None:
            dcp.save(before.state(), checkpoint_id=tmp_path / str(number))
            state = trained.state()
            dcp.load(state, checkpoint_id=tmp_path / str(number))
            trained.load(state)
        else:
            trained.load(before.state_for(options), options)
        plain.step([number])
        trained.step([number])
        assert_same(sorted_groups(trained.state(FULL)), sorted_groups(plain.state()), f"{kind}, {number}")
        before = trained


@ranks(2)
@EACH_WRAPPED
@pytest.mark.parametrize("source", ["torch", "fullshard"])
def test_a_checkpoint_of_torch_is_loaded_and_the_other_way_round(
    world: World, kind: str, source: str, tmp_path: Path
) -> None:
    (target,) = set(LIBRARIES) - {source}
    trained = Trained(kind, steps=2, library=LIBRARIES[source])
    other = Trained(kind, seed=1, library=LIBRARIES[target])
    dcp.save(trained.state(), checkpoint_id=tmp_path)
    state = other.state()
    dcp.load(state, checkpoint_id=tmp_path)
    other.load(state)
    assert_same(sorted_groups(other.state(FULL)), sorted_groups(trained.state(FULL)))


# -- torch's own -------------------------------------------------------------------------------------------------------


HOW = {"full": FULL, "broadcast": FROM_FIRST, "sharded": None}
OF_TORCH = [(kind, how) for kind in FRONT_ENDS[:3] for how in HOW]


@ranks(2)
@pytest.mark.parametrize(
    ("kind", "options"),
    [  # in the quick lane each once
        pytest.param(kind, HOW[how], id=f"{kind}-{how}", marks=[] if number % 4 == 0 else [pytest.mark.slow])
        for number, (kind, how) in enumerate(OF_TORCH)
    ],
)
def test_torchs_own_go_on_working(world: World, kind: str, options: StateDictOptions | None) -> None:
    torchs = LIBRARIES["torch"]
    trained, other = Trained(kind, steps=2, library=torchs), Trained(kind, seed=1, library=torchs)
    plain = sorted_groups(Trained("plain", steps=2).state())
    assert_same(sorted_groups(trained.state(FULL)), plain)
    other.load(trained.state_for(options), options)
    assert_same(sorted_groups(other.state(FULL)), plain)


# -- pipelines ---------------------------------------------------------------------------------------------------------


def width_8() -> nn.Sequential:
    """A model to be cut into stages."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))


@ranks(4)
@pytest.mark.parametrize(
    ("schedule", "kind"),
    [
        *((schedule, kind) for schedule in ("1F1B", "Interleaved1F1B") for kind in ("blocks", "whole")),
        ("1F1B", "wrapped"),
        ("InterleavedZeroBubble", "whole"),  # with modules sharded inside of stages it fails with torch's, too
    ],
)
def test_stages_of_pipelines(world: World, kind: str, schedule: str) -> None:
    """Gradients of stages are those of the model. Groups of ``fully_shard`` are reduced once a step."""
    pipelining = importlib.import_module("torch.distributed.pipelining")
    mesh = world.mesh(2, 2, names=("pipeline", "data"))
    place, count = mesh["pipeline"].get_local_rank(), 2 if schedule == "1F1B" else 4
    inputs = random_batch(16, 8)
    model, reduced = seeded(width_8), []
    stages = []
    for number in range(place, count, 2):
        part = model[2 * number : 2 * number + 2] if count == 2 else model[number : number + 1]
        if kind == "wrapped":
            part = fullshard.FullyShardedDataParallel(part, device_mesh=mesh["data"], use_orig_params=True)
        else:
            for module in (*part, part) if kind == "blocks" else (part,):
                fullshard.fully_shard(module, mesh=mesh["data"])
            part.add_observer(lambda event: reduced.append(event.group) if event.action == "reduce" else None)
        stages.append(
            pipelining.PipelineStage(part, number, count, torch.device("cpu"), group=mesh.get_group("pipeline"))
        )
    make = getattr(pipelining, f"Schedule{schedule}")
    runs = make(stages[0] if schedule == "1F1B" else stages, 4, loss_fn=lambda out, goal: out.square().mean())
    reference = seeded(width_8)
    for step in range(2):
        reduced.clear()
        for each in (*stages, reference):
            (each if each is reference else each.submod).zero_grad()
        mine = inputs(10 * step + mesh["data"].get_local_rank())[0]
        runs.step(*([mine] if place == 0 else []), **({"target": mine} if place == 1 else {}))
        for other in range(2):
            (reference(*inputs(10 * step + other)).square().mean() / 2).backward()
        for stage in stages:
            start = 2 * stage.stage_index if count == 2 else stage.stage_index
            with fullshard.summon_full_params(stage.submod, with_grads=True):
                found = [param.grad for param in stage.submod.parameters()]
            whole = [param.grad for param in reference[start : start + 4 // count].parameters()]
            assert_same(found, whole, f"step {step}, stage {stage.stage_index}")
        if kind != "wrapped":
            assert len(reduced) == (2 if kind == "blocks" else len(stages)), reduced


# -- replicas around what is sharded -----------------------------------------------------------------------------------


def check_training(world: World, model: nn.Module, reference: nn.Module) -> None:
    """Some steps of a model on ranks are those of the whole model on all batches."""
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, reference)]
    for step in range(3):
        losses = [reference(*FLOATS(10 * step + rank)).square().mean() for rank in range(world.size)]
        loss = model(*FLOATS(10 * step + world.rank)).square().mean()
        assert_same(loss, losses[world.rank], f"step {step}")
        (sum(losses) / world.size).backward()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@ranks(1, 2, 3)
@pytest.mark.parametrize("transport", ["shm", "p2p", "collective"])
@pytest.mark.parametrize("name", ["replicate", "replicate_with_fsdp"])
@pytest.mark.parametrize(
    ("library", "kind"), [("fullshard", kind) for kind in FRONT_ENDS[:3]] + [("torch", "composable")]
)
def test_replicas_around_sharded_parts(world: World, library: str, kind: str, name: str, transport: str) -> None:
    """Parameters of sharded modules are left to them, the others are replicated: training is that of the model."""
    os.environ["FULLSHARD_TRANSPORT"] = transport
    replicate: Any = importlib.import_module(f"torch.distributed._composable.{name}").replicate
    mesh, fsdp = world.mesh(), LIBRARIES[library]
    model, reference = seeded(MLP), seeded(MLP)
    for index in (1, 3):
        if kind == "composable":
            fsdp.fully_shard(model.blocks[index], mesh=mesh)
        else:
            original = kind == "original"
            model.blocks[index] = fsdp.FullyShardedDataParallel(model.blocks[index], use_orig_params=original)
    replicate(model, **({} if name == "replicate" else {"mesh": mesh}))
    check_training(world, model, reference)


@ranks(2)
@pytest.mark.parametrize("name", ["replicate", "replicate_with_fsdp"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_what_is_sharded_is_not_replicated(world: World, library: str, name: str) -> None:
    replicate: Any = importlib.import_module(f"torch.distributed._composable.{name}").replicate
    model = LIBRARIES[library].fully_shard(seeded(MLP), mesh=world.mesh())
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        replicate(model)


@ranks(2)
@pytest.mark.parametrize("name", ["replicate", "replicate_with_fsdp"])
@pytest.mark.parametrize(
    ("library", "kind"), [(each, kind) for each in LIBRARIES for kind in ("composable", "original")]
)
def test_replicas_inside_of_what_is_sharded(world: World, library: str, kind: str, name: str) -> None:
    """What is replicated is not sharded too: training is that of the model."""
    replicate: Any = importlib.import_module(f"torch.distributed._composable.{name}").replicate
    mesh, fsdp = world.mesh(), LIBRARIES[library]
    model, reference = seeded(MLP), seeded(MLP)
    replicate(model.blocks[1], **({} if name == "replicate" else {"mesh": mesh}))
    theirs = [type(param) for param in model.blocks[1].parameters()]
    if kind == "composable":
        fsdp.fully_shard(model, mesh=mesh)
    else:
        model = fsdp.FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    assert [type(param) for param in model.blocks[1].parameters()] == theirs
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_training(world, model, reference)
