"""What the README and the pages in docs/ say: code runs, links lead somewhere, and docstrings say what users need.

A page is read as text with code in it: blocks marked ``python``, and set-up between ``<!-- python`` and ``-->`` that
readers of the rendered page do not see. What stands before the first ``##`` heading belongs to every section of the
page; a section is then one program, run on two ranks or on as many as ``<!-- ranks: 4 -->`` in it says. The tutorial is
one program. Lines keep their numbers, so that a traceback names the line of the page. A program runs in a directory of
its own.
"""

from __future__ import annotations

import ast
import builtins
import enum
import functools
import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import FunctionType
from typing import Any

import griffe
import pytest
import torch
import torch.distributed.fsdp

import fullshard
import fullshard.checkpoint
import fullshard.elastic
import fullshard.wrap
from fullshard import cli, interop  # noqa: F401  the reference shows interop
from fullshard.report import environment
from tests.harness import RankPool, World, failure_report

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("**/*.md"))
PAGES = [README, ROOT / "CONTRIBUTING.md", *DOCS]

#: Sections of pages that take longer than most.
_SLOW = (
    "torch.compile",
    "Estimate the time of a step",
    "Synchronize every few steps",
    "Save and resume",
)
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
    if page.stem == "tutorial":
        return {"": page.read_text()}
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
                # The quick lane has other tests of what these show (tests/test_recipes.py runs recipes).
                is_slow = page.stem in ("recipes", "fit", "tutorial") or heading in _SLOW
                marks = pytest.mark.slow if is_slow else ()
                found.append(pytest.param(page, heading, id=f"{page.stem}: {heading}", marks=marks))
    return found


def run_program(world: World, page: str, code: str, directory: Path) -> None:
    """Run the code of a page on this rank, in a directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        # The ranks communicate with gloo: the code is to find a machine without accelerators.
        patch.setattr(torch.accelerator, "is_available", lambda: False)
        patch.syspath_prepend(str(ROOT / "docs"))  # pages import their model from tiny_model
        exec(compile(code, page, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize(("page", "heading"), programs())
def test_the_code_of_a_section_runs(rank_pool: RankPool, tmp_path: Path, page: Path, heading: str) -> None:
    text = sections_of(page)[heading]
    size = int(found.group(1)) if (found := _RANKS.search(text)) else 2
    code = code_of(text)
    check_program(rank_pool, page, code, tmp_path, size, fresh="destroy_process_group" in code)


def readme_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", README.read_text(), flags=re.DOTALL | re.MULTILINE)


def check_program(pool: RankPool, page: Path, code: str, directory: Path, size: int = 2, fresh: bool = False) -> None:
    outcomes = pool.run(run_program, size, str(page.relative_to(ROOT)), code, directory, fresh=fresh)
    if any(outcome.kind != "returned" for outcome in outcomes):
        pytest.fail(failure_report(outcomes), pytrace=False)


@pytest.mark.parametrize("number", range(len(readme_blocks())))
def test_a_block_of_the_readme_runs(rank_pool: RankPool, tmp_path: Path, number: int) -> None:
    check_program(rank_pool, README, readme_blocks()[number], tmp_path, fresh=True)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(readme_blocks())))
def test_a_block_of_the_readme_is_a_program(tmp_path: Path, number: int) -> None:
    """Pasted into a file and started with the command that the README gives, on a machine without accelerators."""
    file = tmp_path / "train.py"
    file.write_text(readme_blocks()[number])
    command = "torchrun --nproc-per-node=2 train.py"
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


def test_links_paths_and_commands_lead_somewhere() -> None:
    """Paths are files of the repository in backticks, such as `src/fullshard/module.py` or `group/group.py`."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wrong = []
    for page, text in ((page, page.read_text()) for page in PAGES):
        for target in _LINK.findall(prose_of(text)):
            path, _, anchor = target.partition("#")
            goal = (page.parent / path).resolve() if path else page
            known = anchor in documented() if goal.parent.name == "reference" else False
            if not target.startswith(("http://", "https://")) and (
                not goal.exists() or (anchor and not known and anchor not in anchors(goal))
            ):
                wrong.append(f"{page.name} links to {target}")
        for name in re.findall(r"`([\w./-]+/[\w.-]*\.(?:py|md|toml))`", text):
            if not (ROOT / name).exists() and not (ROOT / "src" / "fullshard" / name).exists():
                wrong.append(f"{page.name} names {name}")
        commands = re.findall(r"(?:`|^)make ([\w-]+)", text, re.MULTILINE)
        wrong += [f"{page.name} tells to run make {command}" for command in commands if command not in targets]
    assert not wrong, "\n".join(wrong)


