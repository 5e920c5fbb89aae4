"""Where the tests of a module are is told by its name: `src/fullshard/a/b.py` has `tests/a/test_b.py`."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "fullshard"

#: Modules without a file of their name, and why.
WITHOUT = {
    "__init__.py": "it re-exports: tests/test_docs.py and tests/test_types.py check every public name",
    "__main__.py": "it calls the function that tests/test_cli.py tests",
    "checkpoint/__init__.py": "it re-exports",
    "elastic/__init__.py": "it re-exports",
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
    "wrapper/optim_state.py": "optim_state_dict(",
    "updates.py": "an optimizer has stepped on",
}


@cache
def modules() -> list[str]:
    """The files of the library that have code, relative to `src/fullshard`."""
    files = sorted(SOURCE.rglob("*.py"))
    return [file.relative_to(SOURCE).as_posix() for file in files if len(ast.parse(file.read_text()).body) > 1]


def mirror_of(module: str) -> Path:
    """The file for the tests of a module. A leading underscore of the module is left out."""
    path = Path(module)
    return TESTS / path.parent / f"test_{path.stem.strip('_')}.py"


def defined_in(module: str) -> tuple[set[str], set[str]]:
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
    top, inner = ({name for name in names if not name.startswith("_")} for names in found)
    return top, inner


def own_names() -> dict[str, set[str]]:
    """The public names that each module defines and no other: a test that has one uses the module.

    A name of a method is one module's own where no module has it at its top either.
    """
    defined = {module: defined_in(module) for module in modules()}
    tops = Counter(name for top, _ in defined.values() for name in top)
    inners = Counter(name for _, inner in defined.values() for name in inner)
    return {
        module: {name for name in top if tops[name] == 1}
        | {name for name in inner if inners[name] == 1 and tops[name] == (name in top)}
        for module, (top, inner) in defined.items()
    }


def used_in(text: str) -> tuple[set[str], set[str]]:
    """The modules that a file of tests imports, as dotted names, and all names that occur in it."""
    imported, names = set[str](), set[str]()
    for node in ast.walk(ast.parse(text)):
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


def test_a_module_has_a_file_of_tests_with_its_name() -> None:
    wrong, own = [], own_names()
    for module in (each for each in modules() if each not in WITHOUT):
        test = mirror_of(module)
        where = test.relative_to(TESTS.parent)
        if not test.is_file():
            wrong.append(f"src/fullshard/{module} has no {where}: write its tests there")
            continue
        text = test.read_text()
        imported, names = used_in(text)
        dotted = "fullshard." + module.removesuffix(".py").replace("/", ".")
        if not (dotted in imported or own[module] & names or (module in THROUGH and THROUGH[module] in text)):
            wrong.append(f"{where} neither imports {dotted} nor names anything that only it defines")
        if not re.search(r"^ *def test_", text, re.MULTILINE):
            wrong.append(f"{where} has no test")
    assert not wrong, "\n".join(wrong)


def test_what_has_no_tests_of_its_own_is_there_and_needs_none() -> None:
    for module in WITHOUT:
        assert module in modules(), f"src/fullshard/{module} is gone: remove it from WITHOUT"
        assert not mirror_of(module).exists(), f"src/fullshard/{module} has tests: remove it from WITHOUT"
        classes = re.search(r"^class ", (SOURCE / module).read_text(), re.MULTILINE)
        assert not classes, f"src/fullshard/{module} has a class: test it"
