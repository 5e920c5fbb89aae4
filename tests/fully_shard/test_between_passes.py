"""What users do to the parameters that modules show between passes lasts, whatever a group keeps unsharded there.

The reference is the same program on the unsharded model: it knows no passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from tests.fully_shard.cases import assert_close, environment, first_of, inputs, shard_mlp
from tests.harness import World, ranks
from tests.harness.compare import whole
from tests.harness.models import MLP, seeded
from tests.harness.slow import slow

TRANSPORTS = first_of("transport", "shm", "p2p")


class Program:
    """A model and its optimizer. Between two passes an act of the user changes one or both."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.norm: Any = None
        self.held: Any = None
        self.saved = {name: value.detach().clone() for name, value in model.named_parameters()}

    def each(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters()


@torch.no_grad()
def clamp(program: Program) -> None:
    for _, param in program.each():
        param.clamp_(-0.05, 0.05)


@torch.no_grad()
def decay_a_module(program: Program) -> None:
    module: Any = program.model.get_submodule("blocks.1.0")
    module.weight *= 0.5
    module.bias.zero_()


def restore_through_data(program: Program) -> None:
    for name, param in program.each():
        param.data.copy_(program.saved[name])


def scale_through_data(program: Program) -> None:
    """It leaves no trace in the version of a DTensor."""
    for _, param in program.each():
        param.data.mul_(0.5)


def assign_data(program: Program) -> None:
    for _, param in program.each():
        param.data = param.data * 0.5


def freeze(program: Program) -> None:
    for name, param in program.each():
        param.requires_grad_(not name.startswith("blocks.1"))


def unfreeze(program: Program) -> None:
    program.model.requires_grad_(True)


def clip(program: Program) -> None:
    program.norm = nn.utils.clip_grad_norm_(program.model.parameters(), 1e-3)


def optimize_anew(program: Program) -> None:
    program.optimizer = torch.optim.SGD(program.model.parameters(), lr=0.05)


ACTS = (
    clamp, decay_a_module, restore_through_data, scale_through_data, assign_data, freeze, unfreeze, clip, optimize_anew,
)  # fmt: skip


def no_grad(program: Program, x: Tensor) -> None:
    with torch.no_grad():
        program.held = program.model(x)


def inference(program: Program, x: Tensor) -> None:
    with torch.inference_mode():
        program.model(x)


def in_eval_mode(program: Program, x: Tensor) -> None:
    program.model.eval()
    program.held = program.model(x)
    program.model.train()


def with_gradients(program: Program, x: Tensor) -> None:
    program.held = program.model(x)


def run(program: Program, evaluate: Callable[[Program, Tensor], None], act: Callable[[Program], None]) -> None:
    if act is unfreeze:
        freeze(program)
    for step in range(3):
        program.model(inputs(step)).square().mean().backward()
        evaluate(program, inputs(7))
        if step == 1 and act is not assign_data:
            act(program)
        program.optimizer.step()
        program.optimizer.zero_grad()
        if step == 1:
            evaluate(program, inputs(8))
            act(program)


def check(program: Program, reference: Program, what: str) -> None:
    for (name, found), (_, expected) in zip(program.each(), reference.each(), strict=True):
        assert found.requires_grad == expected.requires_grad, name
        assert_close(whole(found), expected, f"{name} after {what}")
    if reference.norm is not None:
        assert_close(whole(program.norm), reference.norm, "norm")


def compare(transport: str, options: dict[str, Any], do: Callable[[Program], None]) -> None:
    """The same on a sharded model and on the unsharded one, which are equal afterwards."""
    with environment(FULLSHARD_TRANSPORT=transport):
        program, reference = Program(shard_mlp(**options)), Program(seeded(MLP))
        for each in (program, reference):
            do(each)
        check(program, reference, str(do))


OPTIONS = pytest.mark.parametrize(
    "options", [{}, {"reshard_after_forward": False}, *slow({"zero_stage": 1}, {"zero_stage": 0})], ids=str
)


@ranks(2)
@TRANSPORTS
@OPTIONS
@first_of("evaluate", no_grad, inference, in_eval_mode)
def test_what_is_done_after_an_evaluation_lasts(
    world: World, transport: str, options: dict[str, Any], evaluate: Any
) -> None:
    for act in ACTS:
        compare(transport, options, partial(run, evaluate=evaluate, act=act))


@ranks(2)
@TRANSPORTS
@OPTIONS
def test_what_is_done_to_whole_parameters_lasts(world: World, transport: str, options: dict[str, Any]) -> None:
    """After a forward with gradients modules show whole parameters, as a backward may follow."""
    for act in (clamp, decay_a_module, assign_data, freeze, unfreeze):
        compare(transport, options, partial(run, evaluate=with_gradients, act=act))


def bias_between_forward_and_backward(program: Program) -> None:
    for step in range(2):
        loss = program.model(inputs(step)).square().mean()
        with torch.no_grad():
            module: Any = program.model.get_submodule("blocks.3.0")
            module.bias.mul_(0.5)  # autograd saved nothing of it
            module.bias.requires_grad_(step == 1)
        loss.backward()
        program.optimizer.step()
        program.optimizer.zero_grad()


def graph_from_before_resharding_by_hand(program: Program) -> None:
    model: Any = program.model
    for step in range(3):
        loss = model(inputs(step)).square().mean()
        if isinstance(model, fullshard.FSDPModule):
            model.reshard()
        loss.backward()
        inference(program, inputs(7))
        program.optimizer.step()
        program.optimizer.zero_grad()


@ranks(2)
@TRANSPORTS
@OPTIONS
def test_what_is_done_between_a_forward_and_its_backward_lasts(
    world: World, transport: str, options: dict[str, Any]
) -> None:
    for steps in (bias_between_forward_and_backward, graph_from_before_resharding_by_hand):
        compare(transport, options, steps)


@ranks(2)
def test_elements_that_nobody_wrote_keep_their_precision(world: World) -> None:
    policy = fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = shard_mlp(mp_policy=policy, reshard_after_forward=False)
    before = {name: whole(param).clone() for name, param in model.named_parameters()}
    held = model(inputs())
    with torch.no_grad():
        model.blocks[0][0].weight[0, 0] = 2.0
    del held
    model(inputs())
    model.reshard()
    model.blocks[0].reshard()
    before["blocks.0.0.weight"][0, 0] = 2.0
    for name, value in list(before.items())[:2]:
        assert torch.equal(whole(dict(model.named_parameters())[name]), value), name
