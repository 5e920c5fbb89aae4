"""What the README and the pages in docs/ say: code runs, links lead somewhere, signatures are true, no name is missing.

A page is read as text with code in it: blocks marked ``python``, and set-up between ``<!-- python`` and ``-->`` that
readers of the rendered page do not see. What stands before the first ``##`` heading belongs to every section of the
page; a section is then one program, run on two ranks or on as many as ``<!-- ranks: 4 -->`` in it says. Lines keep
their numbers, so that a traceback names the line of the page.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp

import fullshard
import fullshard.wrap
from tests.harness import RankPool, World, failure_report

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("**/*.md"))
PAGES = [README, ROOT / "CONTRIBUTING.md", *DOCS]

_HEADING = re.compile(r"(#+) (.*)")
_RANKS = re.compile(r"<!-- ranks: (\d+) -->")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def code_of(text: str) -> str:
    """The text with every line that is not code made empty."""
    lines, end = [], None
    for line in text.splitlines():
        if end is None:
            end = {"```python": "```", "<!-- python": "-->"}.get(line.strip())
            lines.append("")
        elif line.strip() == end:
            end = None
            lines.append("")
        else:
            lines.append(line)
    assert end is None, f"a block of code is not closed with {end}"
    return "\n".join(lines)


def prose_of(text: str) -> str:
    """The text with every block of code, in whatever language, made empty."""
    return re.sub(r"^```.*?^```$", lambda block: "\n" * block.group().count("\n"), text, flags=re.DOTALL | re.MULTILINE)


def sections_of(page: Path) -> dict[str, str]:
    """The sections of a page by heading, each with what stands before the first, at the lines where they stand."""
    sections: dict[str, list[str]] = {"": []}
    heading, is_code = "", False
    for number, line in enumerate(page.read_text().splitlines()):
        is_code ^= line.startswith("```")
        if line.startswith("## ") and not is_code:
            heading = line.removeprefix("## ")
            sections[heading] = sections[""] + [""] * (number - len(sections[""]))
        sections[heading].append(line)
    preamble = "\n".join(sections.pop(""))
    return {title: "\n".join(lines) for title, lines in sections.items()} or {"": preamble}


def programs() -> list[Any]:
    """The sections of docs/ that have code of their own."""
    found = []
    for page in DOCS:
        for heading, text in sections_of(page).items():
            blocks = text.count("```python")
            own = blocks - page.read_text().split("\n## ")[0].count("```python")
            if own if heading else blocks:
                found.append(pytest.param(page, heading, id=f"{page.stem}: {heading}"))
    return found


def run_program(world: World, page: str, code: str) -> None:
    """Run the code of a page on this rank."""
    with pytest.MonkeyPatch.context() as patch:
        # The ranks communicate with gloo: the code is to find a machine without accelerators.
        patch.setattr(torch.accelerator, "is_available", lambda: False)
        patch.syspath_prepend(str(ROOT / "docs"))  # pages import their model from tiny_model
        exec(compile(code, page, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize(("page", "heading"), programs())
def test_the_code_of_a_section_runs(rank_pool: RankPool, page: Path, heading: str) -> None:
    text = sections_of(page)[heading]
    size = int(found.group(1)) if (found := _RANKS.search(text)) else 2
    code = code_of(text)
    fresh = "destroy_process_group" in code
    outcomes = rank_pool.run(run_program, size, str(page.relative_to(ROOT)), code, fresh=fresh)
    if any(outcome.kind != "returned" for outcome in outcomes):
        pytest.fail(failure_report(outcomes), pytrace=False)


def readme_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", README.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(len(readme_blocks())))
def test_a_block_of_the_readme_runs(rank_pool: RankPool, number: int) -> None:
    outcomes = rank_pool.run(run_program, 2, "README.md", readme_blocks()[number], fresh=True)
    if any(outcome.kind != "returned" for outcome in outcomes):
        pytest.fail(failure_report(outcomes), pytrace=False)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(readme_blocks())))
def test_a_block_of_the_readme_is_a_program(tmp_path: Path, number: int) -> None:
    """Pasted into a file and started with the command that the README gives, on a machine without accelerators."""
    file = tmp_path / "file.py"
    file.write_text(readme_blocks()[number])
    command = "torchrun --nproc-per-node=2 file.py"
    assert command in README.read_text()
    arguments = command.removeprefix("torchrun ").split()
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that does not resolve is no reason to fail
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments]
    ended = subprocess.run(started, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "loss" in ended.stdout


@pytest.mark.parametrize(
    ("page", "changes"), [(README, 1), (ROOT / "docs" / "how-to" / "migration.md", 2)], ids=["README", "docs"]
)
def test_the_code_that_moves_from_torch_runs_with_either(page: Path, changes: int) -> None:
    """An import of torch and one of fullshard that take its place: both have every name."""
    change = r"^- from torch.distributed.fsdp import (.*)\n\+ from fullshard import \1$"
    found = re.findall(change, page.read_text(), re.MULTILINE)
    assert len(found) == changes
    for name in ", ".join(found).split(", "):
        assert hasattr(torch.distributed.fsdp, name)
        assert hasattr(fullshard, name)


def anchors(page: Path) -> set[str]:
    """What a link may have after ``#``: headings in lower case, with hyphens for spaces and no punctuation."""
    headings = [match.group(2) for match in map(_HEADING.fullmatch, prose_of(page.read_text()).splitlines()) if match]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(prose_of(page.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        assert goal.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors(goal), f"{page.name} links to {target}, and {goal.name} has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_that_are_named_exist(page: Path) -> None:
    """Files of the repository in backticks, such as `src/fullshard/module.py` or `group/group.py`."""
    for name in re.findall(r"`([\w./-]+/[\w.-]*\.(?:py|md|toml))`", page.read_text()):
        assert (ROOT / name).exists() or (ROOT / "src" / "fullshard" / name).exists(), f"{page.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_in_the_makefile(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in re.findall(r"(?:`|^)make ([\w-]+)", page.read_text(), re.MULTILINE):
        assert command in targets, f"{page.name} tells to run make {command}"


def test_the_readme_has_both_commands() -> None:
    text = README.read_text()
    assert "\nmake train\n" in text
    assert "\nmake test\n" in text


def headings_of_the_reference() -> list[str]:
    """What stands in backticks in the headings of docs/reference/api.md: names, most with their signatures."""
    text = prose_of((ROOT / "docs" / "reference" / "api.md").read_text())
    return re.findall(r"^#+ `(.+)`$", text, re.MULTILINE)


def described() -> set[str]:
    return {heading.partition("(")[0] for heading in headings_of_the_reference()}


@pytest.mark.parametrize("name", fullshard.__all__)
def test_every_public_name_is_described(name: str) -> None:
    assert name in described()


@pytest.mark.parametrize("name", fullshard.wrap.__all__)
def test_every_name_of_wrap_is_described(name: str) -> None:
    assert f"fullshard.wrap.{name}" in described()


@pytest.mark.parametrize("name", fullshard.optim.__all__)
def test_every_name_of_optim_is_described(name: str) -> None:
    assert f"fullshard.optim.{name}" in described()


@pytest.mark.parametrize("name", fullshard.checkpoint.__all__)
def test_every_name_of_checkpoint_is_described(name: str) -> None:
    assert f"fullshard.checkpoint.{name}" in described()


@pytest.mark.parametrize("name", [name for name in vars(fullshard.FSDPModule) if not name.startswith("_")])
def test_every_method_of_a_sharded_module_is_described(name: str) -> None:
    assert name in described()


def methods_of_the_wrapper() -> set[str]:
    """Those that it adds to ``nn.Module`` or changes."""
    wrapper = fullshard.FullyShardedDataParallel
    own = {name for cls in wrapper.__mro__ if cls.__module__.startswith("fullshard") for name in vars(cls)}
    return {name for name in own if not name.startswith("_") and callable(getattr(wrapper, name))}


@pytest.mark.parametrize("name", sorted(methods_of_the_wrapper()))
def test_every_method_of_the_wrapper_is_described(name: str) -> None:
    assert f"FullyShardedDataParallel.{name}" in described()


@pytest.mark.parametrize("heading", [heading for heading in headings_of_the_reference() if "(" in heading])
def test_signatures_are_those_of_the_code(heading: str) -> None:
    """Names, kinds and defaults of arguments; the policies have defaults that are constructed."""
    name, _, arguments = heading.partition("(")
    path, _, last = name.rpartition(".")
    place: Any = fullshard if hasattr(fullshard, last) else fullshard.FSDPModule
    if path:
        place = getattr(fullshard, path.removeprefix("fullshard."))
    scope: dict[str, Any] = {}
    exec(f"def described({arguments}: ...", vars(fullshard), scope)
    expected = inspect.signature(scope["described"]).parameters.values()
    parameters = [each for each in inspect.signature(getattr(place, last)).parameters.values() if each.name != "self"]
    assert [(each.name, each.kind, each.default) for each in expected] == [
        (each.name, each.kind, each.default) for each in parameters
    ]
