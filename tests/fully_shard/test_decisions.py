"""What users do to a sharded model that is easily forgotten: each case once broke a design, and is decided here."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.func import functional_call
from torch.nn.utils.parametrize import register_parametrization

import fullshard
from tests.fully_shard.cases import (
    BOTH,
    Library,
    Recorder,
    Twins,
    are_sharded,
    assert_close,
    environment,
    first_of,
    inputs,
    shard_mlp,
    twins,
)
from tests.harness import World, ranks
from tests.harness.compare import each_block, whole
from tests.harness.models import MLP, Branches, Transformer, seeded


@ranks(2)
def test_a_parameter_added_after_sharding_is_kept_and_trained(world: World) -> None:
    model, reference = shard_mlp(), seeded(MLP)
    for each in (model, reference):
        linear = each.blocks[1][0]
        linear.register_parameter("lora", nn.Parameter(torch.full((5, 7), 0.1)))
        linear.forward = lambda x, linear=linear: F.linear(x, linear.weight + linear.lora, linear.bias)
    for _ in range(2):
        assert_close(model(inputs()), reference(inputs()), "output")
        model(inputs()).sum().backward()
        reference(inputs()).sum().backward()
        assert isinstance(model.blocks[1][0].lora, nn.Parameter)
        assert not isinstance(model.blocks[1][0].lora, DTensor), "it was not sharded and is not"
    assert_close(model.blocks[1][0].lora.grad, reference.blocks[1][0].lora.grad, "gradient of the addition")
    weight = model.blocks[1][0].weight
    assert_close(whole(weight.grad), reference.blocks[1][0].weight.grad, "gradient of the weight")


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@ranks(2)
@first_of("after_a_step", True, False)
def test_a_parametrization_registered_after_sharding(world: World, after_a_step: bool) -> None:
    model, reference = shard_mlp(), seeded(MLP)
    if after_a_step:
        model(inputs()).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None
    for each in (model, reference):
        register_parametrization(each.blocks[1][0], "weight", Doubled())
    found, expected = model(inputs()), reference(inputs())
    assert_close(found, expected, "output")
    found.sum().backward()
    expected.sum().backward()
    original = model.blocks[1][0].parametrizations.weight.original
    assert isinstance(original, DTensor)
    assert_close(whole(original.grad), reference.blocks[1][0].parametrizations.weight.original.grad, "gradient")


@ranks(2)
def test_functional_call_with_full_tensors(world: World) -> None:
    model, reference = shard_mlp(), seeded(MLP)
    found, expected = (
        {name: (2 * parameter.detach()).requires_grad_() for name, parameter in reference.named_parameters()}
        for _ in range(2)
    )
    one, other = functional_call(model, found, (inputs(),)), functional_call(reference, expected, (inputs(),))
    assert_close(one, other, "output")
    one.sum().backward()
    other.sum().backward()
    for name, value in found.items():
        assert_close(value.grad, expected[name].grad, f"gradient {name}")
    assert are_sharded(model), "the model is as it was"
    pair = Twins(world, model, reference)
    pair.step()


@ranks(2, 4)
@first_of("transport", "shm", "p2p", "collective")
def test_functional_call_after_a_forward_that_left_parameters_unsharded(world: World, transport: str) -> None:
    """What stands in for parameters is not covered where the next forward reshards what the last one left."""
    with environment(FULLSHARD_TRANSPORT=transport):
        pair = twins(world, **({"reshard_after_forward": 2} if world.size == 4 else {}))
    values = {name: 2 * parameter.detach() for name, parameter in pair.whole.named_parameters()}
    for _ in range(2):
        with torch.no_grad():
            assert_close(pair.sharded(inputs()), pair.whole(inputs()), "output of the model")
        expected = functional_call(pair.whole, dict(values), (inputs(),))
        found = functional_call(pair.sharded, values, (inputs(),))  # torch writes what stood there at the end to values
        assert_close(found, expected, "output of the call")
        state = pair.sharded.state_dict()
        assert all(isinstance(value, DTensor) for value in state.values()), "what stood there is gone"
        pair.step()


class TwoReads(nn.Module):
    """A recurrent layer, which keeps a list of its weights, that is used twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(6, 6, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x)[0])[0]


@ranks(2)
@first_of("transport", "shm", "p2p", "collective")
def test_functional_call_of_a_module_that_keeps_a_list_of_its_weights(world: World, transport: str) -> None:
    model, reference = seeded(TwoReads), seeded(TwoReads)
    values = {name: 2 * parameter.detach() for name, parameter in reference.named_parameters()}
    given = torch.randn(2, 3, 6)
    with environment(FULLSHARD_TRANSPORT=transport):
        fullshard.fully_shard(model.layer, reshard_after_forward=True)
        fullshard.fully_shard(model)
        for _ in range(2):
            found, expected = (functional_call(each, values, (given,)) for each in (model, reference))
            assert_close(found, expected, "output of the call")
            assert_close(model(given), reference(given), "output")


