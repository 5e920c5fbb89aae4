"""The commands of ``python -m fullshard checkpoint``: what is in a directory, is it whole, what differs, other formats.

Owns what users see: tables or JSON on the standard output; remarks, errors and progress on the error output; and exit
codes.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import reprlib
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint.blocks import CheckpointError, CorruptCheckpointError, printable
from fullshard.checkpoint.compare import compare
from fullshard.checkpoint.convert import FORMATS, WrongUse, export, files_of, import_model
from fullshard.checkpoint.display import print_json, print_lines, print_table, progress, value_of
from fullshard.checkpoint.keep import BestN, EveryNSteps, LatestN, NewerThan
from fullshard.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    Entry,
    Location,
    checked_step,
    dtype_of,
    is_checkpoint,
    number_of,
    step_of,
    steps_of,
)
from fullshard.checkpoint.reader import Checkpoint, is_there, list_checkpoints
from fullshard.checkpoint.removal import reasons_to_stay
from fullshard.checkpoint.storage import located, storage_of
from fullshard.policies import local_path
from fullshard.text import bytes_argument, bytes_text, counted, dtype_name, shape_text

_CODES = "Exit codes: 0: fine; 1: something is broken or differs; 2: wrong use."
#: The most names that are listed of tensors that only one checkpoint has.
_MOST = 20
_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Gives a parser the commands; their options have ``call``, which returns the exit code."""
    commands = parser.add_subparsers(required=True)

    def add(function: Callable[..., int], *directories: str, step: str = "") -> argparse.ArgumentParser:
        name, about = function.__name__.removeprefix("_"), str(function.__doc__)
        short = about.partition(".\n")[0].rstrip(".")
        command = commands.add_parser(name, help=short, description=about, epilog=_CODES)
        for directory in directories:
            is_local = directory in ("OUT", "SOURCE")
            kind = _reads(partial(local_path, what=directory) if is_local else located)
            command.add_argument(directory.lower(), metavar=directory, type=kind)
        if step:
            command.add_argument("--step", type=_reads(lambda text: checked_step(int(text))), help=step)
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(call=partial(_run, function))
        return command

    add(_list, "DIR")
    add(_show, "DIR", step="of this step instead of the newest whole one")
    add(_verify, "DIR", step="of this step only")
    command = add(_export, "DIR", "OUT", step="of this step instead of the newest whole one")
    command.add_argument("--format", choices=FORMATS, help="default: by the suffix of OUT, or else safetensors")
    command.add_argument("--dtype", type=_parse_dtype, help="cast floating-point values: bf16, fp16, fp32, fp64")
    command.add_argument("--max-shard-size", type=bytes_argument, help="the largest file size in a directory (5GB)")
    add(_import, "SOURCE", "DIR", step="the step of the checkpoint (default: the next one)")
    add(_diff, "A", "B")
    command = add(_prune, "DIR")
    for name, metavar, parse, what in (
        ("latest", "N", lambda text: LatestN(int(text)), "the N newest"),
        ("every", "N", lambda text: EveryNSteps(int(text)), "every step that is a multiple of N"),
        ("best", "METRIC:N[:max]", _parse_best, "the N with the lowest (or highest) value of a metric"),
        ("newer", "AGE", lambda text: NewerThan(_parse_age(text)), "those younger than 90m, 24h or 7d"),
    ):
        shared: dict[str, Any] = {"dest": "keep", "action": "append", "type": _reads(parse), "metavar": metavar}
        command.add_argument(f"--{name}", help=f"keep {what}", **shared)
    command.add_argument("--dry-run", action="store_true", help="remove nothing")


