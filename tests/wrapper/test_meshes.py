"""From a strategy, groups or a mesh to one mesh: who shards with whom, what is refused, and what is made once."""

from __future__ import annotations

import itertools
import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard.group.mesh import DataMesh
from fullshard.wrapper.meshes import HYBRID, strategy_and_mesh
from fullshard.wrapper.settings import ShardingStrategy
from tests.harness import World, fake_world, ranks

STRATEGIES = list(ShardingStrategy)
SHARDING = [strategy for strategy in STRATEGIES if strategy not in (*HYBRID, ShardingStrategy.NO_SHARD)]
FULL, HYBRID_SHARD, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD, ShardingStrategy.NO_SHARD


def resolve(
    strategy: Any, process_group: Any = None, device_mesh: Any = None, policy: bool = False
) -> tuple[ShardingStrategy, DataMesh]:
    return strategy_and_mesh(strategy or FULL, process_group, device_mesh, policy, "cpu")


def by_torch(strategy: Any, process_group: Any = None, device_mesh: Any = None, policy: bool = False) -> Any:
    named = None if strategy is None else torch_fsdp.ShardingStrategy[strategy.name]
    return torch_fsdp.FullyShardedDataParallel(
        nn.Linear(4, 4),
        process_group=process_group,
        sharding_strategy=named,
        device_mesh=device_mesh,
        auto_wrap_policy=torch_fsdp.wrap.ModuleWrapPolicy([nn.Conv2d]) if policy else None,
        device_id=torch.device("cpu"),
    )


