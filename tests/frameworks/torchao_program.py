"""Layers that torchao prepares, in float8, int8 or 4 bits, and its optimizers of 8 and 4 bits, with fully_shard."""

import json
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.fsdp import fully_shard

from tests.frameworks.lift import library_of

folder, kind, *options = sys.argv[1:]
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
WIDTH = 128
ADAPTED = ("0", "1", "2")


class LowRank(nn.Module):
    """A frozen layer, and a trained one of low rank beside it."""

    def __init__(self, frozen: nn.Module) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


class Frozen4Bits(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        super().__init__()
        self.weight = nn.Parameter(to_nf4(linear.weight.detach(), 64, 2), requires_grad=False)

    def forward(self, x):
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

        return linear_nf4(x, self.weight)


def prepare(model):
    from torchao import quantize_
    from torchao.prototype import quantized_training as training

    def chosen(_, name):
        return name in ADAPTED

    if kind.startswith("float8"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        convert_to_float8_training(model, config=config, module_filter_fn=chosen)
    elif kind == "int8":
        config = training.Int8MixedPrecisionTrainingConfig()
        quantize_(model, config, filter_fn=chosen)
        torch.serialization.add_safe_globals([type(config), type(model[0].weight.data)])  # to load what it saved
    elif kind == "frozen-4":
        for at in range(3):
            model[at] = LowRank(Frozen4Bits(model[at]))
    elif kind == "frozen-8":
        quantize_(model, training.int8_weight_only_quantized_training(), filter_fn=chosen)
        for at in range(3):
            model[at] = LowRank(model[at])
    return model


def build():
    torch.manual_seed(0)
    return prepare(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)], nn.Linear(WIDTH, 8)))


model = build()
for layer in model:
    fully_shard(layer, reshard_after_forward=True)
fully_shard(model, reshard_after_forward=True)
trained = [param for param in model.parameters() if param.requires_grad]
if kind.startswith("Adam"):
    from torchao import optim

    torch.compiler.set_stance("force_eager")  # the steps are compiled: that takes longer than the test may
    optimizer = getattr(optim, kind)(trained, lr=1e-2)
else:
    optimizer = torch.optim.AdamW(trained, lr=1e-2)


def compute_scales():
    """For float8 in one call for all weights, whenever they have changed."""
    if kind == "float8-ahead":
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(model)


def train(steps):
    losses = []
    for step in steps:
        torch.manual_seed(100 * step + rank)
        loss = (model(torch.randn(32, WIDTH)) - 1).square().mean()
        loss.backward()
        torch.manual_seed(step)  # some round at random
        optimizer.step()
        optimizer.zero_grad()
        compute_scales()
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        losses.append(loss.item() / ranks)
    return losses


#: torch's checkpoints have no packed weights: those that are frozen are made anew.
choice = dsd.StateDictOptions(ignore_frozen_params=kind.startswith("frozen"), strict=not kind.startswith("frozen"))
path = os.path.join(folder, "checkpoint")


def states():
    found, of_optimizer = dsd.get_state_dict(model, optimizer, options=choice)
    return {"model": found, "optimizer": of_optimizer}


found = {}
found["losses"] = train(range(4))
if "train-only" not in options:
    dcp.save(states(), checkpoint_id=path)
found["uninterrupted"] = train(range(4, 6))
if "train-only" not in options:
    loaded = states()
    dcp.load(loaded, checkpoint_id=path)
    dsd.set_state_dict(
        model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"], options=choice
    )
    compute_scales()
    found["resumed"] = train(range(4, 6))
found["sharded by"] = library_of(model)
if rank == 0:
    with open(os.path.join(folder, "result.json"), "w") as file:
        json.dump(found, file)
dist.destroy_process_group()
