"""The benchmarks run, at sizes of no meaning, and their results have what the report reads."""

from __future__ import annotations

import math
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks import machine, page, ranks, recording, run, summary
from benchmarks.checkpoint import measure_checkpoint
from benchmarks.checks import measure_checks
from benchmarks.contenders import ALONE, DDP, FSDP2, Contender
from benchmarks.exchanges import measure_exchanges
from benchmarks.figures import ratio, spread
from benchmarks.goals import GOALS, Goal, excess, judge
from benchmarks.group import measure_group
from benchmarks.host import measure_host
from benchmarks.initialisation import measure_initialisation
from benchmarks.launches import LARGE_TRANSFORMER, measure_launches
from benchmarks.memory import measure_contender, measure_padding
from benchmarks.models import TINY, Work
from benchmarks.optimizer import measure_optimizer
from benchmarks.ranks import run_ranks
from benchmarks.report import parts, read, save
from benchmarks.saves import measure_saves
from benchmarks.steps import measure_steps
from benchmarks.timeline import bars, draw, record

PAGES = Path(__file__).parent.parent / "docs/explanation"
SHARDED = {"fullshard", "torch FSDP2", "torch FSDP1"}
#: Large enough for the kernel's count of memory, 12 MiB a group, and small enough to take seconds.
MODEST = Work("modest", blocks=3, width=512, sequence=4, vocabulary=64)
SOCKETS = Contender("fullshard, p2p", "fullshard", "p2p", forced=True)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def steps() -> dict[str, Any]:
    return measure_steps(TINY, 2, rounds=2, keep=True)


@pytest.fixture(scope="module")
def host() -> list[dict[str, Any]]:
    return [measure_host(2, [4, 8, 32], groups=2, rounds=2)]


@pytest.fixture(scope="module")
def group() -> dict[str, Any]:
    return measure_group(2, TINY.width, rounds=1)


def test_all_contenders_take_the_same_steps(steps: dict[str, Any]) -> None:
    losses = {name: found["loss"] for name, found in steps["contenders"].items()}
    alone = losses.pop("no communication")
    assert losses.keys() > SHARDED
    assert all(math.isclose(loss, losses["DDP"], rel_tol=1e-6) for loss in losses.values())
    assert not math.isclose(alone, losses["DDP"], rel_tol=1e-6)


def test_bytes_on_the_wire_are_counted(steps: dict[str, Any]) -> None:
    contenders = steps["contenders"]
    assert contenders["DDP"]["asked"] == pytest.approx(1.0, rel=0.01)  # 2 (W - 1) / W of all parameters
    assert contenders["no communication"]["asked"] == contenders["no communication"]["copied"] == 0
    assert all(found["unknown"] == [] for found in contenders.values())
    for name in SHARDED | {"fullshard, p2p", "fullshard, collective"}:
        if contenders[name]["transport"] == "shm":
            assert contenders[name]["asked"] == 0, "shared memory carries everything else"
        else:
            assert 0.99 < contenders[name]["asked"] <= 1.51


def test_host_costs_are_those_of_the_library(host: list[dict[str, Any]]) -> None:
    counts = host[0]["counts"]
    for name in SHARDED:
        assert counts[8][name]["calls"] < counts[32][name]["calls"]
        assert len(counts[8][name]["seconds"]) == 3
        assert counts[8]["torch's calls alone"]["calls"] < counts[8][name]["calls"]


def test_what_a_device_is_asked_for_is_counted() -> None:
    """FSDP2 gathers twice and reduces once, each with a copy before it, and after a gather; see there."""
    counts = measure_launches(4, [4, LARGE_TRANSFORMER], groups=2)["counts"]
    for cost in (each["torch FSDP2"] for each in counts.values()):
        assert (cost["collectives"], cost["launches"], cost["allocated"]) == (3, 5, 5)
        assert cost["sent"] == 3 * 3 / 4
        assert cost["copied"] == 2 * (2 * (1 + 1 / 4) + 1)
    assert counts[4]["fullshard"]["kernels"] == counts[4]["fullshard"]["launches"]
    assert counts[LARGE_TRANSFORMER]["fullshard"]["kernels"] > counts[4]["fullshard"]["kernels"]


