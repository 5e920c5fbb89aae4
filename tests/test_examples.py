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

pytestmark = pytest.mark.slow


def train(checkpoints: Path, steps: int, *flags: str) -> str:
    """Run a few steps of the smallest size on two ranks, and return what was printed."""
    arguments = ["--device=cpu", f"--steps={steps}", "--batch-size=4", "--seq-len=16", "--sample-tokens=0"]
    return start("train.py", 2, *arguments, f"--checkpoint-dir={checkpoints}", *flags)


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
    """A line for each step, also of a run that went on from a checkpoint, and a picture of at least this width."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    for line in lines:
        assert 0 < line["loss"] < 6
        assert line["tokens_per_second"] > 0
        assert len(line["memory_bytes"]) == 2
        assert min(line["memory_bytes"]) > 0
    assert re.search(rf"step +{steps}/{steps}  loss [\d.]+  [\d,]+ tokens/s .* memory of a rank [\d.]+ MiB", printed)
    for name in ("metrics.jsonl", "curves.png"):
        assert str(directory / name) in printed
    with Image.open(directory / "curves.png") as picture:
        picture.load()
        assert picture.format == "PNG"
        assert picture.width >= width
        assert picture.height >= 400
        assert len(picture.convert("L").getcolors() or ()) > 10  # something is drawn


def test_a_run_changes_its_front_end_twice_and_is_the_same_run(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 6)  # compares its first steps with the same steps unsharded
    assert number_after("Largest difference of a loss", whole) < 1e-5
    assert "because only" in " ".join(whole.split())  # the numbers are explained
    the_history_is_there(tmp_path / "whole", whole, steps=6, width=1200)
    for api, steps in (("wrapper", 2), ("fully_shard", 4), ("wrapper", 6)):
        printed = train(tmp_path / "changes", steps, f"--api={api}", "--no-compare")
    assert f"Going on from step 4, {tmp_path / 'changes' / 'step-00000004'}" in printed
    the_history_is_there(tmp_path / "changes", printed, steps=6, width=800)
    assert abs(number_after("Validation loss", printed) - number_after("Validation loss", whole)) <= 0.001


def test_a_killed_run_goes_on_where_it_was_with_other_ranks_too(tmp_path: Path) -> None:
    psutil = pytest.importorskip("psutil")
    whole = train(tmp_path / "whole", 12, "--no-compare")
    flags = ["--device=cpu", "--steps=12", "--batch-size=4", "--seq-len=16", "--sample-tokens=0", "--no-compare"]
    flags += [f"--checkpoint-dir={tmp_path / 'killed'}"]
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
    assert f"Going on from step {newest}, " in printed
    assert abs(number_after("Validation loss", printed) - number_after("Validation loss", whole)) <= 0.001
    assert sorted(path.name for path in list_checkpoints(tmp_path / "killed"))[-1] == "step-00000012"


def test_a_run_that_is_told_to_end_saves(tmp_path: Path) -> None:
    flags = ["--device=cpu", "--batch-size=4", "--seq-len=16", "--no-compare", f"--checkpoint-dir={tmp_path}"]
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


def test_the_wrapper_trains_as_unsharded_steps_do_in_low_precision(tmp_path: Path) -> None:
    printed = train(tmp_path, 5, "--api=wrapper", "--precision=bf16", "--reshard-after-forward=no")
    assert number_after("Largest difference of a loss", printed) < 1e-2


def test_a_fine_tuned_model_goes_on_with_fewer_ranks_and_is_read_by_transformers(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="make finetune needs peft, which is not installed")
    transformers = pytest.importorskip("transformers")
    flags = ["--batch-size=4", "--micro-batch=1", "--seq-len=16"]
    start("finetune.py", 2, "--steps=2", f"--directory={tmp_path / 'changes'}", *flags)
    changed = start("finetune.py", 1, "--steps=4", f"--directory={tmp_path / 'changes'}", *flags)
    assert "from step 2 on" in changed
    whole = start("finetune.py", 2, "--steps=4", f"--directory={tmp_path / 'whole'}", *flags)
    text = "Validation loss of the averaged weights"
    assert abs(number_after(text, changed) - number_after(text, whole)) < 0.01

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "changes" / "merged", dtype=torch.float32)
    assert not any("lora" in name for name in model.state_dict())
    tokens = torch.tensor([list(b"import os")])
    with torch.no_grad():
        assert 4 < model(input_ids=tokens, labels=tokens).loss < 7
