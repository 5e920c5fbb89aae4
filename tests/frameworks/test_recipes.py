"""The recipes of docs/how-to/test-frameworks.md: tests that users write. They pass, and fail if training is wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.frameworks.run import ROOT, SOURCE

RECIPES = sorted((ROOT / "examples" / "testing").glob("test_*.py"))
PAGE = ROOT / "docs" / "how-to" / "test-frameworks.md"
NEEDS = {
    "accelerate": ["accelerate"],
    "lightning": ["lightning"],
    "torchtitan": ["torchtitan", "triton"],
    "trainer": ["accelerate", "transformers"],
}
#: What makes training wrong: a rank with a rate of its own, and a checkpoint that is not loaded.
MISTAKES = {
    "rate": (r"\b(lr|learning_rate)=1e-(\d)", r"\1=1e-\2 * (1 + int(__import__('os').environ['RANK']))"),
    "checkpoint": (r"\b(ckpt_path|resume_from_checkpoint)=\w+", r"\1=None"),
    "state": (r"accelerator\.load_state\(\w+\)", "pass"),
}


def test_the_page_shows_each_as_it_is_or_links_to_it() -> None:
    page = PAGE.read_text()
    shown = re.findall(r"^```py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    linked = re.findall(r"\]\(\.\./\.\./examples/testing/(\w+\.py)\)", page)
    assert sorted(shown) == sorted(file.read_text() for file in RECIPES if file.name not in linked)
    assert {*linked} <= {file.name for file in RECIPES}
    assert all(len(file.read_text().splitlines()) <= 40 for file in RECIPES)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_passes_and_fails_if_training_is_wrong(recipe: Path, tmp_path: Path) -> None:
    name = recipe.stem.removeprefix("test_")
    if missing := [each for each in NEEDS[name] if find_spec(each) is None]:
        pytest.skip(f"needs {', '.join(missing)}: make frameworks")
    text, wrong = recipe.read_text(), 0
    (tmp_path / recipe.name).write_text(text)
    for mistake, (pattern, replacement) in MISTAKES.items():
        if (changed := re.sub(pattern, replacement, text)) != text:
            (tmp_path / f"test_{name}_{mistake}.py").write_text(changed)
            wrong += 1
    known = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "FULLSHARD"))}
    settings = {"PYTHONPATH": os.pathsep.join([str(SOURCE), known.get("PYTHONPATH", "")]), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "fullshard_pytest", "-p", "no:cacheprovider", "--show-capture=no"]
    done = subprocess.run(command, cwd=tmp_path, env={**known, **settings}, capture_output=True, text=True)
    assert f"{wrong} failed, 1 passed" in done.stdout, done.stdout[-6000:]
    assert f"FAILED {recipe.name}" not in done.stdout, done.stdout[-6000:]
    errors = re.findall(r"^rank \d raised: (.*)", done.stdout, re.MULTILINE)
    assert len(errors) == wrong, done.stdout[-6000:]
    assert all("AssertionError" in error for error in errors), errors
