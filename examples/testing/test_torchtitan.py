import copy

import pytest
import torch
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models import llama3
from torchtitan.models.common.attention import ScaledDotProductAttention

import fullshard

fullshard.patch()
PARALLEL, TRAINING = ParallelismConfig(spmd_backend="partial_dtensor"), TrainingConfig(mixed_precision_param="float32")


def losses_of(model, batches):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for ids in batches:
        logits = model(ids[:, :-1], positions=torch.arange(16).expand(len(ids), 16))
        losses.append(torch.nn.functional.cross_entropy(logits.mT, ids[:, 1:], reduction="sum"))
        (losses[-1] / (4 * 16)).backward()  # by the tokens of all ranks, whose gradients torchtitan adds
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).detach()


@pytest.mark.ranks(2)
def test_the_debug_model_trains_like_the_whole_model(world):
    spec, dims = llama3.model_registry("debugmodel"), ParallelDims.from_config(PARALLEL, world.size)
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # the default needs an accelerator
    whole = spec.model.build()
    whole.init_weights(buffer_device=None)
    configs = {"parallelism": PARALLEL, "training": TRAINING, "compile_config": CompileConfig(), "ac_config": None}
    sharded = spec.parallelize_fn(copy.deepcopy(whole), parallel_dims=dims, dump_folder="", **configs)
    assert isinstance(sharded, fullshard.FSDPModule)
    batches = torch.randint(0, 2048, (3, 4, 17))
    losses = losses_of(sharded, batches[:, world.rank :: 2])
    torch.distributed.all_reduce(losses)
    torch.testing.assert_close(losses, losses_of(whole, batches))
