"""What saves and loads in an object store cost beside raw uploads and downloads of the same bytes in parallel parts.

Every contender moves the same weights of one process, and they take turns. *Raw* puts and gets objects of 32 MiB, eight
at a time, with the same library and without checksums. *Copy* copies the weights in memory, which is what a save with
``wait=False`` makes training wait for::

    python -m benchmarks.stores                       # an S3 server (moto) that is started on this machine
    python -m benchmarks.stores --url s3://bucket/benchmark
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import torch
from tests.checkpoint.stores import bucket_of
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_by_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_by_dcp

from benchmarks.saves import _Weights
from fullshard import checkpoint
from fullshard.checkpoint.storage import located
from fullshard.disk.file import bytes_of

_PART, _AT_A_TIME = 32 << 20, 8


def measure_stores(url: str, count: int, width: int, rounds: int) -> dict[str, list[float]]:
    """For each figure, the seconds of each round."""
    model, root = _Weights(count, width), located(url)
    weights = [weight.detach() for weight in model.parameters()]
    targets = [torch.empty_like(weight) for weight in weights]
    contenders: dict[str, Callable[[], object]] = {
        "raw save": lambda: _put(root, weights),
        "fullshard save": lambda: checkpoint.save(url, model, step=1, keep_last=1),
        "DCP save": lambda: save_by_dcp(
            {"model": model.state_dict()}, storage_writer=FsspecWriter(f"{url}/dcp"), no_dist=True
        ),
        "raw load": lambda: _get(root, weights),
        "fullshard load": lambda: checkpoint.load(url, model),
        "DCP load": lambda: load_by_dcp(
            {"model": model.state_dict()}, storage_reader=FsspecReader(f"{url}/dcp"), no_dist=True
        ),
        "copy": lambda: [target.copy_(weight) for target, weight in zip(targets, weights, strict=True)],
        "blocked": lambda: checkpoint.save(url, model, step=1, keep_last=1, wait=False),
    }
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):  # the first one warms up
        for names in ("save", "load"), ("copy", "blocked"):
            for each in names:
                order = [name for name in contenders if name.endswith(each)]
                random.Random(number).shuffle(order)
                for name in order:
                    if name == "blocked":  # a load lets go of the memory for copies
                        contenders[name]()
                        checkpoint.background.Background.wait_until_finished()
                    begin = time.perf_counter()
                    contenders[name]()
                    seconds = time.perf_counter() - begin
                    checkpoint.background.Background.wait_until_finished()  # keeps the memory for the next save
                    if number:
                        found[name].append(seconds)
    return found


def _put(root: Any, weights: list[torch.Tensor]) -> None:
    parts = [(f"{root.path}/raw/{at}", bytes(bytes_of(weight))) for at, weight in enumerate(weights)]
    with ThreadPoolExecutor(_AT_A_TIME) as threads:
        list(threads.map(lambda part: root.fs.pipe_file(*part), parts))


def _get(root: Any, weights: list[torch.Tensor]) -> None:
    def get(at: int) -> None:
        bytes_of(weights[at])[:] = root.fs.cat_file(f"{root.path}/raw/{at}")

    with ThreadPoolExecutor(_AT_A_TIME) as threads:
        list(threads.map(get, range(len(weights))))


def _report(found: dict[str, list[float]], size: int) -> None:
    for name, seconds in found.items():
        base = found["copy" if name in ("copy", "blocked") else f"raw {name.split()[-1]}"]
        ratios = [mine / raw for mine, raw in zip(seconds, base, strict=True)]
        speed = size / median(seconds) / 1e6
        print(
            f"{name:16} {median(seconds):7.3f} s {speed:9.0f} MB/s   x raw {median(ratios):5.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="where checkpoints may be written; without it, a server on this machine")
    parser.add_argument("--weights", type=int, default=16, help="weights of 32 MiB each")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    width = int((_PART // 4) ** 0.5)
    size = options.weights * 4 * width * width
    if options.url:
        _report(measure_stores(options.url, options.weights, width, options.rounds), size)
        return
    with bucket_of("moto") as bucket:
        _report(measure_stores(f"{bucket}/run", options.weights, width, options.rounds), size)


if __name__ == "__main__":
    main()