@ranks(2)
def test_functional_call_with_sharded_tensors_is_refused(world: World) -> None:
    model = shard_mlp()
    values = {name: parameter.detach() * 2 for name, parameter in model.named_parameters()}
    with pytest.raises(RuntimeError, match="functional_call"):
        functional_call(model, values, (inputs(),))
    model.reset_iter_state()
    assert_close(model(inputs()), seeded(MLP)(inputs()), "output")


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6) / 10)

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.weight, self.weight[1:3]


class UsesLookup(nn.Module):
    """Computes with a weight that a block returned, after that block was freed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Lookup(), Lookup(), nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x: Tensor) -> Tensor:
        weight, part = self.blocks[0]()
        other, other_part = self.blocks[1]()
        x = self.blocks[3](self.blocks[2](x))
        return x @ weight @ other + part.sum() * other_part.sum()


@ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("transport", ["shm", "p2p"])
def test_a_forward_may_return_its_own_weight(world: World, reshard: bool, transport: str) -> None:
    with environment(FULLSHARD_TRANSPORT=transport):
        pair = twins(world, lambda: seeded(UsesLookup), reshard_after_forward=reshard)
    for _ in range(3):
        pair.step()


@ranks(2)
def test_sharding_in_inference_mode_is_possible_before_training(world: World) -> None:
    with torch.inference_mode():
        model = shard_mlp()
        model(inputs())
    assert_close(model(inputs()), seeded(MLP)(inputs()), "output")


@ranks(2)
def test_a_recomputation_that_stops_early_leaves_nothing_behind(world: World) -> None:
    pair = twins(world, lambda: seeded(lambda: Transformer(checkpointing="non-reentrant")))

    def tokens(seed: int) -> Tensor:
        return (torch.arange(6).view(2, 3) + seed) % 13

    for _ in range(2):
        pair.step(batch=tokens)
    assert are_sharded(pair.sharded)
    with torch.no_grad():
        assert_close(pair.sharded(tokens(0)), pair.whole(tokens(0)), "evaluation after it")
    pair.step(batch=tokens)


@ranks(2, transport="p2p")
def test_what_was_gathered_ahead_and_not_used_is_gathered_again(world: World) -> None:
    model, reference = seeded(Branches), seeded(Branches)
    each_block()(fullshard, model)
    parameters = [*model.parameters(), *reference.parameters()]
    with torch.no_grad():
        for used in ([1, 1], [1, 0], [1, 1]):
            flags = torch.tensor(used)
            assert_close(model(inputs(), flags), reference(inputs(), flags), f"output of {used}")
            for parameter in parameters:
                parameter.mul_(1.5)


@ranks(2)
@pytest.mark.parametrize("after_a_step", [True, False])
def test_load_state_dict_by_assignment(world: World, after_a_step: bool) -> None:
    pair = twins(world)
    if after_a_step:
        pair.step()
    state = {
        name: distribute_tensor(torch.full(parameter.shape, 0.1), parameter.device_mesh, [Shard(0)])
        for name, parameter in pair.sharded.state_dict().items()
    }
    pair.sharded.load_state_dict(state, assign=True)
    pair.whole.load_state_dict({name: torch.full_like(p, 0.1) for name, p in pair.whole.state_dict().items()})
    again = Twins(world, pair.sharded, pair.whole)
    for _ in range(2):
        again.step()


@ranks(2)
@first_of("transport", "shm", "p2p", "collective")
def test_what_was_loaded_by_assignment_is_frozen(world: World, transport: str) -> None:
    with environment(FULLSHARD_TRANSPORT=transport):
        pair = twins(world)
        pair.step()
        values = {name: value.clone() for name, value in pair.sharded.state_dict().items()}
        pair.sharded.load_state_dict(values, assign=True)
        for model in (pair.sharded, pair.whole):
            model.blocks[1].requires_grad_(False)
        again = Twins(world, pair.sharded, pair.whole)
        for _ in range(2):
            again.step()


@ranks(2)
def test_complex_parameters_that_are_to_keep_their_own_dtype(world: World) -> None:
    policy = fullshard.MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=lambda parameter: parameter.dtype)
    model = nn.Linear(4, 4, dtype=torch.complex64)
    given, expected = torch.randn(2, 4, dtype=torch.complex64), copy.deepcopy(model)
    fullshard.fully_shard(model, mp_policy=policy)
    assert_close(model(given), expected(given), "output")


class Tied(nn.Module):
    def __init__(self, head_first: bool) -> None:
        super().__init__()
        parts = {"embedding": nn.Embedding(11, 6), "head": nn.Linear(6, 11, bias=False)}
        for name in sorted(parts, reverse=head_first):
            self.add_module(name, parts[name])
        self.middle = nn.Linear(6, 6)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(x)))


@ranks(2)
@pytest.mark.parametrize("head_first", [True, False])
@first_of("order", "head first", "embedding first")
@pytest.mark.parametrize("reshard", [True, False])
def test_a_parameter_tied_across_groups(world: World, head_first: bool, order: str, reshard: bool) -> None:
    model, reference = seeded(lambda: Tied(head_first)), seeded(lambda: Tied(head_first))
    modules = [model.embedding, model.middle, model.head]
    for module in (*(modules if order == "embedding first" else reversed(modules)), model):
        fullshard.fully_shard(module, reshard_after_forward=reshard)
    assert list(model.state_dict()) == list(reference.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in reference.named_parameters()]
    assert model.head.weight is model.embedding.weight
    pair = Twins(world, model, reference)
    recorder = Recorder(model, "reduce")
    for _ in range(3):
        pair.step(batch=lambda seed: torch.randint(11, (4,), generator=torch.Generator().manual_seed(seed)))
        assert len(recorder.take()) == 2, "the tied weight is reduced once, and the middle"
    assert model.head.weight is model.embedding.weight


class Writes(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        if not torch.is_grad_enabled():
            self.weight.data.fill_(7)
            self.bias.fill_(7)
        return result


@ranks(2)
@first_of("reshard", None, True)
def test_writes_to_unsharded_parameters_in_forward_are_thrown_away(world: World, reshard: bool | None) -> None:
    model, reference = seeded(lambda: Writes(6, 5)), seeded(lambda: nn.Linear(6, 5))
    fullshard.fully_shard(model, reshard_after_forward=reshard)
    with torch.no_grad():
        for _ in range(2):
            assert_close(model(inputs()), reference(inputs()), "output")
            model.reshard()
    assert_close(whole(model.weight), reference.weight, "weight")
    assert_close(whole(model.bias), reference.bias, "bias")


class WritesOnce(nn.Linear):
    """Writes to its weight after the first of two uses in one forward."""

    def __init__(self, how: str) -> None:
        super().__init__(6, 6)
        self.how, self.uses = how, 0

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        self.uses += 1
        if self.uses % 2 == 1 and self.how != "not":
            with torch.no_grad():
                (self.weight.data if self.how == "data" else self.weight).zero_()
        return result


@ranks(2)
@BOTH
@first_of("how", "data", "in place")
def test_a_write_in_forward_is_thrown_away_before_the_next_use(world: World, fsdp: Library, how: str) -> None:
    model, reference = seeded(lambda: WritesOnce(how)), seeded(lambda: WritesOnce("not"))
    root = nn.Sequential(model, nn.Tanh(), model)
    fsdp.fully_shard(model, reshard_after_forward=True)
    fsdp.fully_shard(root)
    with torch.no_grad():
        assert_close(root(inputs()), reference(torch.tanh(reference(inputs()))), "output")


@ranks(2)
def test_a_detached_use_of_a_block(world: World) -> None:
    class Detached(MLP):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                frozen = self.blocks[0](x)
            x = self.blocks[0](x) + frozen
            for block in self.blocks[1:]:
                x = block(x)
            return x * self.scale

    pair = twins(world, lambda: seeded(Detached), reshard_after_forward=True)
    for _ in range(3):
        pair.step()


@ranks(2, transport="p2p")
@pytest.mark.parametrize("when", ["unsharded by hand", "evaluated"])
def test_a_rank_that_once_wrote_to_its_parameters_gathers_as_the_others_do(world: World, when: str) -> None:
    """What is written in place is thrown away on reshard, and no reason to gather later, when others need not."""
    model = shard_mlp()

    def write(module: Any) -> None:
        if world.rank == 0:
            with torch.no_grad():
                for param in module.parameters():
                    param.mul_(2)

    model(inputs()).sum().backward()
    if when == "evaluated":
        hooks = [block.register_forward_hook(lambda block, *_: write(block)) for block in model.blocks]
        with torch.no_grad():
            model(inputs())
        for hook in hooks:
            hook.remove()
    for block in model.blocks if when == "unsharded by hand" else ():
        block.unshard()
        write(block)
        block.reshard()
    recorder = Recorder(model, "gather", "reuse")
    for _ in range(2):
        model(inputs()).sum().backward()
    seen: list[Any] = [None, None]
    dist.all_gather_object(seen, recorder.take())
    assert seen[0] == seen[1]
    assert any(event.startswith("reuse") for event in seen[0])
