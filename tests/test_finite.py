"""A value that is not finite is found where it comes from: rank, module or parameter, step and index."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from tests.fully_shard.cases import environment, inputs
from tests.harness import World, ranks
from tests.harness.compare import whole
from tests.harness.models import seeded


class _Spoil(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        spoiled = grads[0].clone()
        spoiled[2, 1] = torch.nan
        return spoiled


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor, spoil_output: bool = False, spoil_gradient: bool = False) -> Tensor:
        for index, layer in enumerate(self.layers):
            if spoil_output and index == 1:
                x = x.clone()
                x[3, 2] = torch.inf
            x = layer(x)
            if spoil_gradient and index == 1:
                x = _Spoil.apply(x)
        return x


def model(wrapped: bool = False, **options: Any) -> Any:
    chain = seeded(Chain)
    for index, layer in enumerate(chain.layers):
        if wrapped:
            chain.layers[index] = fullshard.FullyShardedDataParallel(layer, use_orig_params=False)
        else:
            fullshard.fully_shard(layer, **options)
    if wrapped:
        return fullshard.FullyShardedDataParallel(chain, use_orig_params=False)
    return fullshard.fully_shard(chain, **options)


@ranks(2)
@pytest.mark.parametrize("wrapped", [False, True], ids=["fully_shard", "flat"])
def test_an_output_is_named(world: World, wrapped: bool) -> None:
    chain = model(wrapped)
    chain(inputs()).sum().backward()
    with (
        fullshard.detect_nan(chain),
        pytest.raises(
            fullshard.NanError,
            match=rf"rank {world.rank}, in the forward of step 1 \(forward 2\).*: the output of 'layers.1' \(.*\) is "
            r"(nan|-?inf) at index \(3, 0\), the first of 6 values that are not finite, of 24",
        ),
    ):
        chain(inputs(), spoil_output=True)


@ranks(2)
@pytest.mark.parametrize("transport", ["shm", "p2p", "collective"])
def test_a_gradient_of_one_rank_is_named_before_it_is_everywhere(world: World, transport: str) -> None:
    with environment(FULLSHARD_TRANSPORT=transport):
        chain = model()
    fullshard.detect_nan(chain)
    with pytest.raises(fullshard.NanError, match=r"rank ., in the backward.*'layers.1.(weight|bias)' before its re"):
        chain(inputs(), spoil_gradient=True).sum().backward()


@ranks(2)
@pytest.mark.parametrize("transport", ["p2p", "collective"])
@pytest.mark.parametrize("name", ["bf16", "fp8", "int8", "int4"])
def test_values_that_are_not_finite_are_found_through_a_wire(world: World, transport: str, name: Any) -> None:
    with environment(FULLSHARD_TRANSPORT=transport):
        chain = model(wire_policy=fullshard.WirePolicy(name, name, min_numel=0))
    with torch.no_grad():
        chain.layers[1].weight.to_local()[0, 0] = torch.nan if world.rank else torch.inf
    found = r"the output of 'layers\.1'.* is (nan|-?inf)"
    with fullshard.detect_nan(chain), pytest.raises(fullshard.NanError, match=found):
        chain(inputs())
    chain.reset_iter_state()
    with torch.no_grad():
        chain.layers[1].weight.to_local().zero_()
    chain(inputs(), spoil_gradient=world.rank == 1).sum().backward()
    bad = sum(int((~whole(param.grad).isfinite()).sum()) for param in chain.layers[1].parameters())
    assert bad > 0, "the gradient of one rank"
    chain.zero_grad()
    chain(inputs()).sum().backward()
    assert all(bool(whole(param.grad).isfinite().all()) for param in chain.parameters()), "and of one step"


@ranks(2)
def test_a_sum_that_overflows_is_named_after_the_reduction(world: World) -> None:
    chain = model()
    largest = torch.finfo(torch.float32).max
    chain.set_gradient_divide_factor(1.0)
    fullshard.detect_nan(chain)
    with pytest.raises(fullshard.NanError, match=r"the gradient of 'layers\..*' after its reduction is -?inf at"):
        (chain(inputs()).sum(0) * (largest * 0.2)).sum().backward()


@ranks(2)
def test_nothing_is_looked_at_when_it_is_removed(world: World) -> None:
    chain = model()
    with fullshard.detect_nan(chain) as detector:
        chain(inputs()).sum().backward()
    detector.remove()
    output = chain(inputs(), spoil_output=True)
    output.sum().backward()
    assert not output.isfinite().all()


@ranks(1)
def test_a_plain_model_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match="got Chain: call it after fully_shard"):
        fullshard.detect_nan(Chain())