def outcome(make: Any, *args: Any, **kwargs: Any) -> tuple[Any, list[type[Warning]]]:
    """The strategy or the type of the error, and the categories of warnings that a call gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            made = make(*args, **kwargs)
        except Exception as error:
            return type(error), []
    strategy = made[0] if isinstance(made, tuple) else made.sharding_strategy
    return strategy.name, [warning.category for warning in caught if "sync" not in str(warning.message)]


def ranks_of(data: DataMesh) -> tuple[Any, Any]:
    """The ranks that replicate and the ranks that shard, as the groups say it; each has to work."""
    found = []
    for group in (data.replicate_group, data.shard_group):
        if group is None:
            found.append(None)
            continue
        mine = torch.zeros(dist.get_world_size(), dtype=torch.int64)
        mine[dist.get_rank()] = 1
        dist.all_reduce(mine, group=group)
        assert mine.nonzero().flatten().tolist() == sorted(dist.get_process_group_ranks(group))
        found.append(dist.get_process_group_ranks(group))
    return found[0], found[1]


@ranks(1, 2, 3, 4)
def test_strategies_warnings_and_errors_are_torchs(world: World) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "1"  # what torch counts as the devices of a node without an accelerator
    for strategy, policy in itertools.product([None, *STRATEGIES], (False, True)):
        assert outcome(resolve, strategy, policy=policy) == outcome(by_torch, strategy, policy=policy), strategy


@ranks(2, 4)
def test_groups_and_meshes_fit_the_strategies_that_they_fit_in_torch(world: World) -> None:
    one, two = world.mesh(), world.mesh(1, world.size, names=("nodes", "ranks"))
    pair = (two.get_group(1), two.get_group(0))
    choices: dict[str, dict[str, Any]] = {
        "group": {"process_group": dist.group.WORLD},
        "pair": {"process_group": pair},
        "list": {"process_group": list(pair)},
        "mesh": {"device_mesh": one},
        "hybrid mesh": {"device_mesh": two},
        "both": {"device_mesh": one, "process_group": dist.group.WORLD},
    }
    for strategy, (given, choice) in itertools.product(STRATEGIES, choices.items()):
        ours, theirs = outcome(resolve, strategy, **choice), outcome(by_torch, strategy, **choice)
        if theirs[0] is AttributeError:  # which torch raises by accident
            theirs = ValueError, []
        if strategy not in HYBRID and given == "hybrid mesh":
            theirs[1].append(UserWarning)  # torch leaves the second dim alone without a word
            assert ours[0] == theirs[0], strategy
            assert set(ours[1]) <= set(theirs[1]), strategy
        else:
            assert ours == theirs, (strategy, given)


@ranks(1, 2, 3, 4)
def test_all_ranks_shard_by_default(world: World) -> None:
    every = list(range(world.size))
    for strategy in (None, *SHARDING):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found, data = resolve(strategy)
        if world.size == 1:
            assert found is NO_SHARD
            assert ranks_of(data) == (every, None)
        else:
            assert found is (strategy or FULL)
            assert ranks_of(data) == (None, every)
            assert data.mesh.mesh.tolist() == every
            assert data.shard_group is dist.group.WORLD


@ranks(2, 3, 4)
def test_no_shard_replicates(world: World) -> None:
    with pytest.warns(FutureWarning, match="DistributedDataParallel"):
        _, data = resolve(NO_SHARD)
    assert data.mesh.ndim == 1
    assert ranks_of(data) == (list(range(world.size)), None)


@ranks(4)
def test_nodes_are_made_once_and_shared(world: World) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    node, place = divmod(world.rank, 2)
    found, data = resolve(HYBRID_SHARD, policy=True)
    assert found is HYBRID_SHARD
    assert ranks_of(data) == ([place, place + 2], [2 * node, 2 * node + 1])
    assert data.mesh.mesh.tolist() == [[0, 1], [2, 3]]
    assert data.mesh.mesh_dim_names == ("replicate", "shard")
    assert data.mesh["shard"].mesh.tolist() == [2 * node, 2 * node + 1]
    assert data.mesh["shard"].get_group() is data.shard_group
    pair = (data.shard_group, data.replicate_group)
    for strategy in HYBRID:
        assert resolve(strategy, policy=True) == (strategy, data)
        assert resolve(strategy, pair)[1] is resolve(strategy, pair)[1]
        assert resolve(strategy, pair)[1].shard_group is data.shard_group


@ranks(2, 3)
def test_without_a_launcher_all_ranks_are_one_node(world: World) -> None:
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    _, data = resolve(HYBRID_SHARD, policy=True)
    assert ranks_of(data) == ([world.rank], list(range(world.size)))


def test_a_world_that_does_not_divide_into_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    for node in (3, 16, 0):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(node))
        with fake_world(8), pytest.raises(ValueError, match=f"8 ranks .* {node} ranks"):
            resolve(HYBRID_SHARD, policy=True)


def test_a_node_has_as_many_ranks_as_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    monkeypatch.setattr("fullshard.wrapper.meshes.init_device_mesh", lambda _, *args, **kw: init("cpu", *args, **kw))
    init = init_device_mesh
    with fake_world(1024, 9):
        _, data = strategy_and_mesh(HYBRID_SHARD, None, None, True, "cuda")
        assert dist.get_process_group_ranks(data.shard_group) == list(range(8, 16))
        assert dist.get_process_group_ranks(data.replicate_group) == list(range(1, 1024, 8))


@ranks(4)
def test_a_pair_of_groups_becomes_their_grid(world: World) -> None:
    for grid in ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 3], [1, 2]], [[0, 1, 2, 3]]):
        transposed = [list(column) for column in zip(*grid, strict=True)]
        rows = {rank: row for row in grid for rank in row}
        columns = {rank: column for column in transposed for rank in column}
        shard, _ = dist.new_subgroups_by_enumeration(grid)
        replicate, _ = dist.new_subgroups_by_enumeration(transposed)
        _, data = resolve(HYBRID_SHARD, (shard, replicate))
        assert (data.shard_group, data.replicate_group) == (shard, replicate)
        assert ranks_of(data) == (sorted(columns[world.rank]), sorted(rows[world.rank]))
        mesh = data.mesh.mesh.tolist()
        assert sorted(map(sorted, mesh)) == sorted(map(sorted, grid))
        assert sorted(map(sorted, zip(*mesh, strict=True))) == sorted(map(sorted, transposed))
        assert resolve(HYBRID_SHARD, (shard, replicate))[1] is data


@ranks(4)
def test_groups_that_are_no_row_and_column(world: World) -> None:
    """The last would add up gradients of different parts of the parameters: 0 is the first of its row, 3 the last."""
    shard, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    for columns in ([[0, 1], [2, 3]], [[0, 1, 2, 3]], [[0, 3], [1, 2]]):
        replicate, _ = dist.new_subgroups_by_enumeration(columns)
        with pytest.raises(ValueError, match=f"rank {world.rank} in common"):
            resolve(HYBRID_SHARD, (shard, replicate))


@ranks(4)
def test_hybrid_meshes(world: World) -> None:
    child = world.mesh(2, 2, 1, names=("a", "b", "tp"))["a", "b"]
    for mesh in (world.mesh(2, 2, names=("a", "b")), world.mesh(2, 2), child):
        _, data = resolve(HYBRID_SHARD, device_mesh=mesh)
        assert (data.replicate_group, data.shard_group) == (mesh.get_group(0), mesh.get_group(1))
        assert data.mesh.mesh.tolist() == [[0, 1], [2, 3]]
        assert data.mesh[data.mesh.mesh_dim_names[-1]].mesh.tolist() == mesh.mesh[world.rank // 2].tolist()
        assert (data.mesh is mesh) is (mesh.mesh_dim_names is not None)
        assert resolve(HYBRID_SHARD, device_mesh=mesh)[1] is data


@ranks(4)
def test_a_child_of_a_mesh(world: World) -> None:
    mesh = world.mesh(2, 2, names=("dp", "tp"))["dp"]
    for strategy in (FULL, NO_SHARD):
        _, data = resolve(strategy, device_mesh=mesh)
        assert data.mesh is mesh
        assert (data.shard_group or data.replicate_group) is mesh.get_group()
        assert (data.shard_group is not None) is (strategy is FULL)
        assert resolve(strategy, device_mesh=mesh)[1] is data


@ranks(4)
def test_the_first_dim_of_a_larger_mesh_is_used_with_a_warning(world: World) -> None:
    for names in (("a", "b"), None):
        with pytest.warns(UserWarning, match="first dim"):
            _, data = resolve(FULL, device_mesh=world.mesh(2, 2, names=names))
        assert ranks_of(data) == (None, [world.rank % 2, world.rank % 2 + 2])


@ranks(2, 4)
def test_replicas_remain_where_one_rank_shards(world: World) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    mesh = world.mesh(world.size, 1, names=("replicate", "shard"))
    choices: list[dict[str, Any]] = [
        {"device_mesh": mesh},
        {"process_group": (mesh.get_group(1), mesh.get_group(0))},
        {"policy": True},
    ]
    for choice in choices:
        with pytest.warns(UserWarning, match="one rank to shard over"):
            strategy, data = resolve(HYBRID_SHARD, **choice)
        assert strategy is NO_SHARD
        assert ranks_of(data) == (list(range(world.size)), None)


@ranks(2)
def test_a_mesh_without_this_rank(world: World) -> None:
    mesh = DeviceMesh("cpu", [0])
    if world.rank == 1:
        with pytest.raises(ValueError, match="rank 1 is not in the mesh"):
            resolve(FULL, device_mesh=mesh)
    group = dist.new_group([0])
    if world.rank == 1:
        with pytest.raises(ValueError, match="process_group must be a ProcessGroup that has this rank"):
            resolve(FULL, group)


@pytest.mark.parametrize("argument", ["process_group", "device_mesh"])
def test_neither_a_group_nor_a_mesh(argument: str) -> None:
    for wrong, strategy in itertools.product(("gloo", 3, [0, 1]), (FULL, HYBRID_SHARD)):
        with fake_world(4), pytest.raises(ValueError, match=argument):
            resolve(strategy, **{argument: wrong})


def test_no_default_process_group() -> None:
    for call in (resolve, by_torch):
        with pytest.raises(ValueError, match=r"[Dd]efault process group"):
            call(FULL)


def test_meshes_end_with_the_world() -> None:
    made = []
    for _ in range(2):
        with fake_world(4):
            made.append(resolve(FULL)[1])
            assert resolve(FULL)[1] is made[-1]
            assert made[-1].shard_group is dist.group.WORLD
    assert made[0] is not made[1]
