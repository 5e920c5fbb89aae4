"""Stages of a pipeline, each sharded over the ranks that have it, with torch's schedules."""

import json
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import pipelining
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage

from tests.frameworks.lift import library_of

folder, schedule, *options = sys.argv[1:]
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
place, group = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
chosen = getattr(pipelining, schedule)
several = issubclass(chosen, pipelining.schedules.PipelineScheduleMulti)
count = 4 if several else 2
parts = []
for index in range(place, count, 2):
    torch.manual_seed(index)
    part = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)])
    for block in part:
        fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
    fully_shard(part, mesh=mesh["dp"], reshard_after_forward=False)
    parts.append(nn.ModuleDict({f"stage{index}": part}))
stages = [
    PipelineStage(next(iter(part.values())), index, count, torch.device("cpu"), group=mesh["pp"].get_group())
    for index, part in zip(range(place, count, 2), parts, strict=True)
]
running = chosen(stages if several else stages[0], n_microbatches=4, loss_fn=nn.functional.mse_loss)
model = nn.ModuleList(parts)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(steps):
    losses = []
    for step in steps:
        torch.manual_seed(100 * step + group)
        x, target = torch.randn(8, 16), torch.randn(8, 16)
        last = stages[-1].is_last
        here: list[torch.Tensor] = []
        given = (x,) if stages[0].is_first else ()
        running.step(*given, target=target if last else None, losses=here if last else None)
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(here).mean().detach() if last else torch.zeros(())
        dist.all_reduce(loss)
        losses.append(loss.item())
    return losses


path = os.path.join(folder, f"checkpoint-{place}")
found = {"losses": train(range(3))}
if "train-only" not in options:
    states, of_optimizer = dsd.get_state_dict(model, optimizer)
    dcp.save({"model": states, "optimizer": of_optimizer}, checkpoint_id=path, process_group=mesh["dp"].get_group())
found["uninterrupted"] = train(range(3, 5))
if "train-only" not in options:
    states, of_optimizer = dsd.get_state_dict(model, optimizer)
    loaded = {"model": states, "optimizer": of_optimizer}
    dcp.load(loaded, checkpoint_id=path, process_group=mesh["dp"].get_group())
    dsd.set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    found["resumed"] = train(range(3, 5))
found["sharded by"] = library_of(stages[0].submod)
if dist.get_rank() == 0:
    with open(os.path.join(folder, "result.json"), "w") as file:
        json.dump(found, file)
dist.destroy_process_group()
