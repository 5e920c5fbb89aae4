"""Lightning on two ranks: trains with FSDP as with DDP, and resumes from its checkpoint."""

import lightning as L
import pytest
import torch

import fullshard

fullshard.patch()
OPTIONS = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False}


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.losses = torch.nn.Linear(8, 8), []

    def training_step(self, batch):
        self.losses.append((self.layer(batch) - 1).square().mean())
        return self.losses[-1]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(rows, epochs, strategy="fsdp", checkpoint=None, seed=0):
    L.seed_everything(seed)
    model, trainer = Model(), L.Trainer(strategy=strategy, max_epochs=epochs, use_distributed_sampler=False, **OPTIONS)
    trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=4), ckpt_path=checkpoint)
    assert isinstance(trainer.strategy.model, fullshard.FullyShardedDataParallel) is (strategy == "fsdp")
    return trainer, torch.stack(model.losses)


@pytest.mark.ranks(2)
def test_it_trains_as_with_ddp_and_resumes(world, tmp_path):
    rows = torch.randn(16, 8)[world.rank :: 2]
    fit(rows, 1)[0].save_checkpoint(tmp_path / "checkpoint")
    _, losses = fit(rows, 2)
    torch.testing.assert_close(losses, fit(rows, 2, "ddp")[1])
    assert torch.equal(fit(rows, 2, checkpoint=tmp_path / "checkpoint", seed=1)[1], losses[2:])
