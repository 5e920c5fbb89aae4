"""Files in blocks with checksums: what was written is read, and a changed byte is found in its block."""

from __future__ import annotations

import gc
from itertools import product
from pathlib import Path

import pytest
import torch

from fullshard.checkpoint.blocks import (
    BLOCK,
    BlockReader,
    BlockWriter,
    CheckpointError,
    CorruptCheckpointError,
    checksum,
    make_directory,
    open_regular,
    printable,
    read_regular,
    without_collections,
)
from fullshard.disk.file import bytes_of


def written(path: Path, data: bytes, step: int = 100_000) -> list[str]:
    """Writes a file in parts of ``step`` bytes, and returns its checksums."""
    writer = BlockWriter(path)
    for start in range(0, len(data), step):
        writer.write(data[start : start + step])
    writer.close()
    assert writer.size == len(data)
    return writer.checksums


def content(nbytes: int) -> bytes:
    values = torch.randint(256, (nbytes,), dtype=torch.uint8)
    return bytes_of(values).tobytes()


def test_each_block_has_the_checksum_of_its_bytes(tmp_path: Path) -> None:
    data = content(3 * BLOCK + 17)
    for nbytes, step in product((0, 1, BLOCK - 1, BLOCK, BLOCK + 1, len(data)), (1 << 14, 100_000, 1 << 22)):
        path = tmp_path / f"{nbytes}-{step}"
        checksums = written(path, data[:nbytes], step)
        assert path.read_bytes() == data[:nbytes]
        assert checksums == [checksum(data[start : min(start + BLOCK, nbytes)]) for start in range(0, nbytes, BLOCK)]


RUNS = ((0, 10), (BLOCK - 5, 10), (BLOCK, BLOCK), (17, 2 * BLOCK), (3 * BLOCK, 100), (40, 0))


@pytest.mark.parametrize("checks", [True, False])
def test_any_run_of_bytes_can_be_read(tmp_path: Path, checks: bool) -> None:
    data = content(3 * BLOCK + 100)
    checksums = written(tmp_path / "file", data)
    for start, length in RUNS:
        reader = BlockReader(tmp_path / "file", len(data), checksums if checks else None)
        target = bytearray(length)
        reader.read_into(memoryview(target), start)
        assert bytes(target) == data[start : start + length]
        reader.close()


def test_small_tensors_of_a_block_are_read_one_after_the_other(tmp_path: Path) -> None:
    values = torch.arange(3000, dtype=torch.int64)
    checksums = written(tmp_path / "file", bytes_of(values).tobytes())
    reader = BlockReader(tmp_path / "file", values.nbytes, checksums)
    for first in (10, 0, 2990):
        found = torch.zeros(10, dtype=torch.int64)
        reader.read_to(found, first * 8)
        assert found.tolist() == list(range(first, first + 10))
    reader.close()


@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 9])
def test_a_changed_byte_is_found_in_its_block_and_in_no_other(tmp_path: Path, at: int) -> None:
    data = bytearray(content(2 * BLOCK + 10))
    path, checksums = tmp_path / "file", written(tmp_path / "file", bytes(data))
    data[at] ^= 1
    path.write_bytes(data)
    reader, seen = BlockReader(path, len(data), checksums), list[int]()
    first = at // BLOCK * BLOCK
    assert list(reader.check(seen.append)) == [(first, min(first + BLOCK, len(data)))]
    assert seen == [BLOCK, BLOCK, 10]
    for number in range(3):
        target = memoryview(bytearray(4))
        if number == at // BLOCK:
            with pytest.raises(CorruptCheckpointError, match=rf"bytes {first} to .* are not what was written"):
                reader.read_into(target, number * BLOCK)
        else:
            reader.read_into(target, number * BLOCK)
    reader.close()


def test_bytes_past_the_end_and_a_file_of_another_size_are_refused(tmp_path: Path) -> None:
    written(tmp_path / "file", b"0123456789")
    reader = BlockReader(tmp_path / "file", 10, None)
    for start in (-1, 8, 100):
        with pytest.raises(CorruptCheckpointError, match=f"has no bytes {start} to {start + 3}"):
            reader.read_into(memoryview(bytearray(3)), start)
    reader.close()
    with pytest.raises(CorruptCheckpointError, match="has 10 bytes, but 11 were written"):
        BlockReader(tmp_path / "file", 11, None)


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (tmp_path, tmp_path / "link", tmp_path / "missing"):
        with pytest.raises(CorruptCheckpointError, match=path.name):
            open_regular(path)
        with pytest.raises(CorruptCheckpointError, match=path.name):
            read_regular(path)


def test_tensors_are_written_in_c_order_with_what_comes_before_each(tmp_path: Path) -> None:
    writer = BlockWriter(tmp_path / "file")
    crossed = torch.arange(6, dtype=torch.int16).view(2, 3).t()
    writer.write_tensors([(b"a", torch.tensor([1, 2], dtype=torch.uint8)), (b"bc", crossed)])
    writer.close()
    expected = b"a\1\2bc" + b"".join(number.to_bytes(2, "little") for number in (0, 3, 1, 4, 2, 5))
    assert (tmp_path / "file").read_bytes() == expected
    assert writer.checksums == [checksum(expected)]


def test_without_collections_no_garbage_is_collected_until_the_end() -> None:
    assert gc.isenabled()
    with without_collections():
        assert not gc.isenabled()
        with without_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_errors_and_names_cannot_write_to_a_terminal() -> None:
    assert printable("é\x1b[31mc\nd") == "é?[31mc d"
    assert "\x1b" not in str(CheckpointError("the name \x1b[31m"))


def test_a_directory_is_made_with_those_above_it(tmp_path: Path) -> None:
    make_directory(tmp_path / "a" / "b")
    make_directory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
