"""The steps before parameters are flattened: what is ignored, how meta becomes memory, where it lies, whose values."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import fullshard
from fullshard.wrapper import initialise
from fullshard.wrapper.initialise import (
    Ignored,
    check_flattenable,
    compute_device,
    ignored,
    managed_modules,
    materialize,
    sync_module_states,
)
from fullshard.wrapper.meshes import strategy_and_mesh
from fullshard.wrapper.settings import ShardingStrategy
from tests.checkpoint.cases import quiet
from tests.fully_shard.cases import first_of
from tests.harness import World, fake_world, ranks

CPU = torch.device("cpu")
FULL, HYBRID_SHARD, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD, ShardingStrategy.NO_SHARD


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)))
        self.again = self.inner[0]
        self.register_buffer("scale", torch.ones(4))


@pytest.fixture
def world_of_two() -> Iterator[World]:
    with fake_world(2) as world:
        yield world


def wrapped_by_torch(module: nn.Module, **options: Any) -> Any:
    return torch_fsdp.FullyShardedDataParallel(module, device_id=CPU, **options)


@pytest.mark.parametrize("argument", ["ignored_modules", "ignored_states"])
def test_modules_are_ignored_with_what_is_inside(argument: str) -> None:
    net = Net()
    for container in (list, tuple, set, iter):
        given = {"ignored_modules": None, "ignored_states": None, argument: container([net.inner[1]])}
        found = ignored(net, **given)
        assert found.modules == {net.inner[1], net.inner[1][0], net.inner[1][1]}
        assert found.params == set(net.inner[1].parameters())
        assert found.buffers == set(net.inner[1].buffers())


def test_nothing_or_parameters_or_what_nested_instances_ignore_is_ignored() -> None:
    net = Net()
    assert ignored(net, None, None) == Ignored(set(), set(), set())
    assert ignored(net, None, iter([net.first.bias])) == Ignored(set(), {net.first.bias}, set())
    nested = ignored(net.inner, [net.inner[1]], None)
    found = ignored(net, None, [net.first.bias], [nested])
    assert found == Ignored(nested.modules, nested.params | {net.first.bias}, nested.buffers)


def test_sharded_modules_inside_are_not_ignored(world_of_two: World) -> None:
    net = Net()
    nested = net.inner[1][1]
    fullshard.fully_shard(nested, mesh=init_device_mesh("cpu", (2,)))
    found = ignored(net, [net.inner], None)
    assert found.modules == {net.inner, net.inner[0], net.inner[1], net.inner[1][0]}
    assert found.params == {*net.inner[0].parameters(), *net.inner[1][0].parameters()}
    assert ignored(net, None, [nested.weight, net.first.bias]).params == {net.first.bias}
    with pytest.raises(ValueError, match="sharded already"):
        ignored(net, [nested], None)
    with pytest.raises(ValueError, match="ignored_states has a FSDPLinear"):
        ignored(net, None, [net.first, nested])


def test_what_cannot_be_ignored(world_of_two: World) -> None:
    net = Net()
    mistakes: list[tuple[Any, Any, type[Exception]]] = [
        ([net.first], [net.first], ValueError),
        ([], [], ValueError),
        ([net.first.weight], None, ValueError),
        (["first"], None, ValueError),
        (net.first, None, TypeError),
        (3, None, TypeError),
        (None, 3, TypeError),
        (None, [net.scale], ValueError),
        (None, [net.first, net.first.weight], ValueError),
        (None, [net.first, None], ValueError),
        (None, {"first": net.first}, ValueError),
        (None, net.first.weight[0], ValueError),
    ]
    for modules, states, error in mistakes:
        with pytest.raises(error, match="ignored_"):
            ignored(net, modules, states)
        with pytest.raises(error):
            wrapped_by_torch(net, ignored_modules=modules, ignored_states=states)


def test_the_root_is_ignored_with_a_warning(world_of_two: World) -> None:
    net = Net()
    with pytest.warns(UserWarning, match="a Net: nothing of it"):
        assert ignored(net, [net], None).params == set(net.parameters())
    with pytest.warns(UserWarning, match="top-level module"):
        wrapped_by_torch(net, ignored_modules=[net])


class Recorder(nn.Module):
    def __init__(self, said: list[str], name: str, *children: nn.Module, state: bool = True) -> None:
        super().__init__()
        self.said, self.name = said, name
        if state:
            self.weight = nn.Parameter(torch.zeros(3))
        self.inner = nn.ModuleList(children)

    def reset_parameters(self) -> None:
        self.said.append(self.name)
        nn.init.normal_(self.weight)


def tree_of(said: list[str]) -> nn.Module:
    def made(name: str, *children: nn.Module, state: bool = True) -> Recorder:
        return Recorder(said, name, *children, state=state)

    return made("root", made("a", made("aa"), made("ab", state=False)), made("b", made("ba")))


@pytest.mark.parametrize("with_init", [False, True])
def test_modules_are_initialized_in_the_order_of_torch(world_of_two: World, with_init: bool) -> None:
    said: dict[str, list[str]] = {"ours": [], "torch": []}

    def init(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        if isinstance(module, Recorder):
            module.said.append(module.name)

    function = init if with_init else None
    with torch.device("meta"):
        ours, theirs = tree_of(said["ours"]), tree_of(said["torch"])
    torch.manual_seed(0)
    materialize(managed_modules(ours), function, CPU)
    numbers = torch.rand(1)
    torch.manual_seed(0)
    wrapped_by_torch(theirs, param_init_fn=function, use_orig_params=True)
    assert said["ours"] == said["torch"]
    assert len(said["ours"]) == (6 if with_init else 5)
    assert torch.rand(1) == numbers
    assert not any(param.is_meta for param in ours.parameters())


def test_modules_that_are_on_no_meta_device_keep_their_values() -> None:
    materialize(managed_modules(Net()), lambda module: pytest.fail("was called"), CPU)
    net = Net()
    net.first.to("meta")
    before = {name: value.clone() for name, value in net.inner.state_dict().items()}
    materialize(managed_modules(net), None, CPU)
    assert all(torch.equal(value, before[name]) for name, value in net.inner.state_dict().items())
    assert not net.first.weight.is_meta


@pytest.mark.parametrize(("with_init", "bias"), [(False, False), (True, True)])
def test_tied_parameters_stay_tied(with_init: bool, bias: bool) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=bias)
            self.head.weight = self.embed.weight
            self.embed.alias = self.embed.weight
            self.register_buffer("mask", torch.ones(2))
            self.head.register_buffer("mask", self.mask)

        def reset_parameters(self) -> None:
            nn.init.ones_(self.mask)

    def init(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        for param in module.parameters(recurse=False):
            nn.init.constant_(param, 1 if isinstance(module, nn.Embedding) else 2)
        for buffer in module.buffers(recurse=False):
            nn.init.ones_(buffer)

    with torch.device("meta"):
        model = Tied()
    torch.manual_seed(0)
    materialize(managed_modules(model), init if with_init else None, CPU)
    assert model.head.weight is model.embed.weight is model.embed.alias
    assert model.head.mask is model.mask
    torch.manual_seed(0)
    assert torch.equal(model.embed.weight, torch.ones(7, 3) if with_init else nn.Embedding(7, 3).weight)
    assert isinstance(model.head.weight, nn.Parameter)
    assert [name for name, _ in model.named_parameters()] == ["embed.weight", *["head.bias"] * bias]


def test_nested_and_ignored_modules_are_not_initialized(world_of_two: World) -> None:
    said: list[str] = []
    with torch.device("meta"):
        root = tree_of(said)
    fullshard.fully_shard(root.inner[1], mesh=init_device_mesh("cpu", (2,)))
    modules = managed_modules(root, {root.inner[0], *root.inner[0].modules()})
    assert modules == [root, root.inner]
    materialize(modules, None, CPU)
    assert said == ["root"]


def test_ignored_parameters_are_no_reason_to_initialize_and_stay_ignored_when_they_get_memory() -> None:
    net = Net()
    net.first.weight = nn.Parameter(net.first.weight.to("meta"))
    before = net.first.bias.clone()
    materialize(managed_modules(net), None, CPU, ignored(net, None, [net.first.weight]))
    assert net.first.weight.is_meta
    assert torch.equal(net.first.bias, before)
    with torch.device("meta"):
        net = Net()
    spared = ignored(net, None, [net.first.weight])
    net.reset_parameters = lambda: None  # type: ignore[assignment]
    materialize(managed_modules(net), None, CPU, spared)
    assert not net.first.weight.is_meta
    assert spared.params == {net.first.weight}


class Silent(nn.Module):
    def __init__(self, reset: Callable[[], object] | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        if reset is not None:
            self.reset_parameters = reset


def fail() -> None:
    raise ZeroDivisionError("no such number")


@pytest.mark.parametrize(
    ("reset", "error", "words"), [(None, AttributeError, "reset_parameters"), (fail, ZeroDivisionError, "no such")]
)
def test_a_reset_that_is_missing_or_fails(world_of_two: World, reset: Any, error: Any, words: str) -> None:
    def model() -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(2, 2), Silent(reset))

    with pytest.warns(UserWarning, match="'1', a Silent, has tensors on the meta"), pytest.raises(error, match=words):
        materialize(managed_modules(model()), None, CPU)
    with pytest.warns(UserWarning, match="Silent"), pytest.raises(error, match=words):
        wrapped_by_torch(model())


def test_the_init_function_is_callable_and_leaves_nothing_on_meta(world_of_two: World) -> None:
    with torch.device("meta"):
        model, net = nn.Linear(2, 2), Net()
    with pytest.raises(ValueError, match="param_init_fn must be callable"):
        materialize(managed_modules(model), 3, CPU)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="callable"):
        wrapped_by_torch(model, param_init_fn=3)
    with pytest.raises(RuntimeError, match=r"left \['scale'\] of the Net on the meta"):
        materialize(managed_modules(net), lambda module: None, CPU)


def on(*devices: str) -> list[Tensor]:
    with FakeTensorMode():
        return [nn.Parameter(torch.empty(2, device=device)) for device in devices]


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device is `cuda:1`."""
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)


