"""The plugin, in a project that knows nothing of this one: what its tests may use, and what they are told."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
import pytest

MADE = []

@pytest.fixture(scope="session")
def table():
    MADE.append("table")
    return {"made": len(MADE)}

@pytest.fixture(scope="module")
def function():
    return lambda: 3

@pytest.fixture
def model(world):
    import torch
    yield torch.nn.Linear(4, world.size)
"""

PASSES = """
import os
import unittest

import pytest
import torch
import torch.distributed as dist
from torch import nn

def gathered(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found

@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("number", [1, 2])
def test_sizes_and_parameters(world, number):
    assert gathered(number) == [number] * world.size
    assert os.environ["RANK"] == str(dist.get_rank()) == str(world.rank)

@pytest.mark.ranks(3)
def test_without_world():
    assert dist.get_world_size() == 3

def test_without_a_mark(world):
    assert dist.get_world_size() == world.size == 2

def test_here():
    assert not dist.is_initialized()

def test_fixtures(world, tmp_path, table, function, model, monkeypatch, capsys):
    monkeypatch.setenv("SET", "1")
    print("printed")
    assert capsys.readouterr().out == "printed\\n"
    assert (function(), model.out_features) == (3, 2)
    (tmp_path / str(world.rank)).touch()
    dist.barrier()
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}

@pytest.mark.ranks(2, 3)
def test_wide_fixtures_are_made_once(world, table):
    assert table["made"] == 1
    assert "SET" not in os.environ

@pytest.mark.ranks(2)
def test_seeds_are_equal():
    assert len(set(gathered(torch.rand(()).item()))) == 1

class TestClass:
    def setup_method(self):
        self.rank = int(os.environ["RANK"])

    @pytest.mark.ranks(2)
    def test_it_was_set_up_on_its_rank(self, world):
        assert self.rank == world.rank

@pytest.mark.ranks(2)
class Unittest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.number = 3

    def setUp(self):
        self.rank = dist.get_rank()

    def test_it_was_set_up_on_its_rank(self):
        self.assertEqual(self.number, 3)
        self.assertEqual(self.rank, int(os.environ["RANK"]))

@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=ValueError, strict=True)
def test_an_expected_failure():
    raise ValueError("expected")

@pytest.mark.ranks(2)
def test_a_skip():
    pytest.skip("not today")

@pytest.mark.ranks(2, ends={1: "died"})
def test_a_death(world):
    if world.rank == 1:
        world.die()
    with pytest.raises(RuntimeError):
        dist.barrier()

@pytest.mark.ranks(2, ends={1: "hung"}, timeout=300)
def test_a_hang(world):
    if world.rank == 1:
        world.hang()

@pytest.mark.ranks(2, init=False, env={"SAID": "here"})
def test_the_program_makes_the_default_group():
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 2
    assert os.environ["SAID"] == "here"
    dist.destroy_process_group()

@pytest.mark.ranks(4, hosts=2)
def test_hosts(world):
    from fullshard.platforms import host_id
    assert os.environ["LOCAL_RANK"] == str(world.rank % 2)
    first, second, third, fourth = gathered(host_id())
    assert first == second != third == fourth

@pytest.mark.ranks(2)
def test_ddp(world):
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    model(torch.ones(1, 3)).sum().backward()

@pytest.mark.ranks(2)
def test_groups_left_behind():
    dist.new_group([0, 1], group_desc="mine")
"""

AUTOUSE = """
import os

import pytest

@pytest.fixture(autouse=True)
def variable(world):
    os.environ["OF_THE_FOLDER"] = "1"
"""

IN_A_FOLDER = """
import os

def test_the_fixture_of_the_folder_is_used(world):
    assert os.environ["OF_THE_FOLDER"] == "1"
"""

FAILS = """
import time

import pytest
import torch.distributed as dist

@pytest.mark.ranks(3)
def test_the_cause_comes_first(world, model):
    print("printed by", world.rank)
    assert world.rank != 1, "the cause"
    dist.barrier()

@pytest.mark.ranks(2, timeout=2)
def test_a_hang_is_shown(world):
    if world.rank == 1:
        time.sleep(600)

@pytest.mark.ranks(2, ends={1: "died"})
def test_a_death_that_does_not_come():
    pass

@pytest.fixture
def broken(world):
    assert world.rank == 0, "in a fixture"

def test_a_fixture_that_fails(broken):
    pass

def test_a_breakpoint(world):
    breakpoint()
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_passes.py").write_text(PASSES)
    (tmp_path / "test_fails.py").write_text(FAILS)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "conftest.py").write_text(AUTOUSE)
    for name in ("test_one.py", "test_two.py"):
        (tmp_path / "folder" / name).write_text(IN_A_FOLDER)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    return tmp_path


def run(project: Path, *arguments: str, typed: str = "") -> str:
    """What pytest prints in the project, in an environment that has no settings of this one's tests."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "fullshard_pytest", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "FULLSHARD"))}
    done = subprocess.run(command, cwd=project, input=typed, capture_output=True, text=True, env=environment)
    return done.stdout + done.stderr