def test_the_readme_has_both_commands() -> None:
    text = README.read_text()
    assert "\nmake train\n" in text
    assert "\nmake test\n" in text


def public_object(path: str) -> Any:
    return functools.reduce(getattr, path.split(".")[1:], fullshard)


def methods(cls: object, with_inherited: bool = True) -> list[str]:
    """The public methods and properties of a class, with those of its bases that are ours. Names that only frameworks
    look for are not among them."""
    bases = [] if not isinstance(cls, type) else cls.__mro__ if with_inherited else [cls]
    kinds = (FunctionType, staticmethod, classmethod, property, functools.cached_property)
    named = {
        name: each for base in bases if base.__module__.startswith("fullshard") for name, each in vars(base).items()
    }
    named = {name: each for name, each in named.items() if not name.startswith("_") and isinstance(each, kinds)}
    return [name for name, each in named.items() if getattr(getattr(each, "fget", None), "__name__", "") != "<lambda>"]


@functools.cache
def documented() -> dict[str, str]:
    """What the reference shows, by its path, with the options of its directive: objects, and methods of classes."""
    found: dict[str, str] = {}
    directive = re.compile(r"^::: ([\w.]+)$(?:\n    options: (.*)$)?", re.MULTILINE)
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        for path, options in directive.findall(page.read_text()):
            assert path not in found, f"{path} has two directives"
            found[path] = options
            shown = re.search(r"\bmembers: (false|\[.*?\])", options)
            for name in methods(public_object(path), "inherited_members: false" not in options):
                if shown is None or name in re.findall(r"\w+", shown[1]):
                    found[f"{path}.{name}"] = options
    return found


def functions() -> list[str]:
    """Documented functions and methods."""
    return [path for path in documented() if isinstance(public_object(path), FunctionType)]


def constructed() -> list[str]:
    """Documented classes of which users make instances."""
    found = [path for path in documented() if isinstance(public_object(path), type)]
    kept = [path for path in found if "merge_init_into_class: false" not in documented()[path]]
    return [path for path in kept if not issubclass(public_object(path), (Exception, enum.Enum))]


def docstrings_of(path: str) -> str:
    """The docstring of an object, and for a method that of its class, which says what methods have in common."""
    owner = public_object(path.rpartition(".")[0])
    texts = [public_object(path).__doc__, owner.__doc__ if isinstance(owner, type) else None]
    return "\n\n".join(map(inspect.cleandoc, filter(None, texts)))


def errors_of(function: Any, *callers: Any) -> set[str]:
    """The errors that a function raises: itself, in private functions of its file, by checks of its arguments, or while
    it looks for a module's unit."""
    function = inspect.unwrap(function)
    known, found = {**vars(builtins), **function.__globals__}, set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Raise) and node.exc is not None:
            names = [node.exc.func if isinstance(node.exc, ast.Call) else node.exc]
        elif not isinstance(node, ast.Call):
            continue
        else:
            called = ast.unparse(node.func).rpartition(".")[2]
            names = {"expect": node.args[4:] or [ast.Name("TypeError")], "as_setting": [ast.Name("TypeError")]}.get(
                called, []
            )
            inner = known.get(called)
            places = (function.__module__ if called.startswith("_") else "", "fullshard.schedule.unit")
            if isinstance(inner, FunctionType) and inner.__module__ in places and inner not in (function, *callers):
                found |= errors_of(inner, function, *callers)
        raised = [(name, known.get(name)) for name in map(ast.unparse, names)]
        found |= {name for name, each in raised if isinstance(each, type) and issubclass(each, BaseException)}
    return found


