"""The commands for checkpoints: what they print, what they write, and with which code they end."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import pickle
import shutil
import struct
import sys
import weakref
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict

from fullshard import checkpoint, cli
from fullshard.checkpoint import Checkpoint
from tests.checkpoint.cases import flip, train, with_optimizer
from tests.checkpoint.state_dicts import Net
from tests.checkpoint.stores import FaultyStore
from tests.checkpoint.test_save import run, sharded
from tests.harness import RankPool, World
from tests.harness.models import seeded

APIS = ("fully_shard", "fragments")
apis = pytest.mark.parametrize("api", APIS)
Command = Callable[..., tuple[str, str]]


def save_all(world: World, folder: Path) -> None:
    """Of each front end two saves, the state of the last of them, and what DCP makes of the first's."""
    for api in APIS:
        model, optimizer = with_optimizer(sharded(api, Net), "AdamW")
        for step in (10, 20):
            train(model, optimizer, range(1))
            checkpoint.save(folder / api, model, optimizer, step=step, state={"seen": step * 4})
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if world.rank == 0:
            torch.save(whole, folder / f"{api}.expected")
        if api == "fully_shard":
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.save(state, checkpoint_id=folder / "dcp" / "step-20")
            dcp.save(state["model"], checkpoint_id=folder / "plain")


