"""torchtitan's debug Llama 3 on two ranks, parallelized by torchtitan: trains like the whole model (needs triton)."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models import llama3
from torchtitan.models.common.attention import ScaledDotProductAttention

import fullshard

fullshard.patch()
PARALLELISM = ParallelismConfig(spmd_backend="partial_dtensor")
TRAINING = TrainingConfig(local_batch_size=2, seq_len=16, mixed_precision_param="float32")


def losses_of(model, batches):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for ids in batches:
        logits = model(ids[:, :-1], positions=torch.arange(16).expand(len(ids), 16))
        # torchtitan adds gradients of ranks, and each divides by the number of all tokens.
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / (4 * 16)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.ranks(2)
def test_it_trains_like_the_whole_model(world, tmp_path):
    dims = ParallelDims.from_config(PARALLELISM, world.size)
    dims.build_mesh()
    set_spmd_backend(PARALLELISM.spmd_backend)
    spec = llama3.model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # the default needs an accelerator
    whole = spec.model.build()
    whole.init_weights(buffer_device=None)
    parallelize = {
        "parallelism": PARALLELISM,
        "training": TRAINING,
        "compile_config": CompileConfig(),
        "ac_config": None,
    }
    sharded = spec.parallelize_fn(copy.deepcopy(whole), parallel_dims=dims, dump_folder=str(tmp_path), **parallelize)
    assert isinstance(sharded, fullshard.FSDPModule)
    batches = torch.randint(0, 2048, (3, 4, 17))
    losses = losses_of(sharded, batches.chunk(2, dim=1)[world.rank])
    dist.all_reduce(losses)
    torch.testing.assert_close(losses, losses_of(whole, batches))
