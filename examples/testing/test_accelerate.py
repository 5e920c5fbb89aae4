"""accelerate on two ranks: trains as the whole model does on one, and goes on from its checkpoint."""

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin

import fullshard

fullshard.patch()


def build():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, batches, backward=torch.Tensor.backward):
    losses = []
    for batch in batches:
        losses.append((model(batch) - 1).square().mean())
        backward(losses[-1])
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).detach()


@pytest.mark.ranks(2)
def test_it_trains_like_the_whole_model_and_resumes(world, tmp_path):
    batches = torch.randn(4, 8, 8)
    mine = batches[:, world.rank :: 2]
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model, optimizer = accelerator.prepare(*build())
    assert isinstance(model, fullshard.FSDPModule)
    first = train(model, optimizer, mine[:2], accelerator.backward)
    accelerator.save_state(tmp_path)
    then = train(model, optimizer, mine[2:], accelerator.backward)
    torch.testing.assert_close(accelerator.reduce(torch.cat([first, then]), "mean"), train(*build(), batches))
    accelerator.load_state(tmp_path)
    assert torch.equal(train(model, optimizer, mine[2:], accelerator.backward), then)
