"""The shape of the library: which file may know which, what it may take from torch, and how long it may be."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "fullshard"
FILES = sorted(SOURCE.rglob("*.py"))

#: From the bottom to the top: a file may import what stands in its own row or in one above it.
LAYERS = (
    (
        "torch_private",
        "torch_rules",
        "tree",
        "platforms",
        "policies",
        "offload_policy",
        "wire_policy",
        "waiting_grad",
        "leaf_hooks",
    ),
    ("buffer.plan",),
    ("device",),
    ("fused", "encodings", "encoded_tensors"),
    ("buffer",),
    ("disk",),
    ("comm",),
    ("ragged",),
    ("group", "updates"),
    ("schedule",),
    ("watch",),
    (
        "wrap",
        "meshes",
        "members",
        "stages",
        "module",
        "overlaps",
        "assignments",
        "misuse",
        "raw_errors",
        "strangers",
        "finite",
        "first_values",
        "diverging",
        "text",
        "handles",
        "figures",
        "original_parameters",
        "skip_module",
        "fully_shard",
        "full_params",
        "optim",
        "wrapper",
    ),
    ("compat", "interop"),
    ("checkpoint", "report", "testing", "elastic"),
    ("rehearsal",),
    ("cli", "__main__"),
)

#: What parts of the library need beside torch.
DEPENDENCIES = {
    "text": ("tabulate",),
    "interop": ("fullshard_at_start",),
    "compat": ("fullshard_at_start",),
    "fused": ("triton",),
    "disk": ("xxhash",),
    "checkpoint": ("xxhash", "safetensors", "tqdm", "upath", "fsspec"),
    "report": ("matplotlib", "tabulate"),
    "testing": ("pytest", "fullshard_pytest", "fullshard_rank_server"),
}

#: Files that use private names of torch, of pytest, or of frameworks.
USE_PRIVATE = (
    "torch_private",
    "torch_rules",
    "interop",
    "compat.frameworks",
    "compat.names",
    "testing.pytest_private",
)

#: Files that call collectives of torch, or send and receive. All others use routes, or `comm.process_group`.
COMMUNICATE = {
    "comm.point_to_point": "messages of the transport",
    "comm.collective": "collectives of the transport",
    "comm.all_reduce": "sums of replicas",
    "comm.backend_memory": "a barrier makes the communicator for symmetric memory",
    "comm.process_group": "what ranks tell each other outside of routes",
    "schedule.step_log": "ranks compare their passes in a lane, while they train",
    "optim.synchronization": "replicas compare what they exchange, and read it while they wait",
    "checkpoint.replicas": "copies of a checkpoint go from rank to rank, by tags of their own",
    "checkpoint.fetch": "ranks ask each other for parts of a checkpoint, by tags of their own",
    "report.environment": "messages that measure the network",
    "cli": "two processes try which transport there is",
    "torch_private": "names of collectives that releases call differently",
}

#: Where `nn.Module` keeps what is registered with it: parameters are shown by an update of these in place.
REGISTERED = {"_parameters", "_buffers", "_modules"}


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


@functools.cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    """The syntax of a file, from the module down."""
    return tuple(ast.walk(ast.parse(file.read_text())))


@pytest.fixture(scope="module", autouse=True)
def syntax() -> Iterator[None]:
    """What all these tests look at, which no other does."""
    yield
    nodes.cache_clear()


def imports(file: Path) -> Iterator[str]:
    for node in nodes(file):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide where a name comes from"
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def is_module(name: str) -> bool:
    path = SOURCE.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def known(file: Path) -> set[str]:
    """The files of the library that a file imports, those for type checking too."""
    found = set()
    for imported in imports(file):
        if imported.startswith("fullshard."):
            target = imported.removeprefix("fullshard.")
            found.add(target if is_module(target) else target.rpartition(".")[0])
    return found


@functools.cache
def private_names() -> set[str]:
    """The private names that the library itself defines: methods, classes, and attributes of its objects."""
    found = set()
    for node in (node for file in FILES for node in nodes(file)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id in ("self", "param") else set()
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            if isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__slots__":
                found |= set(ast.literal_eval(node.value))
    return {name for name in found if name.startswith("_")}


def test_imports_go_downward() -> None:
    names = {name: file for file in FILES if (name := name_of(file))}  # the package itself only re-exports
    wrong = [
        f"{name} must not know {target}, which stands above it"
        for name, file in names.items()
        for target in sorted(known(file))
        if layer_of(target) > layer_of(name)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = {name_of(file): known(file) for file in FILES if name_of(file)}
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(f"a circle: {' imports '.join(reversed(error.args[1]))}")


def test_optional_parts_know_none_of_each_other() -> None:
    parts = ("wrapper", "checkpoint", "report", "testing", "compat", "optim.local_steps", "elastic")
    wrong = []
    for file in FILES:
        own = [part for part in parts if name_of(file).startswith(part)]
        others = [part for part in parts if part not in own]
        wrong += [f"{name_of(file)} imports {each}" for each in known(file) if own and each.startswith((*others,))]
    assert not wrong, "\n".join(wrong)


def test_no_two_classes_share_a_name() -> None:
    places: dict[str, list[str]] = {}
    for file in FILES:
        for node in nodes(file):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(name_of(file))
    shared = {name: found for name, found in places.items() if len(found) > 1}
    assert not shared, shared


def test_torch_is_the_only_dependency_of_most_files_and_its_own_sharding_of_none() -> None:
    wrong = []
    for name, imported in ((name_of(file), imported) for file in FILES for imported in imports(file)):
        known = {"fullshard", "torch", *sys.stdlib_module_names, *DEPENDENCIES.get(name.split(".")[0], ())}
        is_sharding = imported.startswith(("torch.distributed.fsdp", "torch.distributed._composable"))
        if imported.partition(".")[0] not in known or is_sharding:
            wrong.append(f"{name} imports {imported}")
    assert not wrong, "\n".join(wrong)


def test_private_names_of_torch_are_used_in_one_file() -> None:
    wrong = []
    for file in FILES:
        name = name_of(file)
        if name in USE_PRIVATE:
            continue
        private = [each for each in imports(file) if re.match(r"torch\b.*\._", each)]
        for node in nodes(file):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                ours = node.attr in private_names() or node.attr in REGISTERED or node.attr.startswith("_fullshard_")
                ours |= ast.unparse(node.value) in ("os", "sys", "threading", "atexit")
                private += [] if ours else [f"{ast.unparse(node)} in line {node.lineno}"]
        wrong += [f"{name}: {each}" for each in private]
    assert not wrong, "\n".join(wrong)


def test_few_files_communicate() -> None:
    ends = "(_single|_into_tensor|_tensor|_coalesced|_object|_object_list|_base|_over)*"
    known = "all_?gather|all_?reduce|reduce_?scatter|broadcast|all_?to_?all|barrier|monitored_barrier|i?send|i?recv"
    called = re.compile(rf"(dist|torch\.distributed)\.({known}|gather|scatter|reduce){ends}")
    of_groups = re.compile(rf"(self\.)?_?(process_)?group\._?({known}){ends}")  # our own groups gather and reduce too
    taken = re.compile(rf"(torch\.distributed\S*|fullshard\.torch_private)\.({known}|gather|scatter|reduce){ends}")
    found = set()
    for file in FILES:
        names = [ast.unparse(node) for node in nodes(file) if isinstance(node, ast.Attribute)]
        if any(called.fullmatch(name) or of_groups.fullmatch(name) for name in names) or any(
            map(taken.fullmatch, imports(file))
        ):
            found.add(name_of(file))
    assert found == set(COMMUNICATE), found ^ set(COMMUNICATE)


def test_no_file_is_longer_than_500_lines_and_each_says_what_it_is() -> None:
    wrong = []
    for file in FILES:
        module = nodes(file)[0]
        assert isinstance(module, ast.Module)
        wrong += [f"{file} has no docstring"] if module.body and not ast.get_docstring(module) else []
        lines = len(file.read_text().splitlines())
        wrong += [f"{file} has {lines} lines"] if lines > 500 else []
    assert not wrong, "\n".join(wrong)
