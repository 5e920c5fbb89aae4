"""Lightning on two ranks: trains like one process with the whole batches, and resumes from its checkpoint."""

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn

import fullshard

fullshard.patch()
DATA = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


class Model(L.LightningModule):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers, self.losses = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), []

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def training_step(self, batch):
        loss = (self.layers(batch) - 1).square().mean()
        self.losses.append(loss.detach())
        return loss


def fit(epochs, seed=0, devices=2, checkpoint=None):
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    strategy = FSDPStrategy(auto_wrap_policy={nn.Linear}, state_dict_type="sharded")
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=epochs, **quiet)
    model = Model(seed)
    trainer.fit(model, torch.utils.data.DataLoader(DATA, batch_size=4), ckpt_path=checkpoint)
    assert isinstance(trainer.strategy.model, fullshard.FullyShardedDataParallel)
    return trainer, trainer.strategy.reduce(torch.stack(model.losses), reduce_op="mean")


@pytest.mark.ranks(2)
def test_it_trains_as_unsharded_and_resumes(tmp_path):
    trainer, _ = fit(1)
    trainer.save_checkpoint(tmp_path / "checkpoint")
    _, losses = fit(2)
    _, resumed = fit(2, seed=1, checkpoint=tmp_path / "checkpoint")
    assert torch.equal(resumed, losses[2:])
    model = Model(0)
    optimizer = model.configure_optimizers()
    for batch, loss in zip([*DATA.split(8)] * 2, losses, strict=True):
        model.training_step(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(model.losses[-1], loss)
