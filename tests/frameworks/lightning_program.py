"""A small transformer with Lightning: trains, saves, goes on and resumes, under Fabric or the Trainer."""

import json
import os
import sys

import lightning as L
import torch
import torch.nn.functional as F
from lightning.fabric.strategies import FSDPStrategy as FabricFSDP
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.frameworks.lift import library_of, lightning_strategy, torchs_wrapper_on_cpu

folder, kind, *options = sys.argv[1:]
torchs_wrapper_on_cpu()
ranks = int(os.environ["WORLD_SIZE"])
rank = int(os.environ["RANK"])


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 16)
        self.blocks = nn.ModuleList([Block(16) for _ in range(3)])
        self.head = nn.Linear(16, 31)
        self.losses = []

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, step):
        torch.manual_seed(100 * step + rank)
        ids = torch.randint(0, 31, (4, 9))
        return F.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    # what the Trainer calls
    def configure_model(self):
        if kind.endswith("2"):
            shard(self, self.device_mesh)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.trainer.model.parameters(), lr=1e-2)

    def training_step(self, batch):
        loss = self.loss(self.global_step)
        self.losses.append(self.trainer.strategy.reduce(loss.detach(), reduce_op="mean").item())
        return loss


def shard(model, mesh):
    if not hasattr(model, "unshard"):  # the Trainer may ask twice
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data_parallel"])
        fully_shard(model, mesh=mesh["data_parallel"])
    return model


def wrapped(base):
    return lightning_strategy(base)(
        auto_wrap_policy={Block},
        state_dict_type="sharded" if "sharded" in options else "full",
        use_orig_params="flat" not in options,
    )


parallel = {
    "data_parallel_size": ranks,
    "tensor_parallel_size": 1,
    "save_distributed_checkpoint": "full" not in options,
}
checkpoint = os.path.join(folder, "checkpoint" if "full" not in options else "checkpoint.ckpt")
arguments = {"accelerator": "cpu", "devices": ranks}
found = {}


def with_fabric():
    strategy = FabricModelParallel(shard, **parallel) if kind.endswith("2") else wrapped(FabricFSDP)
    fabric = L.Fabric(strategy=strategy, **arguments)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    model = fabric.setup_module(Model())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    state = {"model": model, "optimizer": optimizer, "steps": 0}

    def train(steps):
        losses = []
        for step in steps:
            loss = loss_of(model, step)
            fabric.backward(loss)
            losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            state["steps"] += 1
        return losses

    def loss_of(model, step):
        torch.manual_seed(100 * step + rank)
        ids = torch.randint(0, 31, (4, 9))
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    found["losses"] = train(range(4))
    if "train-only" not in options:
        fabric.save(checkpoint, state)
    found["uninterrupted"] = train(range(4, 8))
    if "train-only" not in options:
        state["steps"] = -1
        fabric.load(checkpoint, state)
        found["steps"] = state["steps"]
        found["resumed"] = train(range(4, 8))
    found["sharded by"] = library_of(model._forward_module)
    return model


def with_trainer():
    def fit(steps, resume=False):
        strategy = ModelParallelStrategy(**parallel) if kind.endswith("2") else wrapped(FSDPStrategy)
        trainer = L.Trainer(
            strategy=strategy,
            max_steps=steps,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            logger=False,
            default_root_dir=folder,
            **arguments,
        )
        L.seed_everything(0, verbose=False)
        model = Model()
        trainer.fit(model, torch.utils.data.DataLoader(range(8 * ranks)), ckpt_path=checkpoint if resume else None)
        return trainer, model

    trainer, model = fit(4)
    found["losses"] = list(model.losses)
    if "train-only" not in options:
        trainer.save_checkpoint(checkpoint)
    trainer, model = fit(6)
    found["uninterrupted"] = model.losses[4:]
    if "train-only" not in options:
        trainer, model = fit(6, resume=True)
        found["resumed"] = list(model.losses)
    found["sharded by"] = library_of(trainer.strategy.model)
    return trainer.strategy.model


model = with_fabric() if kind.startswith("fabric") else with_trainer()
if rank == 0:
    with open(os.path.join(folder, "result.json"), "w") as file:
        json.dump(found, file)
