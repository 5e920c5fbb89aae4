"""The examples: both front ends train alike, and a run goes on with the other one, or with other numbers of ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

from fullshard.checkpoint import list_checkpoints

ROOT = Path(__file__).parent.parent
SMALL = ("--model=small", "--batch-size=4", "--seq-len=16")

pytestmark = pytest.mark.slow


def train(checkpoints: Path, steps: int, *flags: str) -> str:
    """Run a few steps of the smallest size on two ranks, and return what was printed."""
    return start("train.py", 2, *SMALL, f"--steps={steps}", f"--directory={checkpoints}", *flags)


def start(example: str, ranks: int, *flags: str) -> str:
    """Run an example on a machine without accelerators, and return what was printed."""
    command, environment = torchrun(example, ranks, *flags)
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def torchrun(example: str, ranks: int, *flags: str) -> tuple[list[str], dict[str, str]]:
    """The command that starts an example, and its environment."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*command, str(ROOT / "examples" / example), *flags], environment


def number_after(text: str, printed: str) -> float:
    found = re.search(rf"{text}: (\d[\d.e+-]*\d)", printed)
    assert found, printed
    return float(found.group(1))


def the_history_is_there(directory: Path, printed: str, steps: int, width: int) -> None:
    """A line for each step, also of a run that resumed from a checkpoint, and a picture of at least this width."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    for line in lines:
        assert 0 < line["loss"] < 6
        assert line["tokens_per_second"] > 0
    assert re.search(rf"step +{steps}/{steps}  loss [\d.]+  [\d,]+ tokens/s", printed)
    assert str(directory / "curves.png") in printed
    with Image.open(directory / "curves.png") as picture:
        picture.load()
        assert picture.format == "PNG"
        assert picture.width >= width
        assert picture.height >= 400
        assert len(picture.convert("L").getcolors() or ()) > 10  # something is drawn


def test_a_minimal_program_on_two_ranks_has_the_losses_of_one_and_resumes(tmp_path: Path) -> None:
    one = start("minimal.py", 1, "--steps=6", f"--directory={tmp_path / 'one'}").splitlines()
    two = start("minimal.py", 2, "--steps=3", f"--directory={tmp_path / 'two'}").splitlines()
    two += start("minimal.py", 2, "--steps=6", f"--directory={tmp_path / 'two'}").splitlines()
    assert [line.split(":")[0] for line in two] == [f"step {step}" for step in range(1, 7)]
    losses = [[float(line.split()[-1]) for line in lines] for lines in (one, two)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)
    assert losses[0][-1] < losses[0][0] - 1


def test_a_run_changes_its_front_end_twice_and_is_the_same_run(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 6)  # compares its first steps with the same steps unsharded
    found = re.search(r"losses differ by ([\d.e+-]+) at most", whole)
    assert found, whole
    assert float(found.group(1)) < 1e-5
    assert len(whole.splitlines()) <= 25
    the_history_is_there(tmp_path / "whole", whole, steps=6, width=1100)
    comparison = json.loads((tmp_path / "whole" / "comparison.json").read_text())
    for part in ("parameters", "gradients", "optimizer_state"):
        sizes = [usage[part] for usage in comparison["ranks"]]
        assert sizes == pytest.approx([comparison["unsharded"]["usage"][part] / 2] * 2, rel=1e-3)
        assert re.search(rf"{part.replace('_', ' ')} .* 0\.50", whole)
    assert re.search(r"peak of the process .* \d\.\d\d", whole)
    for api, steps in (("wrapper", 2), ("fully_shard", 4), ("wrapper", 6)):
        printed = train(tmp_path / "changes", steps, f"--api={api}", "--no-compare")
    assert f"Resumes from step 4, {tmp_path / 'changes' / 'step-00000004'}" in printed
    the_history_is_there(tmp_path / "changes", printed, steps=6, width=600)
    assert abs(number_after("Validation loss", printed) - number_after("Validation loss", whole)) <= 0.001


def test_the_wrapper_trains_as_unsharded_steps_do(tmp_path: Path) -> None:
    printed = train(tmp_path, 5, "--api=wrapper")
    found = re.search(r"losses differ by ([\d.e+-]+) at most", printed)
    assert found, printed
    assert float(found.group(1)) < 1e-5


def test_a_run_that_cannot_resume_says_what_differs(tmp_path: Path) -> None:
    train(tmp_path, 1, "--no-compare")
    command, environment = torchrun("train.py", 2, *SMALL, "--steps=2", "--seed=1", f"--directory={tmp_path}")
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode != 0
    assert "was trained with seed 0, and this run has seed 1" in ended.stderr


def test_a_killed_run_goes_on_where_it_was_with_other_ranks_too(tmp_path: Path) -> None:
    psutil = pytest.importorskip("psutil")
    whole = train(tmp_path / "whole", 12, "--no-compare")
    flags = [*SMALL, "--steps=12", "--no-compare", f"--directory={tmp_path / 'killed'}"]
    command, environment = torchrun("train.py", 2, *flags, "--checkpoint-every=1", "--steps=1000000")
    running = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        while not (tmp_path / "killed").exists() or not list_checkpoints(tmp_path / "killed"):
            assert running.poll() is None
            time.sleep(0.05)
    finally:
        for process in (*psutil.Process(running.pid).children(recursive=True), running):
            process.kill()
        running.wait()
    newest = max(int(path.name[5:13]) for path in list_checkpoints(tmp_path / "killed"))
    assert newest < 12
    printed = start("train.py", 1, *flags)
    assert f"Resumes from step {newest}, " in printed
    assert abs(number_after("Validation loss", printed) - number_after("Validation loss", whole)) <= 0.001
    assert sorted(path.name for path in list_checkpoints(tmp_path / "killed"))[-1] == "step-00000012"


def test_a_run_that_is_told_to_end_saves(tmp_path: Path) -> None:
    flags = [*SMALL, "--no-compare", f"--directory={tmp_path}"]
    command, environment = torchrun("train.py", 2, *flags, "--checkpoint-every=1000000", "--steps=1000000")
    running = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None
        for line in running.stdout:
            if "step " in line:
                running.terminate()
                break
        assert "Told to end" in running.stdout.read()
        running.wait(60)
    finally:
        running.kill()
    assert len(list_checkpoints(tmp_path)) == 1


def run_elastic(directory: Path, killed: int | None = None) -> set[str]:
    """Trains with four processes, one of which may be killed after its second step. What those left say at the end, by
    the shard."""
    _, environment = torchrun("elastic.py", 4)
    command = [sys.executable, str(ROOT / "examples" / "elastic.py"), "--steps=8", f"--directory={directory}"]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    try:
        if killed is not None:
            assert running[killed].stdout is not None
            assert any("step 2," in line for line in running[killed].stdout)
            running[killed].kill()
        printed = [process.communicate(timeout=120)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    left = [rank for rank in range(4) if rank != killed]
    assert [running[rank].returncode for rank in left] == [0] * len(left)
    if killed is not None:
        assert running[killed].returncode < 0
    return {re.sub(r"^process \d+, ", "", printed[rank].splitlines()[-1]) for rank in left}


def test_an_elastic_run_has_the_parameters_of_an_undisturbed_one_after_a_kill(tmp_path: Path) -> None:
    found = run_elastic(tmp_path / "undisturbed")
    assert len(found) == 2
    assert all(re.fullmatch(r"step 8, shard [01] has the digest \w{16}", each) for each in found)
    assert run_elastic(tmp_path / "killed", killed=0) == found


def test_a_fine_tuned_model_goes_on_with_fewer_ranks_and_is_read_by_transformers(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="make finetune needs peft, which is not installed")
    transformers = pytest.importorskip("transformers")
    flags = ["--batch-size=4", "--micro-batch=1", "--seq-len=16"]
    start("finetune.py", 2, "--steps=2", f"--directory={tmp_path / 'changes'}", *flags)
    changed = start("finetune.py", 1, "--steps=4", f"--directory={tmp_path / 'changes'}", *flags)
    assert "from step 2 on" in changed
    assert re.search(r"Computes in torch\.\w+: matrix products in bf16 are [\d.]+ times as fast", changed)
    the_history_is_there(tmp_path / "changes", changed, steps=4, width=600)
    whole = start("finetune.py", 2, "--steps=4", f"--directory={tmp_path / 'whole'}", *flags)
    text = "Validation loss of the averaged weights"
    assert abs(number_after(text, changed) - number_after(text, whole)) < 0.01

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "changes" / "merged", dtype=torch.float32)
    assert not any("lora" in name for name in model.state_dict())
    tokens = torch.tensor([list(b"import os")])
    with torch.no_grad():
        assert 4 < model(input_ids=tokens, labels=tokens).loss < 7
