"""A small transformer with torch alone: either FSDP, torch's state dicts, and what of torch works beside them."""

import json
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.frameworks.lift import library_of, torchs_wrapper_on_cpu

folder, version, *options = sys.argv[1:]
torchs_wrapper_on_cpu()
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 16)
        self.blocks = nn.ModuleList([Block(16) for _ in range(3)])
        self.head = nn.Linear(16, 31)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


torch.manual_seed(0)
model = Model()
mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
if "hybrid" in options:
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
if "recompute" in options and version == "2":
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
if "compile" in options:
    for block in model.blocks:
        block.compile(backend="aot_eager")
if version == "1":
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params="flat" not in options,
        device_id=torch.device("cpu"),
    )
    if "recompute" in options:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
else:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
group = mesh["shard"].get_local_rank() if "hybrid" in options else mesh.get_local_rank()


def train(steps):
    losses = []
    for step in steps:
        torch.manual_seed(100 * step + group)
        ids = torch.randint(0, 31, (4, 9))
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        if version == "1":
            norm = model.clip_grad_norm_(1.0)
        else:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        losses += [loss.item() / ranks, f"{norm.item():.4g}"]  # which sums in another order where parameters are flat
    return losses


choice = dsd.StateDictOptions(full_state_dict="full" in options, cpu_offload="full" in options)
path = os.path.join(folder, "checkpoint")


def save():
    states, optimizer_states = dsd.get_state_dict(model, optimizer, options=choice)
    if "full" not in options:
        dcp.save({"model": states, "optimizer": optimizer_states}, checkpoint_id=path)
    elif rank == 0:
        torch.save({"model": states, "optimizer": optimizer_states}, path)
    dist.barrier()


def load():
    if "full" in options:
        states = torch.load(path, weights_only=False)
    else:
        mine, mine_of_optimizer = dsd.get_state_dict(model, optimizer, options=choice)
        states = {"model": mine, "optimizer": mine_of_optimizer}
        dcp.load(states, checkpoint_id=path)
    dsd.set_state_dict(
        model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"], options=choice
    )


found = {}
if "resume" not in options:
    found["losses"] = train(range(4))
    if "train-only" not in options:
        save()
    found["uninterrupted"] = train(range(4, 6))
if "train-only" not in options:
    load()
    found["resumed"] = train(range(4, 6))
    exported = dsd.get_model_state_dict(model, options=dsd.StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        plain = Model()
        plain.load_state_dict(exported)
        found["exported"] = plain.double()(torch.arange(9)[None]).square().sum().item()
found["sharded by"] = library_of(model)
if rank == 0:
    with open(os.path.join(folder, "result.json"), "w") as file:
        json.dump(found, file)
dist.destroy_process_group()