@pytest.fixture(scope="module")
def memory() -> dict[str, Any]:
    found = {each.name: measure_contender(each, MODEST, 2) for each in (SOCKETS, FSDP2, DDP, ALONE)}
    found["fullshard, p2p, no prefetch"] = measure_contender(SOCKETS, MODEST, 2, prefetch=0)
    return {
        "ranks": 2,
        "model_bytes": MODEST.model_bytes,
        "group_bytes": MODEST.block_bytes,
        "contenders": {**found, "fullshard": found[SOCKETS.name]},
    }


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is the kernel's count, on Linux")
def test_memory_is_told_apart_by_phase(memory: dict[str, Any]) -> None:
    contenders, near = memory["contenders"], 0.3  # of a group
    assert contenders["torch FSDP2"]["state"] == MODEST.model_bytes // 2
    assert contenders["DDP"]["state"] == MODEST.model_bytes
    assert excess(memory, "torch FSDP2", "rest") == pytest.approx(0, abs=near)
    assert excess(memory, "torch FSDP2", "forward") > 1
    assert excess(memory, "DDP", "rest") == pytest.approx(
        MODEST.model_bytes / MODEST.block_bytes, abs=near
    )  # its buckets
    assert excess(memory, "fullshard, p2p", "freed") == pytest.approx(0, abs=near)
    assert excess(memory, "fullshard, p2p", "forward") == pytest.approx(2, abs=near)
    assert excess(memory, "fullshard, p2p, no prefetch", "forward") == pytest.approx(1, abs=near)
    for name in ("fullshard, p2p", "fullshard, p2p, no prefetch"):
        assert excess(memory, name, "backward") > excess(memory, name, "forward")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is the kernel's count, on Linux")
@pytest.mark.parametrize("phase", ["forward", "backward", "rest"])
def test_the_memory_of_a_step_is_what_was_predicted(memory: dict[str, Any], phase: str) -> None:
    for name, found in memory["contenders"].items():
        if not math.isnan(found[f"predicted_{phase}"]) and found["transport"] != "collective":
            above = (found[phase] - found["freed"] - found[f"predicted_{phase}"]) / memory["group_bytes"]
            assert above == pytest.approx(0, abs=0.3), f"{name}: {above:.2f} groups more than was predicted"


def test_figures_cost_less_than_a_hundredth_of_a_step() -> None:
    """Measured in the functions that look on, over processor time: what other programs take is in neither."""
    found = run_ranks(recording.cost, 2, recording.LOOKED_AT)[0]
    plain, figures = found["nothing"], found["log_metrics"]
    assert 0 < figures.seconds < 0.01 * plain.step
    assert 0 < figures.calls - plain.calls <= 37 * (recording.LOOKED_AT.blocks + 1)


def test_padding_is_that_of_the_layout() -> None:
    padding = measure_padding([8])
    sizes = padding["world_sizes"][8]
    assert sizes["torch FSDP2"] == pytest.approx(8 / 3)
    assert sizes["torch FSDP1"] == pytest.approx(1.0)
    assert sizes["fullshard"] >= 1
    for found in padding["flat"]:
        assert 0 <= found["alignments"][4] <= found["alignments"][16] < 0.01


@pytest.fixture(scope="module")
def initialisation() -> dict[str, Any]:
    return measure_initialisation(MODEST, 2, rounds=1)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is the kernel's count, on Linux")
def test_sharding_is_measured_from_the_cpu_and_from_meta(initialisation: dict[str, Any]) -> None:
    contenders, unit = initialisation["contenders"], MODEST.block_bytes
    for name in SHARDED:
        assert contenders[name]["cpu seconds"][0] > 0
        assert contenders[name]["meta bytes"][0] >= 0.9 * MODEST.model_bytes / 2  # the kernel counts pages in batches
    assert contenders["torch FSDP2"]["cpu bytes"][0] / unit == pytest.approx(0.5, abs=0.3)  # a shard of a group
    assert contenders["DDP"]["cpu bytes"][0] == pytest.approx(MODEST.model_bytes, rel=0.3)  # its buckets of gradients
    assert math.isnan(contenders["DDP"]["meta seconds"][0])


@pytest.fixture(scope="module")
def checkpoint() -> dict[str, Any]:
    return measure_checkpoint(TINY, 2, rounds=1)


def test_a_checkpoint_has_the_model_and_the_optimizer_once(checkpoint: dict[str, Any]) -> None:
    contenders = checkpoint["contenders"]
    assert contenders.keys() == SHARDED | {"DDP", "DDP, torch.save on rank 0"}
    for found in contenders.values():
        assert found["file bytes"][0] == pytest.approx(3 * TINY.model_bytes, rel=0.2)  # values and two moments
        assert found["save seconds"][0] > 0
        assert found["load seconds"][0] > 0


@pytest.fixture(scope="module")
def results(
    steps: dict[str, Any],
    host: list[dict[str, Any]],
    group: dict[str, Any],
    memory: dict[str, Any],
    initialisation: dict[str, Any],
    checkpoint: dict[str, Any],
) -> dict[str, Any]:
    """Of all benchmarks: the report reads each figure, and fails where one is missing."""
    return {
        "machine": machine.facts(),
        "quick": False,
        "communication W=2": steps,
        "group": group,
        "exchanges": measure_exchanges([2**14, 2**16], [2], rounds=2),
        "host": host,
        "memory": memory,
        "initialisation": initialisation,
        "checkpoint": checkpoint,
        "optimizer": measure_optimizer(count=4, width=8, rounds=2),
        "saves": measure_saves({"small": (4, 32)}, 2, rounds=1),
        "checks": measure_checks(TINY, 2, rounds=2, watched=0.5),
        "watch": {"load_before": 0.0, "others": 0.5, "seconds": 1.0},
    }


