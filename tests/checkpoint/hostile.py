"""Directories and files that somebody made to do harm: named cases, and random changes of good ones.

``python -m tests.checkpoint.hostile --first 0 --count 500`` tries random ones in numbers. Each is used in a process of
its own with every command and with ``load``; what it may not do is hang, end with a traceback, print what a terminal
obeys, or take much more memory or disk than the files have.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import json
import math
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import traceback
import warnings
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from fullshard import checkpoint, cli
from fullshard.checkpoint.blocks import checksum
from tests.checkpoint.cases import rewrite_manifest
from tests.checkpoint.stores import FaultyStore

STEP, STORE = "step-00000001", f"{FaultyStore.protocol}://"
#: Seconds for all uses of one, and bytes that they may take beside 64 times what the files have.
_LIMIT, _ROOM = 30, 48 << 20
#: Bytes that a process may ask for without use: each thread asks for a stack of 8 MiB.
_STACKS = 256 << 20
_ESCAPE = "\x1b]0;evil\x07"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)


def make_good(folder: Path) -> None:
    """A save of ours, one of DCP, and a file of torch."""
    model = Net()
    checkpoint.save(folder / "ours", model, step=1, state={"note": [1, {"a": 2.0}]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model.state_dict(), "note": [1]}, checkpoint_id=folder / "dcp", no_dist=True)
    torch.save(model.state_dict(), folder / "file.pt")


def told_of(folder: Path) -> Any:
    return json.loads((folder / "ours" / STEP / "manifest.json").read_text())["manifest"]


def tell(folder: Path, told: Any) -> None:
    text = told if isinstance(told, bytes) else json.dumps(told).encode()
    data = b'{"checksum": "%s", "manifest": %s}\n' % (checksum(text).encode(), text)
    (folder / "ours" / STEP / "manifest.json").write_bytes(data)


def change_manifest(change: Callable[[Any], Any]) -> Callable[[Path], str]:
    return lambda folder: (rewrite_manifest(folder / "ours" / STEP, change), "ours")[1]


def deep_manifest(key: bytes) -> Callable[[Path], str]:
    """A manifest that begins as a good one, and goes on with lists in lists."""

    def make(folder: Path) -> str:
        before, _, _ = json.dumps(told_of(folder)).encode().partition(key)
        tell(folder, before + key + b"[" * 100_000)
        return "ours"

    return make


def note(name: str, text: str) -> Callable[[Path], str]:
    """A small file beside the checkpoints, which are in a store."""
    return lambda folder: ((folder / "ours" / name).write_text(text), f"{STORE}ours")[1]


def of_others(name: str) -> Callable[[Path], str]:
    """A directory of another program, which it may be writing now, beside a checkpoint in a store or on a disk."""

    def make(folder: Path) -> str:
        (folder / "ours" / name).mkdir()
        (folder / "ours" / name / "foreign").touch()
        return "ours"

    return make


def change_metadata(change: Callable[[Metadata], Any]) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        path = folder / "dcp" / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        change(metadata)
        path.write_bytes(pickle.dumps(metadata))
        return "dcp"

    return make


def replace_metadata(data: bytes) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        (folder / "dcp" / ".metadata").write_bytes(data)
        return "dcp"

    return make


def archive(data: bytes, storages: dict[str, bytes] | None = None) -> bytes:
    """A file of ``torch.save`` with a pickle of somebody else."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("archive/data.pkl", data)
        for name, each in {"byteorder": b"little", "version": b"3\n", **(storages or {})}.items():
            made.writestr(f"archive/{name}", each)
    return file.getvalue()