def test_every_public_name_is_in_the_reference() -> None:
    packages = ("fullshard", "fullshard.wrap", "fullshard.optim", "fullshard.checkpoint", "fullshard.elastic")
    names = {f"{package}.{name}" for package in packages for name in sys.modules[package].__all__}
    fronts = ("fullshard.FSDPModule", "fullshard.FullyShardedDataParallel")
    names |= {f"{path}.{name}" for path in fronts for name in methods(public_object(path))}
    assert names - documented().keys() == set()


def test_what_the_reference_shows_has_a_docstring() -> None:
    for path in documented():
        found = public_object(path)
        text = vars(found).get("__doc__") if isinstance(found, type) else found.__doc__
        assert text, path
        assert not text.startswith(f"{path.rpartition('.')[2]}("), f"{path} has what dataclass writes"
        # The site takes words before a colon in *Returns* for the name of a type.
        returned = re.findall(r"^Returns:\n +(.*)$", docstrings_of(path), re.MULTILINE)
        assert not [line for line in returned if ": " in line], path


def test_a_traceback_shows_the_path_from_which_users_import_an_error() -> None:
    errors = {path: found for path in documented() if isinstance(found := public_object(path), type)}
    errors = {path: found for path, found in errors.items() if issubclass(found, Exception)}
    assert "fullshard.PeerFailureError" in errors
    shown = {path: f"{found.__module__}.{found.__qualname__}" for path, found in errors.items()}
    assert shown == {path: path for path in errors}


def test_a_docstring_names_every_parameter() -> None:
    wrong = []
    for path in (*functions(), *constructed()):
        text = docstrings_of(path)
        for name, parameter in inspect.signature(public_object(path)).parameters.items():
            is_variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if name != "self" and not is_variable and not re.search(rf"\b{name}\b", text):
                wrong.append(f"{path} does not say what {name} is")
    assert not wrong, "\n".join(wrong)


def test_a_docstring_names_every_error() -> None:
    wrong = {}
    for path in (*functions(), *constructed()):
        found = public_object(path)
        made_by = [found] if isinstance(found, FunctionType) else map(vars(found).get, ("__init__", "__post_init__"))
        ours = [each for each in made_by if isinstance(each, FunctionType) and _is_ours(each)]
        sections = griffe.Docstring(docstrings_of(path)).parse("google", warnings=False)
        raises = [each for section in sections if section.kind.value == "raises" for each in section.value]
        missing = set[str]().union(*map(errors_of, ours)) - {str(each.annotation) for each in raises}
        wrong |= {path: missing} if missing else {}
    assert not wrong, wrong


def _is_ours(function: FunctionType) -> bool:
    return os.path.exists(inspect.getfile(inspect.unwrap(function)))  # not what dataclass writes


def test_a_docstring_says_which_ranks_call() -> None:
    wrong = [path for path in functions() if "Ranks: " not in docstrings_of(path)]
    assert not wrong, "\n".join(wrong)


def test_the_reference_has_every_environment_variable() -> None:
    table = (ROOT / "docs" / "reference" / "environment.md").read_text()
    source = "".join(file.read_text() for file in (ROOT / "src").rglob("*.py"))
    read = set(re.findall(r"\"((?:FULLSHARD|FSDP)_[A-Z_]+[A-Z])\"", source))
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == read - set(environment._OURS)


def test_the_reference_has_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    commands = re.search(r"\{([\w,]+)\}", capsys.readouterr().out)
    assert commands is not None
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    assert re.findall(r"^\| `fullshard (\w+)", page, re.MULTILINE) == commands[1].split(",")
