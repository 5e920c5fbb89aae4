"""Layers that torchao prepares, in float8, int8 or 4 bits, and its optimizers of 8 and 4 bits, with fully_shard."""

from dataclasses import replace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.fsdp import fully_shard
from torchao import optim, quantize_
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp
from torchao.prototype import quantized_training as training
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

from tests.frameworks.library import library_of

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
        super().__init__()
        self.weight = nn.Parameter(to_nf4(linear.weight.detach(), 64, 2), requires_grad=False)

    def forward(self, x):
        return linear_nf4(x, self.weight)


def plain_model(kind):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)], nn.Linear(WIDTH, 8))

    def chosen(_, name):
        return name in ADAPTED

    if kind.startswith("float8"):
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        convert_to_float8_training(model, config=config, module_filter_fn=chosen)
    elif kind == "int8":
        config = training.Int8MixedPrecisionTrainingConfig()
        quantize_(model, config, filter_fn=chosen)
        torch.serialization.add_safe_globals([type(config), type(model[0].weight.data)])  # to load what it saved
    elif kind == "frozen_4":
        for at in range(3):
            model[at] = LowRank(Frozen4Bits(model[at]))
    elif kind == "frozen_8":
        quantize_(model, training.int8_weight_only_quantized_training(), filter_fn=chosen)
        for at in range(3):
            model[at] = LowRank(model[at])
    return model


def exported(model, kind, choice):
    """The loss of the sharded model, and of one that is prepared alike and loads its whole state dict."""
    x = torch.ones(2, WIDTH)
    with torch.no_grad():
        sharded = model(x).square().mean().item()
    choice = replace(choice, full_state_dict=True, cpu_offload=True)
    whole = dsd.get_model_state_dict(model, options=choice)
    if dist.get_rank() != 0:
        return None
    plain = plain_model(kind)
    plain.load_state_dict(whole, strict=choice.strict)
    return [sharded, plain(x).square().mean().item()]


def run_case(folder, options):
    kind, *options = options
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = plain_model(kind)
    for layer in model:
        fully_shard(layer, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    trained = [param for param in model.parameters() if param.requires_grad]
    if kind.startswith("Adam"):
        torch.compiler.set_stance("force_eager")  # the steps are compiled: that takes longer than the test may
        optimizer = getattr(optim, kind)(trained, lr=1e-2)
    else:
        optimizer = torch.optim.AdamW(trained, lr=1e-2)

    def compute_scales():
        """For float8 in one call for all weights, whenever they have changed."""
        if kind == "float8_ahead":
            precompute_float8_dynamic_scale_for_fsdp(model)

    def train(steps):
        losses = []
        for step in steps:
            torch.manual_seed(step)
            loss = (model(torch.randn(64, WIDTH).chunk(ranks)[rank]) - 1).square().mean()
            loss.backward()
            torch.manual_seed(step)  # some round at random
            optimizer.step()
            optimizer.zero_grad()
            compute_scales()
            loss = loss.detach().clone()
            dist.all_reduce(loss)
            losses.append(loss.item() / ranks)
        return losses

    # torch's checkpoints have no packed weights: those that are frozen are made anew.
    choice = dsd.StateDictOptions(ignore_frozen_params=kind.startswith("frozen"), strict=not kind.startswith("frozen"))
    path = folder / "checkpoint"

    def states():
        found, of_optimizer = dsd.get_state_dict(model, optimizer, options=choice)
        return {"model": found, "optimizer": of_optimizer}

    found = {"sharded by": library_of(model)}
    if "resume" not in options:
        found["losses"] = train(range(3))
        if "train-only" not in options:
            dcp.save(states(), checkpoint_id=path)
        found["uninterrupted"] = train(range(3, 5))
    if "train-only" not in options:
        loaded = states()
        dcp.load(loaded, checkpoint_id=path)
        dsd.set_state_dict(
            model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"], options=choice
        )
        compute_scales()
        found["resumed"] = train(range(3, 5))
        found["exported"] = exported(model, kind, choice)
    dist.destroy_process_group()
    return found
