"""torch's names stand for fullshard's after `patch()`, which changes the process: programs run in ranks of their own.

A Python that starts is asked only where the start is what a test is about: each imports torch anew.
"""

from __future__ import annotations

import enum
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed.fsdp as theirs

import fullshard
from tests.harness import RankPool, World, failure_report

SOURCE = Path(fullshard.__file__).parent.parent
PROGRAM = """
import torch.distributed.fsdp as fsdp
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
print(fully_shard.__module__, FullyShardedDataParallel.__module__)
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    search = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    known = {name: value for name, value in os.environ.items() if not name.startswith("FULLSHARD_")}
    environment = {**known, "PYTHONPATH": search, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120)


def execute(world: World, program: str) -> None:
    module = sys.modules["program"] = ModuleType("program")  # patch() finds what modules hold
    exec(program, vars(module))


def run_alone(program: str) -> None:
    """Run a program in a new process that has imported torch, on a world of one rank."""
    with RankPool() as pool:
        outcomes = pool.run(execute, 1, textwrap.dedent(program))
    assert outcomes[0].kind == "returned", failure_report(outcomes)


def test_names_are_bound_wherever_they_are_held_and_given_back() -> None:
    run_alone("""
        import types, sys, enum
        import torch.distributed.fsdp as fsdp
        from torch.distributed.fsdp import FullyShardedDataParallel as kept_before, fully_shard, ShardingStrategy
        from torch.distributed.fsdp import api, wrap, sharded_grad_scaler, fully_sharded_data_parallel
        import torch.distributed.checkpoint.state_dict as state_dict
        import torch.distributed.optim.named_optimizer as named_optimizer
        theirs = fsdp.FullyShardedDataParallel
        import fullshard
        count = fullshard.patch()
        assert count > 50 and fullshard.patch() == count and fullshard.is_patched()
        assert kept_before is named_optimizer.FSDP is fsdp.FullyShardedDataParallel
        assert kept_before is fullshard.FullyShardedDataParallel
        assert fully_sharded_data_parallel.StateDictType is api.StateDictType is fullshard.StateDictType
        assert ShardingStrategy is fullshard.ShardingStrategy
        assert wrap.ModuleWrapPolicy is fullshard.wrap.ModuleWrapPolicy
        assert wrap._or_policy is fullshard.wrap._or_policy
        assert sharded_grad_scaler.ShardedGradScaler is fullshard.optim.ShardedGradScaler
        assert fsdp.wrap is wrap and isinstance(wrap, types.ModuleType)
        from torch.distributed._composable.fsdp import fully_shard as composable
        from torch.distributed.fsdp._fully_shard import FSDPModule
        assert composable is fully_shard is fullshard.fully_shard and FSDPModule is fullshard.FSDPModule
        import torch.distributed._tools.fsdp2_mem_tracker as tracker, pytest
        import torch.distributed.pipelining.stage as later
        assert fullshard.FSDPModule is tracker.FSDPModule
        with pytest.raises(RuntimeError, match="fullshard.explain"):
            fullshard.FSDPModule._get_fsdp_state(None)
        from torch.distributed._composable.replicate_with_fsdp import ReplicateModule
        assert not issubclass(ReplicateModule, fullshard.FSDPModule)
        fullshard.unpatch()
        assert not fullshard.is_patched()
        assert kept_before is theirs is fsdp.FullyShardedDataParallel is named_optimizer.FSDP
        fullshard.unpatch()
        assert fullshard.patch() > 50
    """)


def test_it_is_refused_where_a_model_is_sharded() -> None:
    run_alone("""
        import pytest, torch, torch.distributed.fsdp as fsdp, fullshard
        model = fsdp.fully_shard(torch.nn.Linear(2, 2))
        with pytest.raises(RuntimeError, match="patch.. was called after a model, a FSDPLinear, was sharded"):
            fullshard.patch()
        del model
        fullshard.patch()
        model = fsdp.FullyShardedDataParallel(torch.nn.Linear(2, 2))
        assert isinstance(model, fullshard.FullyShardedDataParallel)
        with pytest.raises(RuntimeError, match="unpatch.. was called after a model, a FullyShardedDataParallel"):
            fullshard.unpatch()
        del model
        fullshard.unpatch()
    """)


LOGGED = """
import logging, sys, helper
print(sys.argv[1:], __name__)
log = logging.getLogger("fullshard")
log.info("first")
logging.basicConfig(format="own: %(message)s")
log.info("second")
"""
TRAINED = """
import torch, fullshard
fullshard.patch()
model = torch.nn.Linear(2, 2)
torch.optim.SGD(model.parameters()).step()
"""
FORKED = f"""
import multiprocessing, torch, fullshard
process = multiprocessing.get_context("fork").Process(target=exec, args=({TRAINED!r},))
process.start()
process.join()
"""


def test_a_program_runs_unchanged_and_is_told_each_thing_once(tmp_path: Path) -> None:
    """Also if it logs in its own way, and at its end that it sharded nothing."""
    script = tmp_path / "script.py"
    script.write_text(PROGRAM + LOGGED + TRAINED)
    (tmp_path / "helper.py").write_text("")
    done = run("-m", "fullshard", "run", str(script), "--steps", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "fullshard.fully_shard fullshard.wrapper.fsdp\n['--steps', '3'] __main__\n"
    replaces, *lines = done.stderr.splitlines()
    assert replaces.startswith(f"fullshard: version {fullshard.__version__} replaces the FSDP of torch ")
    assert lines[:2] == ["fullshard: first", "own: second"], done.stderr
    assert "nothing was sharded: this program trained with SGD" in "".join(lines[2:])
    assert "replaces the FSDP" not in "".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "program"), [("1", TRAINED), ("0", FORKED)])
def test_the_first_rank_says_that_nothing_was_sharded(rank: str, program: str) -> None:
    done = run("-c", program, RANK=rank)
    assert ("fullshard: nothing was sharded: this program trained with SGD" in done.stderr) is (rank == "0")


#: The file that an installation puts into site-packages, which does this at the start of every Python.
LINE = SOURCE.joinpath("fullshard_at_start.pth").read_text()


@pytest.mark.slow
def test_children_are_told_by_the_environment() -> None:
    looked = "import importlib.util; assert importlib.util.find_spec('torch')"  # as transformers does
    done = run("-c", LINE + looked + PROGRAM, FULLSHARD_PATCH="1", RANK="1")
    assert done.stdout == "fullshard.fully_shard fullshard.wrapper.fsdp\n"
    assert "replaces the FSDP" not in done.stderr, "the first rank says it"


def test_the_line_at_the_start_of_a_python_is_idle_unless_it_is_asked() -> None:
    idle = "assert not any('fullshard' in str(each) for each in (*sys.modules, *sys.meta_path))"
    off = "for off in ('', '0', 'false', 'No', 'off'):\n    os.environ['FULLSHARD_PATCH'] = off\n"
    each = f"import os, sys\n{off}    {LINE}"
    assert run("-S", "-c", f"{each}\n{idle}").returncode == 0  # without what is installed
    assert run("-I", "-S", "-c", LINE + idle, FULLSHARD_PATCH="1").returncode == 0  # which heeds no variable


@pytest.mark.parametrize("command", [["-m", "fullshard"], [str(Path(sys.executable).with_name("fullshard"))]])
def test_the_version_is_told_without_torch(command: list[str]) -> None:
    done = run("-X", "importtime", *command, "--version")
    assert done.stdout == f"fullshard {fullshard.__version__}\n"
    assert "torch" not in done.stderr


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")


@pytest.mark.parametrize("launcher", [(), pytest.param(TORCHRUN, marks=pytest.mark.slow)])
def test_an_installation_has_the_file_that_tells_children(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    """An editable installation, which the tests run from, too. Of a launcher and its ranks one process says so."""
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    done = run("-m", "fullshard", "run", sys.executable, *launcher, str(script))
    assert done.stdout.startswith("fullshard.fully_shard "), done.stderr
    assert done.stderr.count("replaces the FSDP") == 1, done.stderr


def test_enums_have_torchs_members_and_values() -> None:
    for name, torchs in vars(theirs).items():
        if isinstance(torchs, enum.EnumMeta):
            ours = getattr(fullshard, name)
            assert {each.name: each.value for each in ours} == {each.name: each.value for each in torchs}
