"""How the first processes find each other without a launcher (:mod:`fullshard.elastic.founding`)."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fullshard.elastic.founding import founders, key_of, take_number
from fullshard.elastic.job import Job


def test_each_number_is_taken_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        numbers = [*pool.map(lambda mine: take_number(tmp_path, 6, mine, lambda _: True), range(8))]
    assert sorted(number for number in numbers if number is not None) == [*range(6)]
    said = founders(tmp_path, 6)
    assert said is not None
    assert all(said[number] == mine for mine, number in enumerate(numbers) if number is not None)
    assert not [*tmp_path.glob(".*")]


def test_a_number_whose_process_has_ended_is_free(tmp_path: Path) -> None:
    assert [take_number(tmp_path, 2, mine, lambda _: True) for mine in "abab"] == [0, 1, 0, 1]
    assert take_number(tmp_path, 2, "c", lambda said: said != "a") == 0
    assert founders(tmp_path, 2) == ["c", "b"]
    assert founders(tmp_path, 3) is None


def test_the_key_is_made_once_and_only_for_this_user(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        (key,) = {*pool.map(lambda _: key_of(tmp_path / "new"), range(8))}
    assert len(key) == 16
    assert (tmp_path / "new" / "key").stat().st_mode & 0o777 == 0o600


def test_processes_found_a_job_and_one_too_many_joins_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(Job, 2, 7, tmp_path, 2) for _ in range(2)]
        made = [job.result(60) for job in jobs]
        third = pool.submit(Job, 2, 0, tmp_path, 2).result(60)
    assert sorted(job.rank for job in made) == [0, 1]
    assert (third.rank, third.seed, third.is_joining) == (2, 7, True)
    assert {json.loads(file.read_text())["key"] for file in tmp_path.glob("[0-9].json")} == {key_of(tmp_path).hex()}
    for job in [*made, third]:
        job._connections.close()
    with ThreadPoolExecutor(2) as pool:  # the files are left, and nobody answers
        again = [*pool.map(lambda _: Job(2, 0, tmp_path, 2), range(2))]
    assert sorted(job.rank for job in again) == [0, 1]
    for job in again:
        job._connections.close()


def test_a_directory_is_needed() -> None:
    with pytest.raises(ValueError, match="processes is given without a directory"):
        Job(1, 0, None, 1)