def _run(function: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    try:
        with torch.no_grad():
            status = function(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # as with "| head": nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as shells say it
    except (WrongUse, CheckpointError, OSError) as error:
        _print_error(str(error))
        return 2 if isinstance(error, WrongUse) else 1
    except Exception as error:  # the libraries of stores have no common class of errors
        if not any(hasattr(each, "fs") for each in vars(options).values()):
            raise
        _print_error(f"{type(error).__name__}: {error}")
        return 1


def _list(options: argparse.Namespace) -> int:
    """Lists the checkpoints of a directory, the newest first.

    It checks only descriptions and file sizes; verify reads everything.
    """
    found, unfinished = [], storage_of(options.dir).unfinished()
    for path in _saves(options.dir, unfinished=unfinished):
        with contextlib.suppress(FileNotFoundError):  # another job has removed it
            found.append(_summary(path, path in unfinished))
    if not found:
        return _list(options)  # another job removed them, so there is a newer one
    if options.json:
        print_json(found)
    else:
        rows = [
            (each["name"], each["step"], each["time"], bytes_text(each["bytes"]), each["ranks"], each["status"])
            for each in found
        ]
        print_table(("name", "step", "time", "size", "ranks", "status"), "lrlrrl", rows)
    return int(any(each["whole"] is False for each in found))


def _summary(path: Location, is_unfinished: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"name": path.name, "path": str(path), "step": step_of(path.name)}
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    found |= {"time": _time(path), "bytes": size, "ranks": None}
    if is_unfinished:
        return found | {"whole": None, "status": "not finished"}
    try:
        manifest = Checkpoint(path).manifest
    except CorruptCheckpointError as error:
        if not is_there(path):
            raise FileNotFoundError(path) from error
        reason = str(error).replace(f"{path}{os.sep}", "").partition("; ")[0]  # verify names the tensors
        return found | {"whole": False, "status": f"broken: {reason}"}
    if not manifest.versions:
        return found | {"whole": True, "status": "whole; of DCP, without checksums"}
    return found | {"step": manifest.step, "ranks": manifest.world_size, "whole": True, "status": "whole"}


def _show(options: argparse.Namespace) -> int:
    """Shows the tensors of a checkpoint, of the model and of the optimizer, and its other values."""
    with _open(options.dir, options.step) as checkpoint:
        manifest, time = checkpoint.manifest, _time(checkpoint.path)
        values = {name: value_of(checkpoint, name) for name in manifest.objects}
        groups: dict[str, dict[str, Entry]] = {}
        model = set(checkpoint.model.values())
        for name, entry in checkpoint.tensors.items():
            is_state = any(key.startswith("optim") for key in checkpoint.path_of(name)[:-1])
            group = "model" if name in model else "optimizer" if is_state else "other"
            groups.setdefault(group, {})[name] = entry
    summary: dict[str, Any] = {"path": str(checkpoint.path), "time": time}
    if manifest.versions:
        summary |= {"step": manifest.step, "ranks": manifest.world_size, "frozen": manifest.frozen} | manifest.versions
    if options.json:
        tensors = {
            name: {
                "group": group, "dtype": dtype_name(entry.dtype), "shape": entry.shape, "bytes": entry.nbytes,
                "pieces": [{"file": p.file, "offsets": p.offsets, "sizes": p.sizes} for p in entry.pieces],
            }
            for group, entries in groups.items() for name, entry in entries.items()
        }  # fmt: skip
        print_json(summary | {"tensors": tensors, "values": values})
        return 0
    for key, value in summary.items():
        print_lines(f"{key:<10} {value}")
    if not manifest.versions:
        print("written by DCP: without checksums")
    for group, entries in sorted(groups.items()):
        print(f"\n{group}")
        rows = [
            (name, dtype_name(entry.dtype), shape_text(entry.shape), bytes_text(entry.nbytes), _placement(entry))
            for name, entry in entries.items()
        ]
        print_table(("tensor", "dtype", "shape", "size", "placement"), "lllrl", rows)
        distinct = {tuple(entry.pieces): entry for entry in entries.values()}.values()  # tied tensors are stored once
        numel = sum(math.prod(entry.shape) for entry in distinct)
        print(
            f"{counted(len(entries), 'tensor')}, {counted(numel, 'element')}, "
            f"{bytes_text(sum(entry.nbytes for entry in distinct))}"
        )
    if values:
        print("\nvalues")
        print_table(("name", "value"), "ll", [(name, reprlib.repr(value)) for name, value in values.items()])
    return 0


def _verify(options: argparse.Namespace) -> int:
    """Reads every byte of the checkpoints of a directory and compares checksums.

    It names the file and the tensors of each defect.
    """
    found = []
    for path in _saves(options.dir, options.step):
        checked: dict[str, Any] = {"path": str(path), "defects": []}
        try:
            with Checkpoint(path, whole=False) as checkpoint:
                files = checkpoint.manifest.files
                checked |= {"checksums": bool(checkpoint.manifest.versions), "files": len(files)}
                checked |= {"tensors": len(checkpoint.tensors), "bytes": sum(file.size for file in files.values())}
                with progress(f"verify {path.name}", checked["bytes"]) as report:
                    checked["defects"] += checkpoint.verify(report)
        except CorruptCheckpointError as error:
            if not is_there(path):
                continue  # another job has removed it
            checked["defects"].append(str(error))
        found.append(checked)
        if options.json:
            continue
        if checked["defects"]:
            print_lines(f"{path}: broken", *(f"  {defect}" for defect in checked["defects"]))
        else:
            how = "every checksum is right" if checked["checksums"] else "all can be read; DCP writes no checksums"
            print_lines(f"{path}: {counted(checked['tensors'], 'tensor')} in {bytes_text(checked['bytes'])}: {how}")
    if not found:
        return _verify(options)  # another job removed them, so there is a newer one
    if options.json:
        print_json(found)
    return int(any(checked["defects"] for checked in found))


def _export(options: argparse.Namespace) -> int:
    """Writes the tensors of the model as files of safetensors or torch.

    OUT is a file that ends in .safetensors, .pt, .pth or .bin, or a directory, as `from_pretrained` reads it.
    """
    with _open(options.dir, options.step) as checkpoint:
        size = sum(checkpoint.tensors[name].nbytes for name in checkpoint.model.values())
        if not checkpoint.manifest.frozen:
            _print_error(f"{checkpoint.path} was saved without frozen parameters: they are not in {options.out}")
        with progress("export", size) as report:
            files = export(checkpoint, options.out, options.format, options.dtype, options.max_shard_size, report)
        if options.json:
            print_json({"path": str(checkpoint.path), "files": [str(file) for file in files]})
        else:
            print_lines(f"{checkpoint.path}: {len(checkpoint.model)} model tensors were written to")
            print_lines(*(f"  {file} ({bytes_text(file.stat().st_size)})" for file in files))
    return 0


def _import(options: argparse.Namespace) -> int:
    """Makes a checkpoint of the tensors of a model in files of safetensors or torch.

    SOURCE is a file, or a directory with such files or an index of them.
    """
    if number_of(options.dir.name):
        raise WrongUse(f"{options.dir} names a single checkpoint: give its parent directory, and --step")
    with progress("import", sum(file.stat().st_size for file in files_of(options.source))) as report:
        path, left_out = import_model(options.source, options.dir, options.step, report)
    for name in left_out:
        _print_error(f"'{name}' of {options.source} is not a tensor and is left out")
    with Checkpoint(path) as checkpoint:
        size = sum(file.size for file in checkpoint.manifest.files.values())
        if options.json:
            print_json({"path": str(path), "tensors": len(checkpoint.tensors), "bytes": size, "left_out": left_out})
        else:
            print_lines(f"{path}: {counted(len(checkpoint.tensors), 'tensor')}, {bytes_text(size)}")
    return 0


def _diff(options: argparse.Namespace) -> int:
    """Compares two checkpoints, or the newest whole ones of two directories.

    The largest differences come first.
    """
    with contextlib.ExitStack() as opened:
        a, b = (opened.enter_context(_open(each)) for each in (options.a, options.b))
        report = opened.enter_context(progress("diff", sum(entry.nbytes for entry in a.tensors.values())))
        differences = compare(a, b, report)
    differs = any(each for key, each in differences.items() if key != "equal")
    if options.json:
        for each in differences["differing"]:  # JSON has no infinity
            each.update({key: str(each[key]) for key in ("max", "mean") if math.isinf(each[key])})
        print_json({"a": str(a.path), "b": str(b.path), **differences})
        return int(differs)
    print_lines(f"A  {a.path}", f"B  {b.path}")
    for key, title in (("only_in_a", "only in A"), ("only_in_b", "only in B")):
        if differences[key]:
            print()
            print_table((title,), "l", [(name,) for name in differences[key][:_MOST]])
            if more := differences[key][_MOST:]:
                print(f"and {len(more)} more: --json names all")
    if differences["other_shape"]:
        print("\nof other shapes")
        rows = [(each["name"], shape_text(each["a"]), shape_text(each["b"])) for each in differences["other_shape"]]
        print_table(("tensor", "in A", "in B"), "lll", rows)
    if differences["differing"]:
        print("\ndifferent, the largest difference first")
        table = [
            (each["name"], " | ".join(dict.fromkeys(each["dtypes"])), f"{each['max']:.3g}", f"{each['mean']:.3g}")
            for each in differences["differing"]
        ]
        print_table(("tensor", "dtype", "max |A-B|", "mean |A-B|"), "llrr", table)
    if differences["values"]:
        print("\nother values")
        rows = [(each["name"], reprlib.repr(each["a"]), reprlib.repr(each["b"])) for each in differences["values"]]
        print_table(("name", "in A", "in B"), "lll", rows)
    print(f"\n{counted(differences['equal'], 'tensor')} {'is' if differences['equal'] == 1 else 'are'} equal")
    return int(differs)


def _prune(options: argparse.Namespace) -> int:
    """Removes the checkpoints of a directory that no option keeps.

    The newest whole one stays, and so do those that are not whole, or are being read.
    """
    if not options.keep:
        raise WrongUse("nothing says which checkpoints to keep: give --latest, --every, --best or --newer")
    paths, storage = _saves(options.dir), storage_of(options.dir)
    reasons, found = reasons_to_stay(paths, options.keep), list[dict[str, Any]]()
    for path in paths:
        why = reasons.get(path, ["not whole"])
        if removed := not why and (options.dry_run or storage.remove(path)):
            result = "would be removed" if options.dry_run else "removed"
        else:
            result = f"stays: {', '.join(why or ['it is being read'])}"
        found.append({"path": str(path), "step": step_of(path.name), "removed": removed, "result": result})
    if options.json:
        print_json(found)
    else:
        rows = [(path.name, each["step"], each["result"]) for path, each in zip(paths, found, strict=True)]
        print_table(("name", "step", "result"), "lrl", rows)
    return 0


def _parse_best(text: str) -> BestN:
    metric, count, *mode = text.split(":")
    return BestN(metric, int(count), *mode)  # type: ignore[arg-type]


def _parse_age(text: str) -> timedelta:
    return timedelta(**{{"m": "minutes", "h": "hours", "d": "days"}[text[-1:]]: float(text[:-1])})


def _reads(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A type of an argument, with the errors of ``parse``. (Of a ValueError, argparse would not show the message.)"""

    def checked(text: str) -> Any:
        try:
            return parse(text)
        except (ValueError, TypeError, KeyError, OverflowError, ImportError) as error:
            raise argparse.ArgumentTypeError(f"{text!r} cannot be read: {error}") from error

    return checked


def _saves(directory: Location, step: int | None = None, unfinished: Sequence[Location] = ()) -> list[Location]:
    """The checkpoints of a directory, the newest first. DCP's are listed only if there are no others."""
    if isinstance(directory, Path) and not directory.is_dir():
        raise WrongUse(f"{directory} is no directory")
    # A listing may miss a directory that is being renamed.
    found = list_checkpoints(directory) or list_checkpoints(directory)
    if not found and directory.is_dir():
        found = sorted(filter(is_checkpoint, directory.iterdir()), key=_time, reverse=True)
    found += unfinished
    if not found:
        raise WrongUse(f"{directory} has no checkpoint: no step-00000001 or similar, no {MANIFEST} and no {METADATA}")
    if step is not None and step not in steps_of(found):
        raise WrongUse(f"{directory} has no checkpoint of step {step}, only of {steps_of(found)}")
    return [path for path in found if step in (None, step_of(path.name))]


def _open(directory: Location, step: int | None = None) -> Checkpoint:
    """Opens the newest checkpoint that is whole."""
    paths = _saves(directory, step)
    for path in paths:
        try:
            return Checkpoint(path)
        except CorruptCheckpointError as error:
            if not is_there(path):
                continue  # another job has removed it
            if path == paths[-1]:
                raise
            _print_error(f"{path} is skipped, because it is not whole: {error}")
    return _open(directory, step)  # another job removed the last one, so there is a newer one


def _placement(entry: Entry) -> str:
    """How a tensor is cut, and the ranks whose files have the pieces."""
    found = {
        file: re.fullmatch(r"__(\d+)_\d+(?:-\w+)?\.distcp", file) for file in {piece.file for piece in entry.pieces}
    }
    ranks = sorted(int(match[1]) for match in found.values() if match)
    where = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks" if ranks else f"{len(found)} files"
    cut = {dim for each in entry.pieces for dim, size in enumerate(each.sizes) if size != entry.shape[dim]}
    if len(entry.pieces) == 1:
        return f"whole, {where}"
    return f"Shard({cut.pop()}), {where}" if len(cut) == 1 else f"{len(entry.pieces)} boxes, {where}"


def _time(path: Location) -> str:
    """When a checkpoint was finished."""
    last = next((path / name for name in (MANIFEST, METADATA) if (path / name).exists()), path)
    with contextlib.suppress(ValueError, OverflowError):  # of no year that there is
        found = os.lstat(last) if isinstance(last, Path) else last.stat()  # of a link to nothing, too
        if seconds := found.st_mtime:  # web servers may not say it
            return datetime.fromtimestamp(seconds).isoformat(" ", "seconds")
    return "-"


def _parse_dtype(text: str) -> torch.dtype:
    try:
        return _DTYPES[text] if text in _DTYPES else dtype_of(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(_DTYPES)}") from None


def _print_error(text: str) -> None:
    print(f"fullshard checkpoint: {printable(text)}", file=sys.stderr)