@pytest.mark.usefixtures("current")
def test_where_parameters_are_gathered() -> None:
    cases: list[tuple[list[str], Any, str]] = [
        (["cuda:0"], None, "cuda:0"),
        (["cuda:0", "meta"], None, "cuda:0"),
        (["cuda:0", "cpu"], "cuda:0", "cuda:0"),
        (["cpu"], torch.device("cuda", 3), "cuda:3"),
        ([], "cuda:2", "cuda:2"),
    ]
    for lie, device_id, expected in cases:
        assert compute_device(on(*lie), device_id) == torch.device(expected), lie
    assert compute_device(on("cpu", "meta"), None, "cuda") == torch.device("cuda:1"), "that of the mesh"
    with pytest.warns(UserWarning, match=r"without an index.* cuda:1"):
        assert compute_device(on("cpu"), torch.device("cuda")) == torch.device("cuda:1")


def test_a_cpu_job_looks_for_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert compute_device([torch.ones(2)], None) == CPU
    for name in ("is_available", "current_accelerator", "current_device_index", "device_count"):
        monkeypatch.setattr(torch.accelerator, name, lambda: pytest.fail("looked for an accelerator"))
    for lie in ([], ["cpu"], ["cpu", "meta"], ["meta"]):
        assert compute_device(on(*lie), None, "cpu") == CPU
        assert compute_device(on(*lie), "cpu") == compute_device(on(*lie), torch.device("cpu", 0)) == CPU