@pytest.fixture(scope="module")
def made(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    run(rank_pool, save_all, 2, folder)
    return folder


@pytest.fixture
def saves(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(made, tmp_path / "saves"))


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command, which must end with ``code``, and returns what it wrote to its two outputs."""

    def call(*arguments: object, code: int = 0) -> tuple[str, str]:
        try:
            found = cli.main(["checkpoint", *map(str, arguments)])
        except SystemExit as error:
            found = int(str(error.code))
        out, err = capsys.readouterr()
        assert found == code, err
        return out, err

    return call


def expected(saves: Path, api: str) -> dict[str, Tensor]:
    state = torch.load(saves / f"{api}.expected", weights_only=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(found[name], value), name


def test_list_shows_every_save_whole_broken_or_not_finished(saves: Path, command: Command) -> None:
    out, _ = command("list", saves / "fully_shard")
    head, _, *rows = out.splitlines()
    assert head.split() == ["name", "step", "time", "size", "ranks", "status"]
    assert [row.split()[0] for row in rows] == ["step-00000020", "step-00000010"]
    assert all(row.split()[-2:] == ["2", "whole"] for row in rows)
    (saves / "fully_shard" / ".step-00000030.host-1-00000000.partial").mkdir()
    file = saves / "fully_shard" / "step-00000020" / "__1_0.distcp"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:100])
    out, _ = command("list", saves / "fully_shard", code=1)
    assert f"broken: __1_0.distcp has 100 bytes, but {size} were written\n" in out
    assert "not finished" in out.splitlines()[4]
    out, _ = command("list", saves / "fully_shard", "--json", code=1)
    assert [(each["step"], each["ranks"], each["whole"]) for each in json.loads(out)] == [
        (20, None, False), (10, 2, True), (None, None, None)
    ]  # fmt: skip


@apis
def test_show_lists_tensors_by_group_with_totals_and_values(saves: Path, command: Command, api: str) -> None:
    out, err = command("show", saves / api)
    assert err == ""
    wanted = expected(saves, api)
    model, _, rest = out.partition("\noptimizer\n")
    rows = {line.split()[0]: line for line in model.splitlines() if line.startswith("model.")}
    assert set(rows) == {f"model.{name}" for name in wanted}
    assert "5 x 6" in rows["model.blocks.0.0.weight"]
    assert "float32" in rows["model.blocks.0.0.weight"]
    assert "120 B" in rows["model.blocks.0.0.weight"]
    assert ("Shard(0), 2 ranks" if api == "fully_shard" else "2 ranks") in rows["model.blocks.0.0.weight"]
    numel = sum(value.numel() for name, value in wanted.items() if name != "second.weight")  # which is tied
    assert f"{len(wanted)} tensors, {numel} elements" in model
    assert "optimizer.state.blocks.0.0.weight.exp_avg_sq" in rest
    assert "optimizer.param_groups.0.lr" in rest.partition("\nvalues\n")[2]
    assert rest.splitlines()[-1].split() == ["state.seen.0", "80"]


def test_show_takes_a_step_and_passes_over_what_is_broken(saves: Path, command: Command) -> None:
    out, _ = command("show", saves / "fragments", "--step", 10, "--json")
    told = json.loads(out)
    assert (told["step"], told["ranks"], told["values"]["state.seen.0"]) == (10, 2, 40)
    tensor = told["tensors"]["model.blocks.0.0.weight"]
    assert (tensor["group"], tensor["dtype"], tensor["shape"], tensor["bytes"]) == ("model", "float32", [5, 6], 120)
    assert sum(math.prod(piece["sizes"]) for piece in tensor["pieces"]) == 30
    (saves / "fragments" / "step-00000020" / "manifest.json").unlink()
    out, err = command("show", saves / "fragments", "--json")
    assert json.loads(out)["step"] == 10
    assert "step-00000020 is skipped, because it is not whole: " in err
    out, err = command("show", saves / "fragments", "--step", 20, code=1)
    assert out == ""
    assert "manifest.json cannot be read" in err


def test_verify_names_file_and_tensors_of_every_defect(saves: Path, command: Command) -> None:
    out, _ = command("verify", saves / "fragments")
    assert out.count("every checksum is right") == 2
    path = saves / "fragments" / "step-00000020"
    piece = Checkpoint(path).tensors["model.blocks.0.0.weight"].pieces[0]
    flip(path / piece.file, piece.data)
    other = path / ("__1_0.distcp" if piece.file == "__0_0.distcp" else "__0_0.distcp")
    size = other.stat().st_size
    other.write_bytes(other.read_bytes()[: size // 2])
    out, _ = command("verify", saves / "fragments", code=1)
    head, *defects = out.splitlines()
    assert head == f"{path}: broken"
    assert f"{other} has {size // 2} bytes, but {size} were written; parts of" in defects[0]
    assert f"{path / piece.file}: bytes 0 to " in defects[1]
    assert "model.blocks.0.0.weight" in defects[1]
    assert "step-00000010: " in defects[2]
    other.unlink()
    out, _ = command("verify", saves / "fragments", "--json", code=1)
    told = json.loads(out)
    assert [len(each["defects"]) for each in told] == [2, 0]
    assert f"{other} is missing; parts of" in told[0]["defects"][0]
    command("verify", saves / "fragments", "--step", 10)


NAMES = ("one.safetensors", "one.pt", "folder")


@apis
@pytest.mark.parametrize("name", NAMES)
def test_export_writes_the_model_alone_as_others_read_it(saves: Path, command: Command, api: str, name: str) -> None:
    out = saves / "new" / name
    said, _ = command("export", saves / api, out)
    assert sorted(path.name for path in out.parent.iterdir()) == [name]
    file = out / "model.safetensors" if name == "folder" else out
    assert f"{file} (" in said
    read = torch.load(file, weights_only=True) if name == "one.pt" else load_file(file)
    assert_equal(read, expected(saves, api))
    if name == "one.pt":
        assert read["first.weight"].data_ptr() == read["second.weight"].data_ptr()
    _, err = command("export", saves / api, out, code=2)
    assert f"{file} exists already" in err


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_export_cuts_at_a_size_and_writes_an_index(saves: Path, command: Command, format: str) -> None:
    out = saves / "new"
    options = ("--format", format, "--max-shard-size", "0.3kB", "--dtype", "bf16", "--json")
    said, _ = command("export", saves / "fully_shard", out, *options)
    plain = {"safetensors": "model.safetensors", "torch": "pytorch_model.bin"}[format]
    *files, index = map(Path, json.loads(said)["files"])
    stem, suffix = plain.split(".")
    assert [file.name for file in files] == [
        f"{stem}-{number:05}-of-{len(files):05}.{suffix}" for number in range(1, len(files) + 1)
    ]
    assert index.name == f"{plain}.index.json"
    assert sorted(out.iterdir()) == sorted([*files, index])
    told = json.loads(index.read_text())
    found: dict[str, Tensor] = {}
    for file in files:
        read = torch.load(file, weights_only=True) if format == "torch" else load_file(file)
        assert len(read) == 1 or sum(value.nbytes for value in read.values()) <= 300
        assert all(told["weight_map"][name] == file.name for name in read)
        found |= read
    wanted = {
        name: value.bfloat16() if value.is_floating_point() else value
        for name, value in expected(saves, "fully_shard").items()
    }
    assert_equal(found, wanted)
    assert told["metadata"]["total_size"] == sum(value.nbytes for value in wanted.values())
    _, err = command("export", saves / "fully_shard", out, "--format", format, code=2)
    assert "exists already" in err


def test_an_export_that_fails_leaves_nothing(saves: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path, beside = saves / "fully_shard" / "step-00000020", saves / "beside"
    beside.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for name in NAMES:
            _, err = command("export", saves / "fully_shard", beside / name, code=1)
            assert f"{beside / name} could not be written: No space left on device" in err
            assert not (beside / name).exists()
    piece = Checkpoint(path).tensors["model.second.weight"].pieces[0]
    flip(path / piece.file, piece.data)
    for name in NAMES:
        out, err = command("export", saves / "fully_shard", beside / name, code=1)
        assert out == ""
        assert f"{piece.file}: bytes 0 to " in err
        assert list(beside.iterdir()) == []


@pytest.mark.parametrize("name", NAMES[:2])
def test_one_tensor_is_in_memory_at_a_time(
    saves: Path, command: Command, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive, most, read = weakref.WeakSet[Tensor](), 0, Checkpoint.tensor

    def counted(self: Checkpoint, of: str) -> Tensor:
        nonlocal most
        tensor = read(self, of)
        alive.add(tensor)
        most = max(most, len(alive))
        return tensor

    monkeypatch.setattr(Checkpoint, "tensor", counted)
    command("export", saves / "fully_shard", saves / name)
    assert most == 1


@pytest.mark.parametrize("name", NAMES)
def test_what_was_exported_is_imported_and_loaded(saves: Path, command: Command, name: str) -> None:
    options = ("--max-shard-size", "300B") if name == "folder" else ()
    command("export", saves / "fragments", saves / name, *options)
    out, _ = command("import", saves / name, saves / "back", "--step", 7)
    assert out.startswith(f"{saves / 'back' / 'step-00000007'}: ")
    wanted = expected(saves, "fragments")
    with Checkpoint(saves / "back" / "step-00000007") as back:
        assert_equal({name: back.tensor(stored) for name, stored in back.model.items()}, wanted)
    model = seeded(Net, 5)
    assert checkpoint.load(saves / "back", model) == {"step": 7}
    assert_equal(dict(model.state_dict()), wanted)
    out, _ = command("import", saves / name, saves / "back", "--json")
    assert json.loads(out)["path"] == str(saves / "back" / "step-00000008")


@pytest.mark.parametrize("left_out", ["first.weight", "second.weight"])
def test_a_tied_tensor_is_loaded_from_any_of_its_names(
    saves: Path, command: Command, rank_pool: RankPool, left_out: str
) -> None:
    wanted = expected(saves, "fully_shard")
    torch.save({name: value for name, value in wanted.items() if name != left_out}, saves / "one.pt")
    command("import", saves / "one.pt", saves / "back")
    model = seeded(Net, 5)
    checkpoint.load(saves / "back", model)
    assert_equal(dict(model.state_dict()), wanted)
    run(rank_pool, load_tied, 2, saves)
    tied = {"first.weight", "second.weight"}
    torch.save({name: value for name, value in wanted.items() if name not in tied}, saves / "two.pt")
    command("import", saves / "two.pt", saves / "less")
    with pytest.raises(checkpoint.CheckpointError, match=r"lacks \['model.first.weight', 'model"):
        checkpoint.load(saves / "less", model)


def load_tied(world: World, folder: Path) -> None:
    for api in APIS:
        model = sharded(api, Net)
        checkpoint.load(folder / "back", model)
        found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        assert_equal({name: value for name, value in found.items() if isinstance(value, Tensor)}, expected(folder, api))


def test_import_finds_the_model_in_a_file_of_a_training_script(tmp_path: Path, command: Command) -> None:
    torch.save({"model": {"weight": torch.ones(3), "name": "net"}, "epoch": 3}, tmp_path / "last.pt")
    out, err = command("import", tmp_path / "last.pt", tmp_path / "new", "--json")
    assert json.loads(out)["left_out"] == ["name"]
    assert "'name' of" in err
    assert "is not a tensor and is left out" in err


def spoil_pickle(path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (path.parent / "executed",))

    torch.save({"weight": torch.ones(3), "evil": Evil()}, path)


def spoil_archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps("a" * 10_000_000))


def spoil_header(path: Path) -> None:
    header = json.dumps({"weight": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(12))


def spoil_index(path: Path) -> None:
    save_file({"weight": torch.ones(3)}, path.parent / "other.safetensors")
    path.mkdir()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": "../other.safetensors"}}))


def miss_a_file(path: Path) -> None:
    path.mkdir()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": "a.safetensors"}}))


def test_import_refuses_what_would_execute_code_lead_out_or_take_too_much(tmp_path: Path, command: Command) -> None:
    cases: list[tuple[Callable[[Path], Any], str, str]] = [
        (spoil_pickle, "a.pt", "cannot be loaded without executing code"),
        (spoil_archive, "a.pt", "compressed"),
        (lambda path: path.write_bytes(b"no archive"), "a.bin", "BadZipFile"),
        (lambda path: path.write_bytes(b"no header"), "a.safetensors", "cannot be loaded"),
        (spoil_header, "a.safetensors", "cannot be loaded"),
        (spoil_index, "a", "files outside its directory"),
        (miss_a_file, "a", "a.safetensors is missing, but model.safetensors.index.json names it"),
    ]
    for number, (spoil, name, says) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        spoil(folder / name)
        _, err = command("import", folder / name, folder / "new", code=1)
        assert says in err
        assert not (folder / "executed").exists()
        assert not (folder / "new").exists()


def imported(command: Command, folder: Path, name: str, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save(tensors, folder / f"{name}.pt")
    command("import", folder / f"{name}.pt", folder / name)
    return folder / name


def test_diff_shows_the_largest_difference_first(tmp_path: Path, command: Command) -> None:
    same = {"same": torch.ones(3), "nan": torch.tensor([math.nan, math.inf]), "empty": torch.empty(0)}
    a = {
        "little": torch.zeros(4),
        "much": torch.zeros(2),
        "cast": torch.ones(2),
        "shape": torch.ones(2),
        "gone": torch.ones(1),
    }
    b = {"little": torch.tensor([0, 0, 0, 1.0]), "much": torch.tensor([0, 3.0]), "cast": torch.ones(2).half(),
         "shape": torch.ones(3), "come": torch.ones(1)}  # fmt: skip
    odd = (
        {"odd": torch.tensor([1.0, math.nan]), "long": torch.tensor([2**60])},
        {"odd": torch.ones(2), "long": torch.tensor([2**60 + 1])},
    )
    first = imported(command, tmp_path, "first", {**same, **a, **odd[0]})
    second = imported(command, tmp_path, "second", {**same, **b, **odd[1]})
    out, _ = command("diff", first, second, "--json", code=1)
    told = json.loads(out)
    assert (told["only_in_a"], told["only_in_b"], told["equal"]) == (["model.gone"], ["model.come"], 3)
    assert told["other_shape"] == [{"name": "model.shape", "a": [2], "b": [3]}]
    assert [(each["name"], each["max"], each["mean"]) for each in told["differing"]] == [
        ("model.odd", "inf", "inf"), ("model.much", 3, 1.5), ("model.little", 1, 0.25), ("model.long", 1, 1),
        ("model.cast", 0, 0),
    ]  # fmt: skip
    out, _ = command("diff", first, second, code=1)
    assert out.index("model.odd") < out.index("model.much") < out.index("model.little") < out.index("model.cast")
    assert "float32 | float16" in out
    assert "3 tensors are equal" in out
    out, _ = command("diff", first, first)
    assert out.endswith("\n10 tensors are equal\n")


def test_diff_shows_values_that_changed(made: Path, command: Command) -> None:
    out, _ = command("diff", made / "fragments" / "step-00000010", made / "fragments", code=1)
    assert "state.seen.0  40" in out
    assert "optimizer.param_groups" not in out
    assert "only in" not in out


@pytest.mark.parametrize("name", ["dcp", "plain"])
def test_what_dcp_wrote_is_read_too(made: Path, tmp_path: Path, command: Command, name: str) -> None:
    path = made / name
    out, _ = command("list", path)
    assert "whole; of DCP, without checksums" in out
    out, _ = command("show", path)
    assert "written by DCP: without checksums" in out
    assert ("\noptimizer\n" in out) == (name == "dcp")
    wanted = expected(made, "fully_shard")
    assert f"\n{len(wanted)} tensors, " in out
    out, _ = command("verify", path)
    assert "DCP writes no checksums" in out
    command("export", path, tmp_path / "a.safetensors")
    assert_equal(load_file(tmp_path / "a.safetensors"), wanted)
    out, _ = command("diff", path, made / "fully_shard", "--json", code=1)
    told = json.loads(out)
    assert not told["differing"]
    assert not told["other_shape"]
    assert not [each for each in (*told["only_in_a"], *told["only_in_b"]) if each.startswith("model.")]
    assert told["equal"] >= len(wanted)


def test_a_broken_file_of_dcp_is_named(saves: Path, command: Command) -> None:
    file = saves / "plain" / "__1_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))
    out, _ = command("verify", saves / "plain", code=1)
    assert "__1_0.distcp" in out
    assert "tensor '" in out
    file.write_bytes(b"")
    out, _ = command("verify", saves / "plain", code=1)


def test_wrong_use_ends_with_2(saves: Path, command: Command) -> None:
    (saves / "empty").mkdir()
    torch.save([1], saves / "list.pt")
    torch.save({"a": "b"}, saves / "texts.pt")
    cases: list[tuple[list[str], str]] = [
        ([], "required"),
        (["list"], "required"),
        (["list", "{}/none"], "none is no directory"),
        (["list", "{}/empty"], "empty has no checkpoint"),
        (["show", "{}/fully_shard", "--step", "11"], "has no checkpoint of step 11, only of [10, 20]"),
        (["show", "{}/fully_shard", "--step", "-1"], "expected a number of 0 or more"),
        (["export", "{}/fully_shard", "{}/x.pt", "--format", "safetensors"], "is one file of torch"),
        (["export", "{}/fully_shard", "{}/x.pt", "--max-shard-size", "1GB"], "is one file of torch"),
        (["export", "{}/fully_shard", "{}/x", "--max-shard-size", "much"], "such as '80GB', got"),
        (["export", "{}/fully_shard", "{}/x", "--dtype", "int8"], "torch.int8 would change the values"),
        (["export", "{}/fully_shard", "{}/x", "--dtype", "bool"], "torch.bool would change the values"),
        (["export", "{}/fully_shard", "{}/x", "--dtype", "bf17"], "is not one of fp64, fp32, fp16, bf16"),
        (["import", "{}/none", "{}/x"], "is neither a file nor a directory with files that end in one of .bin, .pt"),
        (["import", "{}/list.pt", "{}/x/step-00000001"], "names a single checkpoint: give its parent directory"),
        (["import", "{}/list.pt", "{}/x"], "holds a list: expected a dict of tensors by name"),
        (["import", "{}/texts.pt", "{}/x"], "has no named tensors"),
        (["diff", "{}/fully_shard"], "required"),
    ]
    for arguments, says in cases:
        out, err = command(*(each.format(saves) for each in arguments), code=2)
        assert out == ""
        assert says in err
        assert not (saves / "x").exists()


def test_safetensors_lacks_dtypes_and_may_lack(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = imported(command, tmp_path, "odd", {"wide": torch.ones(2, dtype=torch.complex128)})
    _, err = command("export", path, tmp_path / "a.safetensors", code=2)
    assert "safetensors has no torch.complex128: export with --format torch" in err
    monkeypatch.setitem(sys.modules, "safetensors", None)
    (tmp_path / "b.safetensors").write_bytes(b"")
    _, err = command("import", tmp_path / "b.safetensors", tmp_path / "c", code=2)
    assert "pip install 'fullshard[cli]'" in err


def test_progress_is_shown_only_in_a_terminal(
    saves: Path, command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("verify", saves / "fully_shard")[1] == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    out, shown = command("verify", saves / "fully_shard")
    assert "every checksum is right" in out
    assert "verify step-" in shown
    assert "iB" in shown


def test_an_import_tells_of_the_bytes_that_it_wrote(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[str, int]] = []
    told: list[int] = []

    @contextlib.contextmanager
    def progress(what: str, total: int) -> Iterator[Callable[[int], object]]:
        shown.append((what, total))
        yield told.append

    monkeypatch.setattr("fullshard.checkpoint.commands.progress", progress)
    imported(command, tmp_path, "large", {"weight": torch.ones(600, 1000)})
    ((what, total),) = shown
    assert (what, len(told) > 8) == ("import", True)
    assert 2_400_000 < sum(told) < total + 10_000


def test_export_says_that_frozen_parameters_are_missing(tmp_path: Path, command: Command) -> None:
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    checkpoint.save(tmp_path / "saves", model, trainable_only=True)
    _, err = command("export", tmp_path / "saves", tmp_path / "a.safetensors")
    assert "was saved without frozen parameters" in err
    assert set(load_file(tmp_path / "a.safetensors")) == {"weight"}


def test_names_cannot_write_to_the_terminal(tmp_path: Path, command: Command) -> None:
    path = imported(command, tmp_path, "evil", {"red\x1b[31m": torch.ones(2)})
    assert "model.red?[31m" in command("show", path)[0]


@pytest.mark.slow
def test_transformers_reads_what_is_exported(tmp_path: Path, command: Command) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                                      num_attention_heads=2)  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    checkpoint.save(tmp_path / "saves", model)
    out = tmp_path / "out"
    config.save_pretrained(out)
    said, _ = command("export", tmp_path / "saves", out, "--max-shard-size", "5kB", "--json")
    assert len(json.loads(said)["files"]) > 2
    found = transformers.LlamaForCausalLM.from_pretrained(out)
    assert_equal(dict(found.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("scheme", ["", f"{FaultyStore.protocol}://"], ids=["local", "store"])
def test_prune_removes_what_no_option_keeps(command: Command, tmp_path: Path, scheme: str) -> None:
    directory, losses = f"{scheme}{tmp_path}/run", {1: 0.5, 2: 0.1, 3: 0.9, 4: 0.8, 5: 0.7}
    for step, loss in losses.items():
        checkpoint.save(directory, torch.nn.Linear(2, 2), step=step, metrics={"loss": loss})
    steps = lambda: [path.name[-1] for path in checkpoint.list_checkpoints(directory)]  # noqa: E731
    command("prune", directory, code=2)
    text, _ = command("prune", directory, "--latest", 1, "--best", "loss:1", "--every", 3, "--dry-run")
    assert steps() == ["5", "4", "3", "2", "1"]
    results = [line.split(maxsplit=2)[2] for line in text.splitlines()[2:]]
    assert results == [
        "stays: newest, LatestN(n=1)", "would be removed", "stays: EveryNSteps(n=3)",
        "stays: BestN(metric='loss', n=1, mode='min')", "would be removed",
    ]  # fmt: skip
    with Checkpoint(checkpoint.list_checkpoints(directory)[1]):
        text, _ = command("prune", directory, "--best", "loss:1", "--every", 3, "--json")
    assert [each["removed"] for each in json.loads(text)] == [False, False, False, False, True]
    assert "it is being read" in json.loads(text)[1]["result"]
    assert steps() == ["5", "4", "3", "2"]
    command("prune", directory, "--newer", "1h")
    assert steps() == ["5", "4", "3", "2"]
    command("prune", directory, "--best", "loss:1:max")
    assert steps() == ["5", "3"]


def test_no_file_is_written_where_nobody_looks_for_it(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint.save(tmp_path / "saves", torch.nn.Linear(2, 2), step=1)
    Path("file").touch()
    for out in ("s3://bucket/x.safetensors", "file:///tmp/x.pt", "s3:/bucket", "~/x.pt", "file", "file/x"):
        for arguments in (["export", "saves", out], ["import", out, "new"]):
            _, errors = command(*arguments, code=1 if arguments[1:] == ["file", "new"] else 2)
            assert out.partition("/x")[0] in errors.splitlines()[-1]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "saves"]


def test_prune_refuses_options_that_it_does_not_understand(command: Command, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, torch.nn.Linear(2, 2), step=1)
    options = (("--latest", "0"), ("--every", "x"), ("--best", "loss"), ("--best", "loss:1:mean"), ("--newer", "24"))
    for option in options:
        _, errors = command("prune", tmp_path, *option, code=2)
        assert f"{option[1]!r} cannot be read" in errors
