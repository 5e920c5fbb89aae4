"""What torch's FSDPMemTracker reports of a small transformer under fully_shard."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import fully_shard

from tests.frameworks.library import library_of


def run_case(folder, options):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256)) for _ in range(6)])
    if "recompute" in options:
        apply_activation_checkpointing(
            model, check_fn=lambda module: isinstance(module, nn.Sequential) and module is not model
        )
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    def step(number):
        optimizer.zero_grad()
        torch.manual_seed(number + dist.get_rank())
        loss = model(torch.randn(4, 256)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    found = {"losses": [step(0)] if "later" in options else []}
    tracker = FSDPMemTracker(model, optimizer)
    with tracker:
        found["losses"].append(step(1))
    found["losses"].append(step(2))
    found["devices"] = {str(device): each["Total"] for device, each in tracker.get_tracker_snapshot("peak").items()}
    cpu = torch.device("cpu")
    peak, now = tracker.get_tracker_snapshot("peak")[cpu], tracker.get_tracker_snapshot()[cpu]
    found["peak"] = {getattr(kind, "value", kind): count for kind, count in peak.items()}
    found["now"] = {getattr(kind, "value", kind): count for kind, count in now.items()}
    stats = {
        tracker.memory_tracking[module].mod_fqn: tracker.memory_tracking[module] for module in tracker.memory_tracking
    }
    found["modules"] = {
        name: {
            state.value: [seen[0].get(cpu, {}).get(kind, 0) for kind in tracker._ref_class][:5]
            for state, seen in each.snapshots.items()
        }
        for name, each in stats.items()
    }
    found["sharded by"] = library_of(model)
    dist.destroy_process_group()
    return found
