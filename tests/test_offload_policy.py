"""Tests of the policies that say what lies elsewhere than on the device."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from fullshard import CPUOffloadPolicy, DiskOffloadPolicy, OffloadPolicy


class TestCPUOffloadPolicy:
    def test_offloads_everything_or_the_optimizer_state_alone(self) -> None:
        assert dataclasses.astuple(CPUOffloadPolicy()) == (True, True, True)
        assert dataclasses.astuple(CPUOffloadPolicy(parameters=False)) == (True, False, True)

    def test_refuses_parameters_without_the_state_of_their_optimizer_and_nothing(self) -> None:
        with pytest.raises(ValueError, match="without the state of their optimizer"):
            CPUOffloadPolicy(optimizer_state=False)
        with pytest.raises(ValueError, match=r"offloads nothing: .*use OffloadPolicy\(\)"):
            CPUOffloadPolicy(parameters=False, optimizer_state=False)

    @pytest.mark.parametrize("field", ["pin_memory", "parameters", "optimizer_state"])
    def test_refuses_other_types(self, field: str) -> None:
        with pytest.raises(TypeError, match=field):
            CPUOffloadPolicy(**{field: "cpu"})  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [CPUOffloadPolicy, lambda **shares: DiskOffloadPolicy("there", **shares)])
def test_a_part_may_be_offloaded_and_is_checked(make: Any) -> None:
    policy = make(parameters=0.25, optimizer_state=0.5)
    assert (policy.parameters, policy.optimizer_state) == (0.25, 0.5)
    for share in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"\.optimizer_state is .*expected True, False, or a share from 0 to 1"):
            make(parameters=False, optimizer_state=share)
    with pytest.raises(ValueError, match=r"parameters=0.5, optimizer_state=0.25\) offloads parameters without"):
        make(parameters=0.5, optimizer_state=0.25)
    with pytest.raises(ValueError, match=r"offloads nothing: .*use OffloadPolicy\(\)"):
        make(parameters=0.0, optimizer_state=0)


class TestDiskOffloadPolicy:
    def test_it_takes_any_path(self, tmp_path: Path) -> None:
        assert DiskOffloadPolicy(os.fspath(tmp_path)) == DiskOffloadPolicy(tmp_path)
        assert isinstance(DiskOffloadPolicy("there"), OffloadPolicy)

    @pytest.mark.parametrize(
        ("fields", "error"),
        [
            ({"directory": 3}, TypeError),
            ({"directory": "x", "staging_bytes": "64 MiB"}, TypeError),
            ({"directory": "x", "staging_bytes": True}, TypeError),
            ({"directory": "x", "staging_bytes": 0}, ValueError),
            ({"directory": "x", "direct": None}, TypeError),
        ],
    )
    def test_a_wrong_field_is_named(self, fields: dict[str, Any], error: type[Exception]) -> None:
        with pytest.raises(error, match=rf"DiskOffloadPolicy\.{list(fields)[-1]} is "):
            DiskOffloadPolicy(**fields)