def test_sharded_parameters_may_lie_elsewhere(world_of_two: World) -> None:
    model = nn.Linear(4, 4)
    fullshard.fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    assert compute_device([*on("cuda:0"), *model.parameters()], None) == torch.device("cuda:0")


def test_devices_that_do_not_agree() -> None:
    cases: list[tuple[list[str], Any, type[Exception]]] = [
        (["cpu", "cuda:0"], None, RuntimeError),
        (["cuda:0", "cuda:1"], None, RuntimeError),
        (["cuda:0", "cuda:1"], "cuda:0", RuntimeError),
        (["cuda:0", "xpu:0"], None, RuntimeError),
        (["cuda:0"], "cuda:1", ValueError),
        (["cuda:0"], "cpu", ValueError),
        (["cpu", "cuda:0"], "cuda:1", ValueError),
    ]
    for lie, device_id, error in cases:
        with pytest.raises(error, match="lie on"):
            compute_device(on(*lie), device_id)


def mesh_of(strategy: ShardingStrategy, nodes: int = 1) -> Any:
    os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size() // nodes)
    with quiet():
        return strategy_and_mesh(strategy, None, None, True, "cpu")[1]


def odd_tensors(seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    return [
        nn.Parameter(torch.randn(5, 3)),
        nn.Parameter(torch.randn(()), requires_grad=False),
        nn.Parameter(torch.randn(4, 6, 2, 3).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.randn(6, 8)[1::2, ::3]),
        nn.Parameter(torch.randn(3).to(torch.bfloat16)),
        nn.Parameter(torch.randn(3, dtype=torch.float64)),
        nn.Parameter(torch.randn(0, 3)),
        nn.Parameter(torch.randn(5).to(torch.float8_e4m3fn), requires_grad=False),
        torch.randint(99, (3, 2)),
        torch.randint(2, (7,)) > 0,
        torch.randint(99, (3,), dtype=torch.int16),
        torch.randn(3, dtype=torch.complex64),
        torch.randint(99, ()),
    ]


@ranks(1, 2, 3, 4)
def test_all_ranks_get_the_values_of_the_first(world: World) -> None:
    for strategy, bucket in itertools.product((FULL, NO_SHARD, HYBRID_SHARD), (1, 40, 250 << 20)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(initialise, "_BUCKET_BYTES", bucket)
            found, expected = odd_tensors(world.rank), odd_tensors(0)
            strides = [tensor.stride() for tensor in found]
            sync_module_states(found[:8], found[8:], mesh_of(strategy, 2 if world.size == 4 else 1), CPU)
        for tensor, wanted, stride in zip(found, expected, strides, strict=True):
            assert (tensor.dtype, tensor.requires_grad) == (wanted.dtype, wanted.requires_grad)
            assert tensor.stride() == stride
            one, other = (each.float() if each.dtype.itemsize == 1 else each for each in (tensor, wanted))
            assert torch.equal(one, other)


@ranks(4)
@first_of("nodes", 2, 1, 4)
def test_values_reach_every_node(world: World, nodes: int) -> None:
    values = torch.full((3,), float(world.rank))
    sync_module_states([], [values], mesh_of(HYBRID_SHARD, nodes), CPU)
    assert values.tolist() == [0.0] * 3


@contextlib.contextmanager
def broadcasts() -> Iterator[list[int]]:
    sent: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        broadcast = dist.broadcast

        def counted(tensor: Tensor, **options: Any) -> Any:
            sent.append(tensor.nbytes)
            return broadcast(tensor, **options)

        patch.setattr(dist, "broadcast", counted)
        yield sent


@ranks(2)
def test_tensors_travel_together_in_buckets(world: World) -> None:
    tensors = odd_tensors(0)
    with broadcasts() as sent:
        sync_module_states(tensors, [], mesh_of(FULL), CPU)
    assert sent == [sum(tensor.nbytes for tensor in tensors)]
    with pytest.MonkeyPatch.context() as patch, broadcasts() as sent:
        patch.setattr(initialise, "_BUCKET_BYTES", 100)
        sync_module_states([torch.zeros(size) for size in (10, 10, 10, 50, 5, 5, 5)], [], mesh_of(FULL), CPU)
    assert sent == [80, 40, 200, 60], "no larger than said but for one tensor"


@ranks(2)
def test_a_buffer_is_synchronized_once(world: World) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    data = mesh_of(FULL)
    sync_module_states(model[0].parameters(), model[0].buffers(), data, CPU)
    inner = sum(tensor.nbytes for tensor in model[1].state_dict().values())
    with broadcasts() as sent:
        sync_module_states(model[1].parameters(), model.buffers(), data, CPU)
        assert sent == [inner]
        sync_module_states([], model.buffers(), data, CPU)
        assert sent == [inner]


@ranks(2)
def test_one_rank_sends_nothing(world: World) -> None:
    own = [dist.new_group([rank]) for rank in range(2)][world.rank]
    with quiet():
        _, alone = strategy_and_mesh(NO_SHARD, own, None, False, "cpu")
    with broadcasts() as sent:
        sync_module_states([torch.ones(3)], [], alone, CPU)
    assert sent == []


@ranks(2)
def test_of_subclasses_the_tensors_travel_that_they_consist_of(world: World) -> None:
    def two(value: float) -> TwoTensor:
        return TwoTensor(torch.full((3,), value), torch.full((3,), value + 1))

    param, buffer = nn.Parameter(two(10.0 * world.rank)), two(5.0 * world.rank)
    sync_module_states([param], [buffer], mesh_of(FULL), CPU)
    assert (param.a[0], param.b[0], buffer.a[0], buffer.b[0]) == (0, 1, 0, 1)


@pytest.mark.slow
@ranks(4)
def test_parts_of_tensor_parallel_parameters_come_from_their_own_first_rank(world: World) -> None:
    mesh = world.mesh(2, 2, names=("dp", "tp"))
    whole = torch.arange(8.0).view(4, 2)
    param = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(0)]))
    assert isinstance(param, DTensor)
    with torch.no_grad():
        param.to_local().add_(100 * mesh["dp"].get_local_rank())
    sync_module_states([param], [], strategy_and_mesh(FULL, None, mesh["dp"], False, "cpu")[1], CPU)
    assert torch.equal(param.full_tensor(), whole)
    check_flattenable({"weight": param}, use_orig_params=False)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_other_than_floating_point_is_refused(world_of_two: World, use_orig_params: bool) -> None:
    dtypes = (torch.int64, torch.bool, torch.uint8, torch.complex64)
    for dtype, place in itertools.product(dtypes, ("weight", "bias")):
        model = nn.Linear(4, 4).requires_grad_(False)
        setattr(model, place, nn.Parameter(torch.zeros(4, 4).to(dtype), requires_grad=False))
        with pytest.raises(ValueError, match=f"'{place}' is {dtype}"):
            check_flattenable(dict(model.named_parameters()), use_orig_params)
        with pytest.raises(ValueError, match="dtype"):
            wrapped_by_torch(model, use_orig_params=use_orig_params)


def test_several_devices_are_refused() -> None:
    weight, bias = on("cuda:0", "cpu")
    with pytest.raises(ValueError, match=r"'bias' lies on cpu, and 'weight' on cuda:0"):
        check_flattenable({"weight": weight, "bias": bias}, True)  # type: ignore[dict-item]


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen_beside_trainable_needs_original_parameters(world_of_two: World, frozen: str) -> None:
    model = nn.Linear(4, 4)
    getattr(model, frozen).requires_grad_(False)
    with pytest.raises(ValueError, match=f"'{frozen}' is frozen"):
        check_flattenable(dict(model.named_parameters()), False)
    with pytest.raises(ValueError, match="requires_grad"):
        wrapped_by_torch(model, use_orig_params=False)
    check_flattenable(dict(model.named_parameters()), True)


def test_several_dtypes_and_none_at_all_are_fine() -> None:
    check_flattenable({"a": nn.Parameter(torch.zeros(2)), "b": nn.Parameter(torch.zeros((), dtype=torch.half))}, False)
    check_flattenable({}, False)
