"""Stages of a pipeline, each sharded over the ranks that have it, with torch's schedules."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import pipelining
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage

from tests.frameworks.library import library_of


def part_of(index, mesh):
    torch.manual_seed(index)
    part = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)])
    for block in part:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    return fully_shard(part, mesh=mesh, reshard_after_forward=False)


def run_case(folder, options):
    schedule, *options = options
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    place, group, groups = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank(), mesh["dp"].size()
    chosen = getattr(pipelining, schedule)
    several = issubclass(chosen, pipelining.schedules.PipelineScheduleMulti)
    count = 4 if several else 2
    parts = {index: part_of(index, mesh["dp"]) for index in range(place, count, 2)}
    stages = [
        PipelineStage(part, index, count, torch.device("cpu"), group=mesh["pp"].get_group())
        for index, part in parts.items()
    ]
    running = chosen(stages if several else stages[0], n_microbatches=4, loss_fn=nn.functional.mse_loss)
    model = nn.ModuleDict({f"stage{index}": part for index, part in parts.items()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    where = {"checkpoint_id": folder / f"checkpoint-{place}", "process_group": mesh["dp"].get_group()}

    def train(steps):
        losses = []
        for step in steps:
            torch.manual_seed(step)
            x, target = (torch.randn(16, 16).chunk(groups)[group] for _ in range(2))
            last = stages[-1].is_last
            here = []
            given = (x,) if stages[0].is_first else ()
            running.step(*given, target=target if last else None, losses=here if last else None)
            optimizer.step()
            optimizer.zero_grad()
            loss = torch.stack(here).mean().detach() if last else torch.zeros(())
            dist.all_reduce(loss)
            losses.append(loss.item() / groups)
        return losses

    def states():
        of_model, of_optimizer = dsd.get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer}

    found = {"sharded by": library_of(stages[0].submod)}
    if "resume" not in options:
        found["losses"] = train(range(3))
        if "train-only" not in options:
            dcp.save(states(), **where)
        found["uninterrupted"] = train(range(3, 5))
    if "train-only" not in options:
        loaded = states()
        dcp.load(loaded, **where)
        dsd.set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        found["resumed"] = train(range(3, 5))
    dist.destroy_process_group()
    return found
