"""The benchmark for machines with a GPU: it runs with tiny sizes on the CPU, where figures mean nothing."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import gpu
from benchmarks.gpu_steps import LIBRARIES, MODELS, TINY

import fullshard

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent


def test_the_command_runs_from_the_tracked_files_alone(tmp_path: Path) -> None:
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        (copy := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy)
    command = ["make", "gpu", f"PYTHON={sys.executable}", "ARGS=--tiny"]
    without = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OUT")}
    ended = subprocess.run(command, cwd=tmp_path, env=without, capture_output=True, text=True, check=False)
    parts = json.loads((tmp_path / "runs/gpu/results.json").read_text())
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys(
        ["network", *gpu.SETTINGS, "predictions"], "ok"
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for name, (setting, _) in gpu.SETTINGS.items():
        found = parts[name]["found"]
        assert tuple(found) == setting.libraries
        for library, figures in found.items():
            assert figures["seconds"] > 0
            assert figures["kernels, s"]["matrix products"] > 0
            assert ("a step as it is" in figures.get("graph", "")) == setting.graph
            assert (figures["bytes"] > 0) == (setting.ranks > 1 and library != "not sharded"), (name, library)
    assert all(each["peak GiB"] > each["rest GiB"] > 0 for each in parts["predictions"]["found"].values())
    assert "| 7 B, recompute" in (tmp_path / "runs/gpu/page.md").read_text()


def run_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, limit: float, name: str = "1 B"
) -> dict[str, Any]:
    """What a run keeps of a part whose process is this program."""
    (tmp_path / "child").write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "child").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "child"))
    monkeypatch.setitem(gpu.LIMITS, name, limit)
    gpu.Run(tmp_path, is_tiny=True).run(name)
    found: dict[str, Any] = json.loads((tmp_path / "results.json").read_text())[name]
    return found


@pytest.mark.parametrize(
    ("program", "limit", "status"),
    [
        ("echo lost; exit 3", 60, "ended with 3"),
        ("sleep 60", 6, "stopped after 6 s"),
        ("""echo '["fullshard", {"error": "no memory"}]' >> "$6" """, 60, "fullshard: no memory"),
    ],
)
def test_a_part_that_fails_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, limit: float, status: str
) -> None:
    found = ["""echo '["torch FSDP2", {"seconds": 1.0}]' >> "$6" """, program]
    part = run_of(tmp_path, monkeypatch, "\n".join(found), limit)
    assert part["status"] == status
    assert part["found"]["torch FSDP2"] == {"seconds": 1.0}
    assert ("lost" in part["log"]) == ("lost" in program)


def test_each_case_of_the_tests_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "tests/gpu/a.py::b[no reshard-W2] PASSED [ 50%]\ntests/gpu/a.py::c FAILED [100%]\n1 failed, 1 passed in 2 s"
    (tmp_path / "said").write_text(said)
    part = run_of(tmp_path, monkeypatch, f"cat {tmp_path}/said; exit 1", 60, "tests")
    cases = {"tests/gpu/a.py::b[no reshard-W2]": "PASSED", "tests/gpu/a.py::c": "FAILED"}
    assert part["found"] == {"tests": {"summary": "1 failed, 1 passed in 2 s", "cases": cases}}
    assert part["status"] == "ended with 1"


def test_tables_have_what_was_found_and_what_failed(tmp_path: Path) -> None:
    lane: dict[str, Any] = {
        "stream": 7,
        "kernels": 5,
        "busy, seconds": 0.2,
        "network, seconds": 0.0,
        "waits, seconds": 0.01,
    }
    lane["longest waits"] = [{"seconds": 0.008, "before": "a kernel"}]
    how = {"device": "H100", "torch": "2.11", "network in Python": ""}
    found: dict[str, Any] = {"fullshard": {**how, "seconds": 0.3, "peak GiB": 31.5, "streams": [lane]}}
    found["torch FSDP2"] = {**how, "seconds": 0.4}
    parts = {
        "tests": {"status": "ended with 1", "found": {"tests": {"summary": "1 failed"}}},
        "7 B": {"status": "ok", "found": found},
        "predictions": {"status": "ok", "found": {"7 B": {"rest GiB": 11.0, "peak GiB": 32.0}}},
    }
    (results := tmp_path / "results.json").write_text(json.dumps(parts))
    page = shutil.copyfile(ROOT / "docs/explanation/gpu.md", tmp_path / "gpu.md")
    assert gpu.main(["--read", str(results), "--docs", str(page)]) == 0
    text = page.read_text()
    assert "| 0.75 " in text
    assert "8.0 before `a kernel`" in text
    assert "tests: ended with 1" in text
    assert "has not run yet" not in text


@pytest.mark.parametrize(("is_tiny", "device"), [(False, "cuda"), (True, "cpu")])
def test_predictions_are_for_the_device_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, is_tiny: bool, device: str
) -> None:
    asked = list[str]()

    def explain(build: Any, *, device: str, **_: Any) -> None:
        asked.append(device)
        raise ValueError("asked")

    monkeypatch.setattr(fullshard, "explain", explain, raising=False)
    found = dict(gpu.measure_part("predictions", is_tiny))
    assert [(name, each["error"]) for name, each in found.items()] == [(n, "ValueError: asked") for n in gpu.PREDICTED]
    assert asked == [device] * len(gpu.PREDICTED)


def test_operations_are_six_for_each_parameter_and_token_and_those_of_attention() -> None:
    inside = 2 * (4 * 64**2 + 3 * 64 * 96) + 128 * 64
    assert math.isclose(TINY.operations, 2 * 8 * (6 * inside + 6 * 2 * 8 * 64))


def test_settings_name_models_and_libraries() -> None:
    for setting, _ in gpu.SETTINGS.values():
        assert setting.model in MODELS
        assert set(setting.libraries) <= set(LIBRARIES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says that there is no GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 0
    assert "there is none" in capsys.readouterr().out