def tensor_pickle(size: str, stride: str, count: int = 4) -> bytes:
    """Of a tensor in storage ``data/0``; size and stride are pickles of a tuple."""
    storage = f"((Vstorage\nctorch\nFloatStorage\nV0\nVcpu\nI{count}\ntQ"
    tensor = f"ctorch._utils\n_rebuild_tensor_v2\n{storage}I0\n{size}{stride}I00\nccollections\nOrderedDict\n)RtR"
    text = f"}}(Vw\n{tensor}u.".encode()
    for each in (b"storage", b"0", b"cpu", b"w"):
        text = text.replace(b"V%s\n" % each, b"X" + struct.pack("<L", len(each)) + each)
    text = text.replace(b"I00\n", b"\x89")
    return b"\x80\x02" + _with_binary_ints(text)


def _with_binary_ints(text: bytes) -> bytes:
    """torch's unpickler knows no text of numbers."""
    out, rest = b"", text
    while b"I" in rest:
        before, _, rest = rest.partition(b"I")
        digits, newline, after = rest.partition(b"\n")
        if newline and digits.lstrip(b"-").isdigit():
            out, rest = out + before + b"J" + struct.pack("<i", int(digits)), after
        else:
            out += before + b"I"
    return out + rest


def value_of_dcp(data: bytes) -> Callable[[Path], str]:
    """The value ``note`` of DCP's save is what these bytes are."""

    def make(folder: Path) -> str:
        file = folder / "dcp" / "__0_0.distcp"
        start = file.stat().st_size
        file.write_bytes(file.read_bytes() + data)

        def change(metadata: Metadata) -> None:
            info = metadata.storage_data[MetadataIndex("note")]
            info.offset, info.length = start, len(data)

        return change_metadata(change)(folder)

    return make


def file_of_torch(data: bytes) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        (folder / "file.pt").write_bytes(data)
        return "file.pt"

    return make


def in_place_of(name: str, make_it: Callable[[Path], Any]) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        make_it(path)
        return path.relative_to(folder).parts[0]

    return make


def sparse(path: Path) -> None:
    path.write_bytes(b'{"checksum": "' + b"0" * 16)
    os.truncate(path, 1 << 40)


def weight(told: Any) -> Any:
    """What a manifest says of the tensors that are like this one."""
    return told["kinds"][told["kind"][told["tensors"].index("model.first.weight")]]


def one_value_many_times(told: Any) -> None:
    place = next(iter(told["objects"].values()))
    told["objects"].update({f"state.note.{number}": place for number in range(20_000)})


def one_list_in_many(metadata: Metadata) -> None:
    """A list of pieces that is that of each of many tensors."""
    name, most = "model.first.weight", 3000
    stored, info = metadata.state_dict_metadata[name], metadata.storage_data[MetadataIndex(name, (0, 0))]
    stored.chunks = [stored.chunks[0]] * most
    for number in range(most):
        metadata.state_dict_metadata[f"{name}{number}"] = stored
        metadata.storage_data[MetadataIndex(f"{name}{number}", (0, 0))] = info


def long_keys(metadata: Metadata) -> None:
    path = ("model", "x" * 100_000)
    name = "model.first.weight"
    for number in range(5000):
        new = f"model.n{number}"
        metadata.state_dict_metadata[new] = metadata.state_dict_metadata[name]
        metadata.storage_data[MetadataIndex(new, (0, 0))] = metadata.storage_data[MetadataIndex(name, (0, 0))]
        metadata.planner_data[new] = path


def in_one_another(depth: int) -> bytes:
    """The pickle of a tuple of the same tuple twice, and so on."""
    return b"".join(b"q\0h\0\x86" for _ in range(depth))


def two_directories(path: Path) -> str:
    """Python reads the directory before the end, and torch the one where the end says it is."""
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("archive/data.pkl", pickle.dumps("a" * 100_000_000, 2))
        made.writestr("archive/byteorder", b"little")
        made.writestr("archive/version", b"3\n")
    hidden, shown = bomb.getvalue(), archive(pickle.dumps({"a": 1}, 2))
    (path / "file.pt").write_bytes(hidden + shown[:-6] + hidden[-6:])
    return "file.pt"


def nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def names_that_write(folder: Path) -> str:
    torch.save({f"red{_ESCAPE}": torch.ones(3), f"no{_ESCAPE}": "text"}, folder / "file.pt")
    return "file.pt"


def dumped(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


#: By name, what changes a good folder; it returns what is hostile in it.
CASES: dict[str, Callable[[Path], str]] = {
    "one value under many names": change_manifest(one_value_many_times),
    "one list of pieces in many tensors": change_metadata(one_list_in_many),
    "one long key in many paths": change_metadata(long_keys),
    "manifest is /dev/zero": in_place_of(f"ours/{STEP}/manifest.json", lambda path: path.symlink_to("/dev/zero")),
    "manifest is a pipe": in_place_of(f"ours/{STEP}/manifest.json", os.mkfifo),
    "manifest is a folder": in_place_of(f"ours/{STEP}/manifest.json", Path.mkdir),
    "manifest has a hole": in_place_of(f"ours/{STEP}/manifest.json", sparse),
    "manifest leads to itself": in_place_of(f"ours/{STEP}/manifest.json", lambda path: path.symlink_to(path)),
    "metadata is /dev/zero": in_place_of("dcp/.metadata", lambda path: path.symlink_to("/dev/zero")),
    "metadata is a pipe": in_place_of("dcp/.metadata", os.mkfifo),
    "metadata has a hole": in_place_of("dcp/.metadata", sparse),
    "data is a pipe": in_place_of("dcp/__0_0.distcp", os.mkfifo),
    "data of ours is a pipe": in_place_of(f"ours/{STEP}/__0_0.distcp", os.mkfifo),
    "class with a state": replace_metadata(
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x0c\0\0\0planner_dataX\x04\0\0\0evils\x86b."
    ),
    "key that takes for ever": replace_metadata(b"\x80\x02}(K\0" + in_one_another(30) + b"K\0u."),
    "index that takes for ever": replace_metadata(
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}(X\x0c\0\0\0storage_data}(K\0"
        + in_one_another(40) + b"K\0uub."
    ),
    "name that takes for ever": replace_metadata(
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}(X\x13\0\0\0state_dict_metadata}"
        + b"X\x0c\0\0\0storage_data}X\x0c\0\0\0planner_data}(X\x01\0\0\0aK\0" + in_one_another(40) + b"uub."
    ),
    "table of places": replace_metadata(b"\x80\x02]r\xff\xff\xff\x7f."),
    "bytearray of a number": value_of_dcp(archive(b"\x80\x02c__builtin__\nbytearray\nJ\0\0\0\x40\x85R.")),
    "tensor of a number": value_of_dcp(archive(b"\x80\x02ctorch\nFloatTensor\nJ\0\0\0\x40\x85R.")),
    "bytearray in a subclass": value_of_dcp(
        archive(b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(c__builtin__\nbytearray\nctorch\nTensor\n"
                b"J\0\0\0\x40\x85}tR.")
    ),
    "values in one another": value_of_dcp(archive(b"\x80\x02K\0" + in_one_another(200) + b".")),
    "lists in one another": value_of_dcp(archive(b"\x80\x02]" + b"q\0](h\0h\0e" * 60 + b".")),
    "value that takes for ever as a key": value_of_dcp(archive(b"\x80\x02}K\0" + in_one_another(40) + b"K\0s.")),
    "lists too deep to print": value_of_dcp(dumped(nested(1, 300))),
    "number with many digits": value_of_dcp(dumped(1 << 2000)),
    "keys that are tuples": value_of_dcp(dumped({(1, 2): 3, None: 4})),
    "storage shorter than it says": value_of_dcp(
        archive(tensor_pickle("(I1000000\nt", "(I1\nt", 1_000_000), {"data/0": bytes(16)})
    ),
    "file with a longer storage": file_of_torch(
        archive(tensor_pickle("(I1000000\nt", "(I1\nt", 1_000_000), {"data/0": bytes(16)})
    ),
    "stride of 0": file_of_torch(archive(tensor_pickle("(I500000000\nt", "(I0\nt"), {"data/0": bytes(16)})),
    "two directories": two_directories,
    "pickle before an archive": file_of_torch(b"\x80\x02c__builtin__\nbytearray\n\x85R." + archive(b"\x80\x02}.")),
    "meta tensor": file_of_torch(dumped({"w": torch.empty(1 << 40, device="meta")})),
    "sparse tensor": file_of_torch(dumped({"w": torch.eye(3).to_sparse()})),
    "names that write to the terminal": names_that_write,
    "texts that write to the terminal": change_manifest(
        lambda told: told["versions"].update({f"torch{_ESCAPE}": f"2{_ESCAPE}"})
    ),
    "file that writes to the terminal": change_manifest(lambda told: told["files"].update({_ESCAPE: [1, ["0" * 16]]})),
    "name that is no text": change_manifest(lambda told: told["tensors"].__setitem__(0, "\ud800")),
    "state of no rank": change_manifest(lambda told: told["state"].update(note=[])),
    "versions in a list": change_manifest(lambda told: told.update(versions=["2"])),
    "a size with a fraction": change_manifest(
        lambda told: told["files"].update({name: [size + 0.0, sums] for name, (size, sums) in told["files"].items()})
    ),
    "a shape that is too long": change_manifest(lambda told: weight(told).__setitem__(1, [1] * 1000)),
    "a shape that overflows": change_manifest(lambda told: weight(told).__setitem__(1, [1 << 62, 1 << 62, 0])),
    "a quantized dtype": change_manifest(lambda told: weight(told).__setitem__(0, "torch.qint8")),
    "manifest of deep JSON": deep_manifest(b'{"format": '),
    "manifest with deep versions": deep_manifest(b'"versions": '),
    "manifest with lists in place of sizes": change_manifest(lambda told: told.update(kind=nested(0, 900))),
    "manifest with deep metrics": change_manifest(lambda told: told.update(metrics={"loss": nested(0, 900)})),
    "note of deep JSON": note("newest.json", "[" * 100_000),
    "note of deep dicts": note("newest.json", '{"newest":' * 1000 + "1" + "}" * 1000),
    "note of a long number": note("newest.json", f'{{"newest": "step-{"9" * 5000}"}}'),
    "index of deep JSON": lambda folder: (
        (folder / "model.safetensors.index.json").write_text("[" * 100_000), "model.safetensors.index.json")[1],
    "step of another program": of_others("step-00000007"),
    "hidden step of another program": of_others(".step-00000007.partial"),
    "step is a file": in_place_of(f"ours/{STEP}", Path.touch),
    "step leads nowhere": in_place_of(f"ours/{STEP}", lambda path: path.symlink_to("nowhere")),
    "directory is a file": in_place_of("ours", Path.touch),
    "directory leads nowhere": in_place_of("ours", lambda path: path.symlink_to("nowhere")),
    "a step of many digits": change_manifest(lambda told: told.update(step=10**4000)),
    "a time of no year": lambda folder: (os.utime(folder / "ours" / STEP / "manifest.json", (0, 1 << 54)), "ours")[1],
}  # fmt: skip


#: Cases in which nothing has to be refused.
HARMLESS = {
    "lists too deep to print", "number with many digits", "keys that are tuples", "names that write to the terminal",
    "texts that write to the terminal", "name that is no text", "a step of many digits", "a time of no year",
    "values in one another", "lists in one another", "note of deep JSON", "note of deep dicts", "note of a long number",
    "hidden step of another program",
}  # fmt: skip


def odd_value(draw: random.Random, told: Any) -> Any:
    odd: list[Any] = [0, -1, 1, 1 << 31, 1 << 63, 10**300, 0.5, math.nan, math.inf, [0] * 70]
    return draw.choice([*odd, "", "x", _ESCAPE, "\ud800", "../x", "/", None, True, [], {}, [[]], nested(1, 50), told])


def random_manifest(folder: Path, draw: random.Random) -> str:
    """Some parts of a manifest are others, or lie where other parts lie."""
    told = told_of(folder)
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        parts: list[tuple[Any, Any]] = []
        waiting = [told]
        while waiting:
            each = waiting.pop()
            keys: Any = list(each) if isinstance(each, dict) else range(len(each)) if isinstance(each, list) else ()
            parts += [(each, key) for key in keys]
            waiting += [each[key] for key in keys]
        (into, key), (other, there) = draw.choice(parts), draw.choice(parts)
        what = draw.randrange(4)
        if what == 0:
            into[key] = json.loads(json.dumps(other[there]))
        elif what == 1 and isinstance(into, list):
            into[key:] = into[key:] * draw.choice([0, 2, 1000])
        elif what == 2 and isinstance(into, dict):
            into[str(odd_value(draw, ""))] = into.pop(key)
        else:
            into[key] = odd_value(draw, "")
    tell(folder, told)
    return "ours"


def random_pickle(data: bytes, draw: random.Random) -> bytes:
    """Some bytes are others, or stand there again."""
    made = bytearray(data)
    for _ in range(draw.randrange(1, 6)):
        at = draw.randrange(len(made))
        length = draw.randrange(1, 40)
        what = draw.randrange(4)
        if what == 0:
            made[at] = draw.choice([*b"(]})q0h\x85\x86Rbseu.2", 0, 255, draw.randrange(256)])
        elif what == 1:
            made[at:at] = made[at : at + length] * draw.choice([1, 2, 50])
        elif what == 2:
            del made[at : at + length]
        else:
            some = [in_one_another(60), b"c__builtin__\nbytearray\n", b"R", b"\x81", b"b", b"J\0\0\0\x40\x85R"]
            made[at:at] = draw.choice(some)
        made = made or bytearray(b".")
    return bytes(made)


def random_metadata(folder: Path, draw: random.Random) -> str:
    return replace_metadata(random_pickle((folder / "dcp" / ".metadata").read_bytes(), draw))(folder)


def random_value(folder: Path, draw: random.Random) -> str:
    data = dumped([torch.ones(3), {"a": (1, 2.0, "x"), "b": bytearray(b"xyz")}, {1, 2}])
    with zipfile.ZipFile(io.BytesIO(data)) as whole:
        inside = whole.read("archive/data.pkl")
    if draw.randrange(3):
        return value_of_dcp(archive(random_pickle(inside, draw), {"data/0": bytes(12)}))(folder)
    return value_of_dcp(random_pickle(data, draw))(folder)


def random_file(folder: Path, draw: random.Random) -> str:
    with zipfile.ZipFile(folder / "file.pt") as whole:
        parts = {name.partition("/")[2]: whole.read(name) for name in whole.namelist()}
    inside = random_pickle(parts.pop("data.pkl"), draw)
    data = archive(inside, parts) if draw.randrange(3) else random_pickle((folder / "file.pt").read_bytes(), draw)
    return file_of_torch(data)(folder)


def random_case(seed: int) -> Callable[[Path], str]:
    draw = random.Random(seed)
    make = draw.choice([random_manifest, random_metadata, random_value, random_file])
    return lambda folder: make(folder, draw)


def uses(folder: Path, hostile: str) -> bool:
    """Everything that somebody may do with it; returns whether what reads all of it refused it."""
    path, out, others = folder / hostile, folder / "out", [*(folder / "ours").rglob("foreign")]
    if hostile.startswith(STORE):
        path = f"{STORE}{folder}/{hostile.removeprefix(STORE)}"  # type: ignore[assignment]
    commands = [["list", path], ["show", path], ["show", path, "--json"], ["verify", path], ["verify", path, "--json"],
                ["export", path, out / "a.safetensors"], ["export", path, out / "a.pt"],
                ["diff", path, folder / "good"], ["diff", path, path, "--json"]]  # fmt: skip
    if is_file := hostile.endswith((".pt", "index.json")):
        path = path.parent if hostile.endswith(".json") else path
        commands = [["import", path, out], ["show", out]]
    codes = {command[0]: cli.main(["checkpoint", *map(str, command)]) for command in commands}
    if not is_file:
        for use in (checkpoint.load, partial(checkpoint.save, keep_last=1)):
            with contextlib.suppress(checkpoint.CheckpointError):
                use(path, Net())  # type: ignore[operator]
    assert all(each.exists() for each in others), "a save removed files of another program"
    return bool(codes.get("verify", codes.get("import")))


def memory(key: str) -> int:
    """Bytes of this process, now (``VmRSS``) or at most (``VmHWM``)."""
    found = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(found.split()[1]) << 10


def found_in(make: Callable[[Path], str], good: Path, may_be_used: bool = True) -> str:
    """What is wrong with how a case is handled; empty if nothing is. It is made of a copy of the ``good`` folder."""
    folder = Path(tempfile.mkdtemp(dir=good.parent))
    shutil.copytree(good, folder, dirs_exist_ok=True)
    shutil.copytree(good / "ours", folder / "good")
    hostile = make(folder)
    size = sum(file.lstat().st_blocks * 512 for file in (folder / hostile.removeprefix(STORE)).parent.rglob("*"))
    report = folder / "report"
    child = os.fork()
    if not child:
        _use_alone(folder, hostile, size, report, may_be_used)
    _, status = os.waitpid(child, 0)
    said = (folder / "said").read_text(errors="replace")
    wrong = report.read_text() if report.exists() else "it was killed"
    if os.WIFSIGNALED(status):
        wrong = f"it hung, or was killed by signal {os.WTERMSIG(status)}"
    elif any(ord(each) < 32 and each not in "\n\t" for each in said):
        wrong = f"it wrote to the terminal: {said!r}"
    elif "File too large" in said:
        wrong = f"it wrote files much larger than what it read: {said}"
    shutil.rmtree(folder)
    return wrong


def _use_alone(folder: Path, hostile: str, size: int, report: Path, may_be_used: bool) -> None:
    """Uses a case in a process that has a time, memory and files of some size, and ends the process."""
    wrong = ""
    try:
        said = os.open(folder / "said", os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1)
        os.dup2(said, 2)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_LIMIT)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most := _ROOM + 64 * size, most))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 30),) * 2)
        Path("/proc/self/clear_refs").write_text("5")
        ctypes.CDLL(None).mallopt(-8, 1)  # M_ARENA_MAX: else each thread asks for 64 MiB more
        before = memory("VmRSS"), memory("VmSize")
        sys.stdout, sys.stderr = io.TextIOWrapper(io.FileIO(1, "w")), io.TextIOWrapper(io.FileIO(2, "w"))
        try:
            is_refused = uses(folder, hostile)
            wrong = "" if is_refused or may_be_used else "nothing of it was refused"
        except BaseException:
            wrong = traceback.format_exc()
        sys.stdout.flush()
        more, asked = memory("VmHWM") - before[0], memory("VmPeak") - before[1]
        if not wrong and (more > most or asked > most + _STACKS):
            wrong = f"it took {more >> 20} MiB and asked for {asked >> 20}, and its files have {size >> 10} KiB"
    except BaseException:
        wrong = wrong or traceback.format_exc()
    report.write_text(wrong)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--every", type=int, default=1, help="run each n-th of the named cases")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_good(good := Path(folder) / "good")
        found = {str(seed): random_case(seed) for seed in range(options.first, options.first + options.count)}
        named = [*CASES.items()][:: options.every]
        told = {name: found_in(make, good, name in HARMLESS) for name, make in named}
        told |= {name: found_in(make, good) for name, make in found.items()}
    wrong = {name: each for name, each in told.items() if each}
    for name, each in wrong.items():
        print(f"{name}: {each}\n")
    print(f"{len(told)} cases, {len(wrong)} of them not treated as they should be")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
