"""Train a small GPT, sharded: ``torchrun --nproc-per-node=2 examples/minimal.py``, on CPUs or on GPUs.

The same command resumes from the newest checkpoint; ``--steps`` says up to which step.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard import checkpoint, fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--directory", type=Path, default=Path("runs/minimal"))
options = parser.parse_args()

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
if device.type != "cpu":
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()

BATCH, LENGTH, WIDTH = 16, 64, 128
files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=x.device)
        x = self.tokens(x) + self.positions.weight
        return self.head(self.blocks(x, mask=mask, is_causal=True))


torch.manual_seed(0)  # the same initial weights on every rank
model = GPT().to(device)
for block in model.blocks.layers:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after sharding

state = checkpoint.load(options.directory, model, optimizer)
for step in range(state["step"] if state else 0, options.steps):
    torch.manual_seed(step)  # the same batch on every rank, of which each takes its part
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1))
    batch = text[starts + torch.arange(LENGTH + 1)].long().chunk(ranks)[rank].to(device)
    loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss.detach_())
    if rank == 0:
        print(f"step {step + 1}: loss {loss.item() / ranks:.4f}", flush=True)
checkpoint.save(options.directory, model, optimizer, step=options.steps)
dist.destroy_process_group()
