"""The commands of `python -m fullshard`: what they start, what they print, and with which status they end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fullshard
from fullshard import cli


def test_env_goes_on_where_two_ranks_cannot_be_tried(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a process began\nDuplicate GPU detected")

    monkeypatch.setattr(torch.multiprocessing, "spawn", fail)
    assert cli.main(["env"]) == 0
    assert "unknown, as two ranks could not be tried: Duplicate GPU detected" in capsys.readouterr().out


def test_env_says_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_transport", lambda device: f"a transport on {device}")
    monkeypatch.setenv("FULLSHARD_TRANSPORT", "p2p")
    assert cli.main(["env"]) == 0
    found = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if len(line.split()) > 1)
    assert found["fullshard"] == fullshard.__version__
    assert found["torch"] == torch.__version__
    assert found["transport"].startswith("a transport on ")
    assert found["FULLSHARD_TRANSPORT"] == "p2p"
    assert "gloo" in found["backends"]


def call_with(
    rank: int, environment: dict[str, str], function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(environment)
    function(rank, *arguments)


def fork_ranks(function: Callable[..., None], arguments: tuple[Any, ...], nprocs: int) -> None:
    """What `spawn` does, in processes that have imported torch."""
    arguments = (dict(os.environ), function, arguments)
    torch.multiprocessing.start_processes(call_with, arguments, nprocs, start_method="forkserver")  # type: ignore[attr-defined]


@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_transport_is_the_one_that_two_ranks_would_use(monkeypatch: pytest.MonkeyPatch, forked: bool) -> None:
    if forked:
        monkeypatch.setattr(torch.multiprocessing, "spawn", fork_ranks)
    monkeypatch.setenv("FULLSHARD_TRANSPORT", "collective")
    assert cli._transport(torch.device("cpu")) == "collective for ranks of this machine: FULLSHARD_TRANSPORT=collective"


def test_no_command_or_a_wrong_one_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["unknown"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 2
        assert "usage: " in capsys.readouterr().err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"fullshard {fullshard.__version__}\n")


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run leaves in the process is put back, and torch's names stay torch's."""
    monkeypatch.setenv("FULLSHARD_PATCH", "0")
    monkeypatch.setattr(sys, "argv", ["fullshard"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(cli, "patch_and_report", lambda: print("patched"))


@pytest.mark.usefixtures("patched")
def test_a_file_runs_with_its_arguments_and_its_neighbours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "neighbour_of_program.py").write_text("name = 'neighbour'")
    (tmp_path / "program.py").write_text(
        "import os, sys, neighbour_of_program\n"
        "print(__name__, neighbour_of_program.name, sys.argv[1:], os.environ['FULLSHARD_PATCH'])"
    )
    assert cli.main(["run", str(tmp_path / "program.py"), "--lr", "3"]) == 0
    assert capsys.readouterr().out == "patched\n__main__ neighbour ['--lr', '3'] 1\n"


@pytest.mark.usefixtures("patched")
def test_a_module_runs_from_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program_as_module.py").write_text("import sys; print(__name__, sys.argv[1:])")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "-m", "program_as_module", "-x"]) == 0
    assert capsys.readouterr().out == "patched\n__main__ ['-x']\n"


@pytest.mark.usefixtures("patched")
def test_a_command_that_is_not_there_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "no-such-command"]) == 2
    assert capsys.readouterr().err == "python -m fullshard run: no file and no command 'no-such-command'\n"


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("installed", [True, False])
def test_a_command_replaces_this_process_if_its_pythons_will_find_fullshard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], installed: bool
) -> None:
    if installed:
        (tmp_path / "fullshard_at_start.pth").write_text("")
    started = list[object]()
    monkeypatch.setattr(cli.site, "getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr(cli.site, "getusersitepackages", lambda: str(tmp_path / "user"))
    monkeypatch.setattr(os, "execvp", lambda *arguments: started.append(arguments))
    if installed:
        with pytest.raises(TypeError):  # execvp() does not return; what stands for it here does
            cli.main(["run", "true", "--option"])
        assert started == [("true", ["true", "--option"])]
        monkeypatch.delattr(os, "fork")  # as on Windows, where the new process would be left alone
        assert cli.main(["run", "false"]) == 1
        assert len(started) == 1
    else:
        assert cli.main(["run", "true", "--option"]) == 2
        assert "starts Python processes that would run on torch's FSDP" in capsys.readouterr().err
        assert not started
