"""torchtitan's debug Llama 3, parallelized by torchtitan on two ranks, trains like the whole model."""

import copy

import pytest
import torch
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models import llama3

import fullshard

fullshard.patch()
PARALLELISM = ParallelismConfig(spmd_backend="partial_dtensor")
CONFIGS = {"training": TrainingConfig(mixed_precision_param="float32"), "compile_config": CompileConfig()}


def losses_of(model, batches):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for ids in batches:
        logits = model(ids[:, :-1], positions=torch.arange(16).expand(len(ids), 16)).flatten(0, 1)
        losses.append(torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum"))
        (losses[-1] / (4 * 16)).backward()  # by the tokens of all ranks, whose gradients torchtitan adds
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).detach()


@pytest.mark.ranks(2)
def test_it_trains_like_the_whole_model(world):
    spec, dims = llama3.model_registry("debugmodel", "sdpa"), ParallelDims.from_config(PARALLELISM, world.size)
    whole = spec.model.build()
    whole.init_weights(buffer_device=None)
    options = {"parallel_dims": dims, "parallelism": PARALLELISM, "ac_config": None, "dump_folder": "", **CONFIGS}
    sharded = spec.parallelize_fn(copy.deepcopy(whole), **options)
    assert isinstance(sharded, fullshard.FSDPModule)
    batches = torch.randint(0, 2048, (3, 4, 17))
    losses = losses_of(sharded, batches[:, world.rank :: 2])
    torch.distributed.all_reduce(losses)
    torch.testing.assert_close(losses, losses_of(whole, batches))