def test_a_report_is_saved(results: dict[str, Any], tmp_path: Path) -> None:
    text = save(results, tmp_path)
    assert text == (tmp_path / "results.md").read_text()
    assert all(goal.what in text for goal in GOALS if goal.benchmark in results)
    assert "The machine was busy" in text
    assert parts(read(tmp_path / "results.json")) == parts(results)
    assert (tmp_path / "results.png").stat().st_size > 0


def test_a_report_tells_of_bytes_that_disagree(results: dict[str, Any]) -> None:
    steps = results["communication W=2"]
    ours = {**steps["contenders"]["fullshard"], "asked": 1.0, "wire": [1.05]}
    for wire, told in (([1.05], False), ([2.0, 1.05], False), ([1.2], True), ([0.8], True)):
        apart = {**steps, "contenders": {**steps["contenders"], "fullshard": {**ours, "wire": wire}}}
        assert ("`fullshard` (1.00" in parts({**results, "communication W=2": apart})["moves"]) is told


def test_tables_go_between_the_marks_of_a_page(results: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text(
        "before\n<!-- begin group -->\nold\n<!-- end group -->\nafter\n<!-- begin host -->\n<!-- end host -->\n"
    )
    assert page.update([file], {"group": "| new |\n", "memory": "| nowhere |"}) == ["memory"]
    assert file.read_text() == (
        "before\n<!-- begin group -->\n\n| new |\n\n<!-- end group -->\nafter\n<!-- begin host -->\n<!-- end host -->\n"
    )
    (tmp_path / "bare.md").write_text("no marks\n")
    with pytest.raises(ValueError, match="no part to replace"):
        page.update([tmp_path / "bare.md"], {"group": ""})


def test_the_pages_have_a_place_for_every_part(results: dict[str, Any], tmp_path: Path) -> None:
    copies = [Path(shutil.copy(PAGES / name, tmp_path)) for name in ("performance.md", "measurements.md")]
    assert page.update(copies, {**parts(results), "padding": ""}) == []


def test_what_decides_is_in_the_results_of_a_whole_run(tmp_path: Path) -> None:
    found, copy = (
        summary.parts(read(PAGES / "measurements.json")),
        Path(shutil.copy(PAGES / "performance.md", tmp_path)),
    )
    before = copy.read_text()
    assert page.update([copy], found) == []
    assert copy.read_text() == before


def test_a_goal_is_judged_only_if_it_was_measured(group: dict[str, Any]) -> None:
    assert {goal.benchmark for goal, _ in judge({"group": group})} == {"group"}


def test_a_goal_is_met_up_to_what_can_be_measured() -> None:
    goal = Goal("memory", "memory", 1.0, "U", lambda found: (0.0, 0.0, 0.0), resolution=0.05)
    assert goal.is_met((1.05, 1.0, 2.0))
    assert not goal.is_met((1.06, 1.0, 1.0))


def _compute(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_ranks_are_not_other_programs() -> None:
    before = ranks.cpu_seconds()
    ranks.run_ranks(_compute, 2, 0.2)
    assert 0.4 <= ranks.cpu_seconds() - before < 5


def test_ratios_are_taken_within_a_round() -> None:
    contenders = {"slow": {"wall": [2.0, 4.0, 6.0]}, "fast": {"wall": [1.0, 2.0, 2.0]}}
    assert ratio(contenders, "wall", "slow", "fast") == (2.0, 2.0, 3.0)
    assert spread([3.0, 1.0, 2.0, 4.0]) == (2.5, 2.0, 3.0)


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["memroy"])
    assert "no benchmark is named memroy: choose from communication, compute" in capsys.readouterr().err


def test_the_page_is_of_one_whole_run(
    results: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "explanation").mkdir()
    pages = [tmp_path / "explanation" / name for name in ("performance.md", "measurements.md")]
    for each in pages:
        each.write_text("<!-- begin group -->\nold\n<!-- end group -->\n")
    with pytest.raises(SystemExit):
        run.main(["group", "--docs", str(tmp_path)])
    assert "tables of one whole run" in capsys.readouterr().err
    save(results, tmp_path / "results")
    run.main(["--read", str(tmp_path / "results" / "results.json"), "--output", str(tmp_path), "--docs", str(tmp_path)])
    written = parts(read(pages[1].with_suffix(".json")))["group"]
    assert all(written.strip() in each.read_text() for each in pages)


def test_a_step_is_recorded_and_drawn(tmp_path: Path) -> None:
    step, sizes = ranks.run_ranks(record, 2, TINY, 1)[0]
    assert sum(sizes.values()) == TINY.model_bytes
    found = bars(step)
    assert {(bar.group, bar.state) for bar in found} == {
        (group, state) for group in sizes for state in ("gathered", "whole", "reduced")
    }
    assert all(0 <= bar.begin <= bar.end <= step.ends[-1] for bar in found)
    draw(step, sizes, tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 10_000
