"""Sizes, times, shapes and tables as people read them."""

from __future__ import annotations

import argparse

import pytest
import torch

from fullshard.rehearsal.command import add_rehearse
from fullshard.text import (
    bytes_argument,
    bytes_of,
    bytes_text,
    counted,
    dtype_name,
    percent,
    rehearsal_text,
    seconds_text,
    shape_text,
    table,
    wrapped,
)


def test_a_size_has_a_unit_of_powers_of_1024() -> None:
    sizes = {0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536: "1.5 KiB", 2**20: "1.0 MiB", -(2**21): "-2.0 MiB"}
    sizes |= {2**30: "1.0 GiB", 2**40: "1.0 TiB", 2**55: "32768.0 TiB"}
    assert {nbytes: bytes_text(nbytes) for nbytes in sizes} == sizes


def test_a_time_has_three_digits() -> None:
    times = {0: "0 us", 1.5e-6: "1.5 us", 0.9994e-3: "999 us", 0.9996e-3: "1 ms", 0.0123: "12.3 ms", 0.9994: "999 ms"}
    times |= {0.9996: "1 s", 12.34: "12.3 s", 0.9995: "1 s", 999.4: "999 s", 999.5: "1,000 s", 999.6: "1,000 s"}
    times |= {123456: "123,456 s"}
    assert {seconds: seconds_text(seconds) for seconds in times} == times


def test_shapes_shares_and_counts() -> None:
    assert shape_text((3, 4, 5)) == "3 x 4 x 5"
    assert shape_text(()) == "scalar"
    assert dtype_name(torch.bfloat16) == "bfloat16"
    assert (percent(0.125), percent(0.125, 1), percent(1)) == ("12 %", "12.5 %", "100 %")
    assert (counted(1, "group"), counted(0, "group"), counted(1234, "group")) == ("1 group", "0 groups", "1,234 groups")


def test_lines_end_before_a_width_and_a_number_keeps_its_unit() -> None:
    for first in range(60, 120):
        lines = wrapped("x" * first + " and 1.5 GiB of 3 x 4 blocks, 12 % in 5 ms " + "y" * 20).splitlines()
        assert all(len(line) <= 110 or " " not in line for line in lines), first
        assert all(line.startswith("  ") for line in lines[1:]), first
        text = "\n".join(lines)
        assert all(whole in text for whole in ("1.5 GiB", "3 x 4", "12 %", "5 ms")), first


def test_a_line_has_110_characters_at_most() -> None:
    assert wrapped("x" * 50 + " " + "y" * 59) == "x" * 50 + " " + "y" * 59
    assert wrapped("x" * 50 + " " + "y" * 60, "    ") == "x" * 50 + "\n    " + "y" * 60


def test_the_first_column_is_aligned_left_and_the_others_right() -> None:
    assert table(["name", "n"], [["a", "1"], ["long name", "1,000"]]).splitlines() == [
        "name           n",
        "---------  -----",
        "a              1",
        "long name  1,000",
    ]
    assert table(["name", "n"], []).splitlines() == ["name    n", "------  ---"]


def test_sizes_have_decimal_or_binary_units() -> None:
    sizes = {"1": 1, "500MB": 500_000_000, "5G": 5 * 10**9, "1.5 kB": 1500, "2KiB": 2048, "1TiB": 2**40}
    sizes |= {"80 GiB": 80 * 2**30, "1.5tb": 1.5e12, "1e9": 10**9, "1E9": 10**9}
    assert {text: bytes_of(text) for text in sizes} == {text: bytes_argument(text) for text in sizes} == sizes
    assert bytes_of(10**9) == 10**9


def test_a_size_without_meaning_is_refused() -> None:
    numbers = ("", "0", "0.1", "٣GB", "0.0GB", "-1GB", "1.2.3GB", "inf", "nan")
    for text in (*numbers, "5 XB", "GB", "80 gigs", "5 bb"):
        with pytest.raises(ValueError, match="such as '80GB'"):
            bytes_of(text)
        with pytest.raises(argparse.ArgumentTypeError, match="units B, kB, MB, GB, TB, KiB"):
            bytes_argument(text)


def test_the_command_that_measures_a_step_is_one_that_is_understood() -> None:
    parser = argparse.ArgumentParser()
    add_rehearse(parser)
    text = rehearsal_text(1024, 3, "-m jobs.train", 45e9, 5e-6)
    found = vars(parser.parse_args(text.removeprefix("fullshard rehearse ").split()))
    given = {"ranks": 1024, "rank": 3, "bandwidth": 45_000_000_000, "program": "jobs.train", "is_module": True}
    assert found.items() >= given.items()
    assert found["latency"] == pytest.approx(5e-6)
    assert rehearsal_text(8) == "fullshard rehearse --ranks 8 --bandwidth RATE PROGRAM.py"
