"""The library needs torch and nothing else: what ranks tell one another gets there where numpy cannot be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_docs import readme_blocks

OBJECTS = """
import torch
import torch.distributed as dist
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy, fully_shard
from fullshard.comm.process_group import broadcast_object

torch.manual_seed(0)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.group.WORLD
alone = [dist.new_group([each]) for each in range(2)][rank]
model = FSDP(
    torch.nn.Linear(4, 3), process_group=(world, alone), sharding_strategy=ShardingStrategy.HYBRID_SHARD
)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
state = FSDP.optim_state_dict(model, optimizer)
averages = [each["exp_avg"] for each in state["state"].values()]
assert {average.shape for average in averages} == {(3, 4), (3,)} and all(average.all() for average in averages)
assert broadcast_object({"rank": rank}, None) == {"rank": 0}
try:
    fully_shard(torch.nn.Linear(4, 3 + rank))
except ValueError as error:
    assert "rank 0 has 'weight' of shape (3, 4)" in str(error) and "rank 1 has 'weight' of shape (4, 4)" in str(error)
else:
    raise AssertionError("ranks that differ were not told")
dist.barrier()
dist.destroy_process_group()
"""

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("program", [*readme_blocks(), OBJECTS], ids=["readme", "objects"])
def test_a_program_runs_where_numpy_cannot_be_imported(tmp_path: Path, program: str) -> None:
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\", name='numpy')")
    (tmp_path / "file.py").write_text(
        "import torch\ntry:\n    torch.ones(1).numpy()\nexcept RuntimeError:\n    pass\n"
        "else:\n    raise SystemExit('numpy is there')\n" + program
    )
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "file.py"]
    ended = subprocess.run(started, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
