"""`fullshard rehearse`: an unmodified program trains as one rank of many, and its steps are measured."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from fullshard import cli
from fullshard.rehearsal.command import rate_argument, report, seconds_argument

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)])
for block in model:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(int(sys.argv[1])):
    loss = model(torch.ones(4, 64)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss.detach())
print("not reached")
"""


def rehearse(tmp_path: Path, *arguments: str) -> int:
    (tmp_path / "program.py").write_text(PROGRAM)
    link = ("--bandwidth", "1GB/s", "--latency", "5ms", "--steps", "2")
    return cli.main(["rehearse", "--ranks", "8", *link, *arguments[:-1], str(tmp_path / "program.py"), arguments[-1]])


@pytest.mark.slow
def test_a_step_takes_as_long_as_its_collectives(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert rehearse(tmp_path, "--json", "--against", "torch", "20") == 0
    printed, errors = capfd.readouterr()
    assert "not reached" not in printed + errors
    for library, found in json.loads(printed).items():
        kinds = found["collectives"]
        assert kinds["all-gather"]["count"] >= 3
        assert kinds["reduce-scatter"]["bytes"] == pytest.approx(3 * (64 * 64 + 64) * 4 * 7 / 8, rel=0.05)
        assert found["collectives, seconds"] == pytest.approx(sum(each["seconds"] for each in kinds.values()))
        assert 0.95 * found["waited, seconds"] <= found["collectives, seconds"] <= found["step, seconds"], library
        assert found["step, seconds"] < found["collectives, seconds"] + 1
        assert found["memory at the peak, bytes"] >= found["memory between steps, bytes"] > 0
        assert bool(found["waits"]) == (library == "fullshard")


@pytest.mark.slow
def test_a_program_that_ends_too_early_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert rehearse(tmp_path, "3") == 1
    assert "ended after 3 steps of its first optimizer" in capfd.readouterr().err


def test_the_report_has_ratios_beside_torch() -> None:
    each = {"device": "cpu", "step, seconds": 0.2, "collectives": {"all-gather": {"count": 4, "bytes": 8e9}}}
    each |= {"waits": [{"what": "gather", "group": "blocks.1", "seconds": 0.1}], "network in Python": ""}
    text = report({"fullshard": each, "torch": {**each, "step, seconds": 0.4, "waits": []}}, 5)
    assert text.startswith("One step (median of 5 steps) on cpu")
    assert "0.50" in text
    assert "4, 8 GB" in text
    assert "gather blocks.1: 100 ms" in text


def test_rates_and_times_have_units() -> None:
    assert rate_argument("45GB/s") == rate_argument("360Gbit/s") == 45 * 10**9
    assert seconds_argument("20us") == pytest.approx(2e-5)
    for function, text in ((rate_argument, "45"), (rate_argument, "fast/s"), (seconds_argument, "20")):
        with pytest.raises(argparse.ArgumentTypeError, match="such as"):
            function(text)


def test_arguments_that_make_no_sense_end_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rehearse(tmp_path, "--rank", "8", "3") == 2
    assert cli.main(["rehearse", "--ranks", "2", "--bandwidth", "1GB/s", "missing.py"]) == 2
    assert "no file missing.py" in capsys.readouterr().err
