"""A small transformer with Lightning: trains, saves, goes on, resumes and exports, under Fabric or the Trainer."""

import os

import lightning as L
import torch
import torch.nn.functional as F
from lightning.fabric.strategies import FSDPStrategy as FabricFSDP
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from tests.frameworks.library import library_of


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
        self.blocks = nn.ModuleList([Block(16) for _ in range(2)])
        self.head = nn.Linear(16, 31)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def batch(step):
    """This rank's part of what all ranks see in a step."""
    ids = torch.randint(0, 31, (4, 9), generator=torch.Generator().manual_seed(step))
    return ids.chunk(int(os.environ["WORLD_SIZE"]))[int(os.environ["RANK"])]


class Trained(L.LightningModule):
    """The model as the Trainer has it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = Model()
        self.kind, self.losses = kind, []

    def forward(self, ids):
        return self.model(ids)

    def configure_model(self):
        if self.kind == "trainer2" and not hasattr(self.model, "unshard"):  # the Trainer may ask twice
            shard(self.model, self.device_mesh)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.trainer.model.parameters(), lr=1e-2)

    def training_step(self, _):
        loss = self.model(batch(self.global_step))
        self.losses.append(self.trainer.strategy.reduce(loss.detach(), reduce_op="mean").item())
        return loss


def shard(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def strategy_of(kind, options):
    if kind.endswith("2"):
        sizes = {"data_parallel_size": int(os.environ["WORLD_SIZE"]), "tensor_parallel_size": 1}
        saved = {"save_distributed_checkpoint": "full" not in options}
        return (
            FabricModelParallel(shard, **sizes, **saved)
            if kind == "fabric2"
            else ModelParallelStrategy(**sizes, **saved)
        )
    return (FabricFSDP if kind == "fabric" else FSDPStrategy)(
        auto_wrap_policy={Block},
        state_dict_type="full" if "full" in options else "sharded",
        use_orig_params="flat" not in options,
    )


def exported(model, plain):
    """The loss of the sharded model, and of a plain one that loads its whole state dict."""
    ids = torch.arange(9)[None]
    with torch.no_grad():
        sharded = model(ids).item()
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if os.environ["RANK"] != "0":
        return None
    plain.load_state_dict(whole)
    return [sharded, plain.double()(ids).item()]


def run_case(folder, options):
    kind, *options = options
    checkpoint = str(folder / ("checkpoint.ckpt" if "full" in options else "checkpoint"))
    arguments = {"accelerator": "cpu", "devices": int(os.environ["WORLD_SIZE"])}
    run = with_fabric if kind.startswith("fabric") else with_trainer
    return run(kind, options, checkpoint, arguments)


def with_fabric(kind, options, checkpoint, arguments):
    fabric = L.Fabric(strategy=strategy_of(kind, options), **arguments)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    model = fabric.setup_module(Model())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    state = {"model": model, "optimizer": optimizer, "steps": 0}

    def train(steps):
        losses = []
        for step in steps:
            loss = model(batch(step))
            fabric.backward(loss)
            losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            state["steps"] += 1
        return losses

    found = {"sharded by": library_of(model._forward_module)}
    if "resume" not in options:
        found["losses"] = train(range(3))
        if "train-only" not in options:
            fabric.save(checkpoint, state)
        found["uninterrupted"] = train(range(3, 5))
    if "train-only" not in options:
        state["steps"] = -1
        fabric.load(checkpoint, state)
        assert state["steps"] == 3
        found["resumed"] = train(range(3, 5))
        found["exported"] = exported(model._forward_module, Model())
    return found


def with_trainer(kind, options, checkpoint, arguments):
    def fit(steps, resume=False):
        trainer = L.Trainer(
            strategy=strategy_of(kind, options),
            max_steps=steps,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            logger=False,
            **arguments,
        )
        L.seed_everything(0, verbose=False)
        model = Trained(kind)
        data = torch.utils.data.DataLoader(range(8 * arguments["devices"]))
        trainer.fit(model, data, ckpt_path=checkpoint if resume else None)
        return trainer, model

    found = {}
    if "resume" not in options:
        trainer, model = fit(3)
        found["losses"] = model.losses
        if "train-only" not in options:
            trainer.save_checkpoint(checkpoint)
            trainer, model = fit(5)
            found["uninterrupted"] = model.losses[3:]
    if "train-only" not in options:
        trainer, model = fit(5, resume=True)
        found["resumed"] = model.losses
        found["exported"] = exported(trainer.strategy.model, Trained("plain"))
    found["sharded by"] = library_of(model.model if kind == "trainer2" else trainer.strategy.model)
    return found