def test_what_a_test_may_use(project: Path) -> None:
    printed = run(project, "test_passes.py", "folder", "-rsx")
    assert "21 passed, 1 skipped, 1 xfailed, 1 warning" in printed, printed
    assert "test_passes.py:1" in printed
    assert "not today" in printed
    assert "the test left the group 'mine' of the ranks [0, 1] behind on ranks 0, 1: destroy it with" in printed


def test_failures_tell_what_each_rank_did(project: Path) -> None:
    printed = run(project, "test_fails.py")
    assert "5 failed" in printed, printed
    assert "rank 1 raised: AssertionError: the cause (3 of 3 ranks failed)" in printed, printed
    assert "Captured stdout of rank 2 call" in printed
    assert "printed by 2" in printed
    assert "c10d-NullHandler" not in printed
    assert "rank 1 hung: Rank 1 did not end within 2 s." in printed
    assert "in test_a_hang_is_shown\n" in printed
    assert "_pytest" not in printed.split("in test_a_hang_is_shown\n")[1]
    assert "rank 1 returned: It returned. The test expects that it died." in printed
    assert "AssertionError: in a fixture" in printed
    assert "breakpoint() has no terminal on a rank: run pytest with --ranks-pdb-rank=RANK" in printed


@pytest.mark.slow
def test_a_session_that_sharded_nothing_after_patch_is_told(tmp_path: Path) -> None:
    program = """
import fullshard, pytest, torch
fullshard.patch()

@pytest.mark.ranks(2)
def test_it():
    torch.optim.SGD(torch.nn.Linear(2, 2).parameters()).step()
"""
    (tmp_path / "test_it.py").write_text(program)
    printed = run(tmp_path)
    assert printed.count("fullshard: nothing was sharded: this program trained with SGD") == 1, printed
    assert "1 passed" in printed, printed


@pytest.mark.slow
def test_a_rank_is_debugged(project: Path) -> None:
    printed = run(project, "test_fails.py", "--ranks-pdb", "-k", "cause", typed="p 'on rank', world.rank\nq\n")
    assert "rank 1 of 3 has the terminal" in printed, printed
    assert "('on rank', 1)" in printed, printed
    printed = run(project, "test_fails.py", "--ranks-pdb-rank=1", "-k", "breakpoint", typed="p 'on', world.rank\nc\n")
    assert "('on', 1)" in printed, printed
    assert "1 passed" in printed, printed


def test_a_mark_that_cannot_be_meant_so_names_its_test(project: Path) -> None:
    problems = {
        "": "has the sizes (); write for example @pytest.mark.ranks(2)",
        "2, time=3": "does not know time; it takes timeout, ",
        "3, hosts=2": "has 2 hosts, over which (3,) ranks cannot be spread evenly",
        "2, ends={0: 'ended'}": "expects that ranks have 'ended'; expected 'died' or 'hung'",
    }
    for number, mark in enumerate(problems):
        text = f"import pytest\n@pytest.mark.ranks({mark})\ndef test_it():\n    pass\n"
        (project / f"test_bad_{number}.py").write_text(text)
    printed = run(project, "--collect-only", "-k", "bad")
    for number, problem in enumerate(problems.values()):
        assert f"test_bad_{number}.py::test_it: the mark ranks {problem}" in printed, printed


def test_a_file_without_ranks_imports_nothing_whatever_stands_beside_it(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import sys\ndef test_it():\n    assert 'torch' not in sys.modules\n")
    (tmp_path / "test_beside.py").write_text(FAILS)
    assert "1 passed" in run(tmp_path, "test_it.py")


def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "test.md"
    blocks = re.findall(r"^```py\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for number, block in enumerate(blocks):
        (tmp_path / f"test_block_{number}.py").write_text(block)
    printed = run(tmp_path)
    assert f"{len(blocks) + 5} passed" in printed, printed
    assert "warning" not in printed, printed
