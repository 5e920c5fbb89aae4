"""How processes find a job (:mod:`fullshard.elastic.entry`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fullshard.elastic import entry
from fullshard.elastic.entry import Entering, store_once
from fullshard.elastic.job import Job


@pytest.fixture
def founded(tmp_path: Path, launched: None) -> Job:
    return Job(1, 0, tmp_path)


def test_the_first_value_of_a_key_stays() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    assert store_once(store, "key", "a") == "a"
    assert store_once(store, "key", "b") == "a"


def test_a_second_process_finds_the_job_in_its_directory(founded: Job, tmp_path: Path) -> None:
    file = tmp_path / "0.json"
    assert file.stat().st_mode & 0o777 == 0o600  # it has the key
    assert set(json.loads(file.read_text())) == {"address", "key"}
    with pytest.raises(ValueError, match="replicas is 2, but the running job has 1"):
        Job(2, 0, tmp_path)
    founded._newcomer = 0.0
    second = Job(1, 0, tmp_path)
    assert (second.rank, second.shard, second.is_joining) == (2, 0, True)
    founded._connections.close()
    second._connections.close()


def test_a_new_process_comes_once_the_last_one_has_connected_or_ended(founded: Job, tmp_path: Path) -> None:
    found = Entering(1, 0, tmp_path)._find_job()
    assert found is not None
    assert founded._welcome() is None
    found[2].close()  # as one that is killed
    welcome = Entering(1, 0, tmp_path)._find_job()
    assert welcome is not None
    assert welcome[0].number == found[0].number + 1  # no number is used twice
    welcome[2].close()
    founded._connections.close()


def test_new_processes_that_come_at_once_get_different_shards(founded: Job) -> None:
    founded.shards = 2  # of which this process has the first
    shards = list[int]()
    for number in (1, 2, 3):
        founded._newcomer = 0.0
        welcome = founded._welcome()
        assert welcome is not None
        assert (welcome.number, welcome.sources) == (number, (0,))
        shards.append(welcome.shard)
        founded._connections.addresses[number] = ("127.0.0.1", 1)
        founded._end_welcome(welcome)
    assert shards == [1, 0, 1]
    founded._agreement.lost.add(1)
    founded._newcomer = 0.0
    welcome = founded._welcome()
    assert welcome is not None
    assert welcome.shard == 1
    founded._end_welcome(welcome)  # it has ended before it connected
    again = founded._welcome()
    assert again is not None
    assert (again.number, again.shard) == (5, 1)
    founded._connections.close()


def test_files_of_a_job_that_has_ended_are_no_job(founded: Job, tmp_path: Path) -> None:
    founded._connections.close()
    third = Job(1, 0, tmp_path)
    assert (third.rank, third.is_joining) == (0, False)
    third._connections.close()


def test_only_addresses_that_are_refused_are_taken_out_of_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that does not answer may live on the other side of a network that is cut."""
    for member, port in ((0, 1), (1, 2)):
        (tmp_path / f"{member}.json").write_text(json.dumps({"address": ["192.0.2.1", port], "key": "00"}))

    def ask(address: tuple[str, int], key: bytes, patience: float) -> Any:
        raise ConnectionRefusedError if address[1] == 1 else TimeoutError

    monkeypatch.setattr(entry, "ask", ask)
    assert Entering(1, 0, tmp_path)._find_job() is None
    assert [each.name for each in tmp_path.iterdir()] == ["1.json"]
