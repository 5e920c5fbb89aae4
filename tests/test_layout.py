"""Where the tests of a module are is told by its name: `src/fullshard/a/b.py` has `tests/a/test_b.py`."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "fullshard"

#: Modules without a file of their name, and why.
WITHOUT = {
    "__init__.py": "it re-exports: tests/test_docs.py and tests/test_types.py check every public name",
    "__main__.py": "it calls the function that tests/test_cli.py tests",
    "checkpoint/__init__.py": "it re-exports",
    "optim/__init__.py": "it re-exports",
    "testing/__init__.py": "it re-exports",
    "testing/pytest_private.py": "tests/testing/test_plugin.py uses all of it",
}

#: Modules that their tests use through what users see, and what that is.
THROUGH = {
    "checkpoint/commands.py": "cli.main",
    "compat/names.py": "_is_fsdp_managed_module",
    "compat/patch.py": "fullshard.patch()",
    "group/extension.py": "def fsdp_pre_all_gather",
    "interop.py": "set_state_dict(",
    "misuse.py": "was called outside the forward",
    "testing/plugin.py": '"-p", "fullshard_pytest"',
    "schedule/schedule.py": "Recorder(",
    "updates.py": "an optimizer has stepped on",
}


def modules() -> list[str]:
    """The files of the library that have code, relative to `src/fullshard`."""
    files = sorted(SOURCE.rglob("*.py"))
    return [file.relative_to(SOURCE).as_posix() for file in files if len(ast.parse(file.read_text()).body) > 1]


def mirror_of(module: str) -> Path:
    """The file for the tests of a module. A leading underscore of the module is left out."""
    path = Path(module)
    return TESTS / path.parent / f"test_{path.stem.strip('_')}.py"


@cache
def defined_in(module: str) -> tuple[frozenset[str], frozenset[str]]:
    """The public names at the top of a module, and those of the methods of its classes."""
    found: tuple[set[str], set[str]] = set(), set()
    body = ast.parse((SOURCE / module).read_text()).body
    inside = [node for each in body if isinstance(each, ast.ClassDef) for node in each.body]
    for nodes, names in zip((body, inside), found, strict=True):
        for node in nodes:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
    top, inner = (frozenset(name for name in names if not name.startswith("_")) for names in found)
    return top, inner


def own_names(module: str) -> set[str]:
    """The public names that a module defines and no other: a test that has one uses the module."""
    top, inner = defined_in(module)
    others = [defined_in(other) for other in modules() if other != module]
    elsewhere = {name for names in others for name in names[0]}
    return {name for name in top if name not in elsewhere} | {
        name for name in inner if name not in elsewhere.union(*(names[1] for names in others))
    }


def used_in(test: Path) -> tuple[set[str], set[str]]:
    """The modules that a file of tests imports, as dotted names, and all names that occur in it."""
    imported, names = set[str](), set[str]()
    for node in ast.walk(ast.parse(test.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
    return imported, names


@pytest.mark.parametrize("module", [module for module in modules() if module not in WITHOUT])
def test_a_module_has_a_file_of_tests_with_its_name(module: str) -> None:
    test = mirror_of(module)
    where = test.relative_to(TESTS.parent)
    assert test.is_file(), f"src/fullshard/{module} has no {where}: write its tests there"
    imported, names = used_in(test)
    dotted = "fullshard." + module.removesuffix(".py").replace("/", ".")
    uses = bool(own_names(module) & names) or (module in THROUGH and THROUGH[module] in test.read_text())
    assert dotted in imported or uses, f"{where} neither imports {dotted} nor names anything that only it defines"
    functions = [node.name for node in ast.walk(ast.parse(test.read_text())) if isinstance(node, ast.FunctionDef)]
    assert any(name.startswith("test_") for name in functions), f"{where} has no test"


@pytest.mark.parametrize("module", WITHOUT)
def test_what_has_no_tests_of_its_own_is_there_and_needs_none(module: str) -> None:
    assert module in modules(), f"src/fullshard/{module} is gone: remove it from WITHOUT"
    assert not mirror_of(module).exists(), f"src/fullshard/{module} has tests: remove it from WITHOUT"
    defined = [node for node in ast.walk(ast.parse((SOURCE / module).read_text())) if isinstance(node, ast.ClassDef)]
    assert not defined, f"src/fullshard/{module} has a class {defined[0].name}: test it"
