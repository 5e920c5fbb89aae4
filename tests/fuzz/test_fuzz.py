"""Random programs are right; see `tests.fuzz`."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.fuzz.actions import Train
from tests.fuzz.models import Layer, ModelSpec, build
from tests.fuzz.pool import Fuzzer
from tests.fuzz.programs import Program, _Generator, generate, read
from tests.fuzz.sharding import GroupSpec, Sharding, groups_of
from tests.fuzz.steps import objective, other_objective
from tests.harness import RankPool
from tests.harness.compare import WITH_TORCH


def test_programs_train_as_unsharded(pytestconfig: pytest.Config, rank_pool: RankPool) -> None:
    count, first = pytestconfig.getoption("--programs"), pytestconfig.getoption("--first-seed")
    drawn = [generate(seed) for seed in range(first, first + count)]
    if WITH_TORCH not in os.environ:  # in the quick lane
        drawn = [program for program in drawn if program.world == 2]
    results = list(Fuzzer(rank_pool).results(drawn))
    findings = [result for result in results if result.is_finding or result.kind == "invalid"]
    told = [f"python -m tests.fuzz --seed {result.program.seed}: {result.kind}\n{result.text}" for result in findings]
    assert not findings, "\n\n".join(told)
    assert len(results) == len(drawn)


def test_the_text_of_a_program_is_the_program() -> None:
    for seed in range(200):
        program = generate(seed)
        assert read(program.text()) == program


def test_units_that_blocks_become_are_known_to_the_reference(rank_pool: RankPool) -> None:
    without_gradient = Layer("linear", checkpoint="inside reentrant")
    model = ModelSpec(0, 4, (Layer("nest", inner=(without_gradient, Layer("linear"))), Layer("linear")))
    settings = (("set_reduce_scatter_unused_params", True),)
    sharding = Sharding("fully_shard", (GroupSpec(("",)),), by="blocks", settings=settings)
    assert [group.paths for group in groups_of(build(model), sharding)] == [("cells.0",), ("cells.1",), ("",)]
    result = Fuzzer(rank_pool).run(Program(0, 2, "shm", model, sharding, "sgd", (Train(), Train())))
    assert result.kind == "right", result.text


def test_a_cell_that_reads_its_weight_has_no_blocks_inside() -> None:
    spec = ModelSpec(0, 4, (Layer("sequence", pack="weight"),))
    drawn = [_Generator(seed).sharding(spec, 2, wraps=False, original=False, low="") for seed in range(100)]
    paths = {path for sharding in drawn for group in groups_of(build(spec), sharding) for path in group.paths}
    assert paths == {"", "cells.0"}


@pytest.mark.parametrize("loss", [objective, other_objective])
def test_rounding_of_outputs_is_not_magnified_by_losses(loss: Callable[[list[Tensor]], Tensor]) -> None:
    half = torch.randn(50, dtype=torch.float64)
    for size in (1e-2, 1, 1e2):
        outputs = torch.cat([half, -half * 1.001]) * size
        exact, rounded = loss([outputs]), loss([outputs.bfloat16()])
        assert abs(rounded - exact) <= 2 * torch.finfo(torch.bfloat16).eps * abs(exact)
