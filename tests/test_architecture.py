"""The shape of the library: which file may know which, what it may take from torch, and how long it may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "fullshard"
FILES = sorted(SOURCE.rglob("*.py"))

#: From the bottom to the top: a file may import what stands in its own row or in one above it.
LAYERS = (
    ("torch_private", "tree", "policies"),
    ("buffer.plan",),
    ("comm", "device", "buffer"),
    ("group",),
    ("schedule",),
    ("wrap", "module", "fully_shard", "full_params"),
    ("wrapper", "checkpoint", "optim"),
    ("interop", "cli"),
)


def name_of(file: Path) -> str:
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(name: str) -> int:
    matches = [
        (len(prefix), level)
        for level, prefixes in enumerate(LAYERS)
        for prefix in prefixes
        if name == prefix or name.startswith(prefix + ".")
    ]
    assert matches, f"fullshard.{name} stands in no layer: add it to LAYERS"
    return max(matches)[1]


def imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide where a name comes from"
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def is_module(name: str) -> bool:
    path = SOURCE.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_go_downward(file: Path) -> None:
    name = name_of(file)
    if not name:
        return  # the package itself only re-exports
    for imported in imports(file):
        if imported.startswith("fullshard."):
            target = imported.removeprefix("fullshard.")
            if not is_module(target):
                target = target.rpartition(".")[0]
            assert layer_of(target) <= layer_of(name), f"{name} must not know {target}, which stands above it"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_nothing_comes_from_the_sharding_that_torch_ships(file: Path) -> None:
    for imported in imports(file):
        assert not imported.startswith(("torch.distributed.fsdp", "torch.distributed._composable")), imported


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_private_names_of_torch_are_used_in_one_file(file: Path) -> None:
    if name_of(file) in ("torch_private", "interop"):
        return
    for imported in imports(file):
        if imported.startswith("torch."):
            assert not any(part.startswith("_") for part in imported.split(".")), f"{imported} is private to torch"
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("torch", "dist"):
            assert not node.attr.startswith("_"), f"line {node.lineno}: {node.value.id}.{node.attr} is private to torch"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_no_file_is_longer_than_500_lines(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 500


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_every_file_says_what_it_is(file: Path) -> None:
    source = file.read_text()
    assert not source.strip() or ast.get_docstring(ast.parse(source)), f"{name_of(file)} has no docstring"


def test_the_whole_library_stays_within_13900_lines() -> None:
    assert sum(len(file.read_text().splitlines()) for file in FILES) <= 13_900
