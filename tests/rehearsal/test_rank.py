"""The rehearsing process: what it makes of a trace of a device's streams."""

from __future__ import annotations

import pytest

from fullshard.rehearsal.rank import streams_of


def kernel(stream: int, begin: float, length: float, name: str) -> dict[str, object]:
    return {"cat": "kernel", "ts": begin, "dur": length, "name": name, "args": {"stream": stream}}


def test_gaps_of_a_stream_are_waits_and_name_the_kernel_after_them() -> None:
    computing = [
        kernel(7, 0, 100, "gemm"),
        kernel(7, 90, 60, "copy"),
        kernel(7, 155, 45, "gemm"),
        kernel(7, 900, 100, "adam"),
    ]
    network = [kernel(9, 10, 500, "spin_kernel"), kernel(9, 510, 20, "copy")]
    first, second = streams_of([*network, *computing, {"cat": "cpu_op", "ts": 0, "dur": 1, "name": "aten::mm"}])
    assert (first["stream"], first["kernels"]) == (7, 4)
    assert first["busy, seconds"] == pytest.approx(295e-6)
    assert first["longest waits"] == [{"seconds": pytest.approx(700e-6), "before": "adam"}]
    assert second["network, seconds"] == pytest.approx(500e-6)
