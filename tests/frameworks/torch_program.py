"""A small transformer with torch alone: either FSDP, torch's state dicts, and what of torch works beside them."""

from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import _NamedOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.frameworks.library import library_of


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 16)
        self.blocks = nn.ModuleList([Block(16) for _ in range(2)])
        self.head = nn.Linear(16, 31)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def is_block(module):
    return isinstance(module, Block)


def mesh_of(options, model):
    """Where a model is sharded; with tensor parallelism its blocks are cut beforehand."""
    ranks = dist.get_world_size()
    if "replicas" in options:
        return init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    if "tensor_parallel" in options:
        both = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
        for block in model.blocks:
            parallelize_module(block, both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return both["dp"]
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))


def sharded_model(version, options):
    torch.manual_seed(0)
    model = Model()
    mesh = mesh_of(options, model)
    if "recompute" in options and version == "2":
        apply_activation_checkpointing(model, check_fn=is_block)
    if "compile" in options:
        for block in model.blocks:
            block.compile(backend="aot_eager")
    if version == "1":
        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params="flat" not in options,
            mixed_precision=MixedPrecision(torch.float16) if "scaler" in options else None,
            device_id=torch.device("cpu"),
        )
        if "recompute" in options:
            apply_activation_checkpointing(model, check_fn=is_block)
        return model, mesh
    policy = MixedPrecisionPolicy(torch.float16 if "scaler" in options else None)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy), mesh


def optimizer_of(model, options):
    if "named" in options:
        groups = [{"params": list(model.parameters())}]
        return _NamedOptimizer(model.named_parameters(), torch.optim.AdamW, groups, model, lr=1e-2)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


class Training:
    """A model, what trains it, and where it is saved."""

    def __init__(self, folder, version, options):
        self.version, self.options, self.path = version, options, folder / "checkpoint"
        self.model, mesh = sharded_model(version, options)
        self.optimizer = optimizer_of(self.model, options)
        self.group, self.groups = mesh.get_rank(), dist.get_world_size()
        if "tensor_parallel" in options:  # ranks that share a block have the same batch
            self.group, self.groups = mesh.get_local_rank(), mesh.size()
        self.scaler, self.norms = None, []
        if "scaler" in options:  # the first step overflows, and is skipped
            make = partial(ShardedGradScaler, "cpu") if version == "1" else partial(torch.amp.GradScaler, "cpu")
            self.scaler = make(init_scale=2.0**24, backoff_factor=2.0**-10)
        self.choice = dsd.StateDictOptions(full_state_dict="full" in options, cpu_offload="full" in options)

    def train(self, steps):
        """Losses, and scales where there is a scaler."""
        losses = []
        for step in steps:
            ids = torch.randint(0, 31, (4, 9), generator=torch.Generator().manual_seed(step))
            ids = ids.chunk(self.groups)[self.group]
            forward = self.model
            if "functional" in self.options:
                forward = partial(torch.func.functional_call, self.model, {"scale": torch.tensor(0.5)})
            loss = F.cross_entropy(forward(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())
            if self.scaler is None:
                loss.backward()
                norm = self.clip()
                self.optimizer.step()
            else:
                self.scaler.scale(loss).backward()
                self.scaler.unscale_(self.optimizer)
                norm = self.clip()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                losses.append(self.scaler.get_scale())
            self.model.zero_grad()
            loss = loss.detach().clone()
            dist.all_reduce(loss)
            losses.append(loss.item() / dist.get_world_size())
            self.norms.append(f"{norm:.4g}")  # is summed in another order where parameters are flat
        return losses

    def clip(self):
        if self.version == "1":
            return self.model.clip_grad_norm_(1.0).item()
        together = [list(self.model.parameters())]
        if "tensor_parallel" in self.options:  # torch adds no norms of several meshes
            together = [[each] for each in together[0]]
        norms = [torch.nn.utils.clip_grad_norm_(each, 1.0) for each in together]
        return torch.stack([each.full_tensor() for each in norms]).norm().item()

    def save(self):
        states, of_optimizer = dsd.get_state_dict(self.model, self.optimizer, options=self.choice)
        whole = {"model": states, "optimizer": of_optimizer, **self.state_of_scaler()}
        if "full" not in self.options:
            dcp.save(whole, checkpoint_id=self.path)
        elif dist.get_rank() == 0:
            torch.save(whole, self.path)
        dist.barrier()

    def state_of_scaler(self):
        return {} if self.scaler is None else {"scaler": self.scaler.state_dict()}

    def load(self):
        if "full" in self.options:
            states = torch.load(self.path, weights_only=False)
        else:
            mine, of_optimizer = dsd.get_state_dict(self.model, self.optimizer, options=self.choice)
            states = {"model": mine, "optimizer": of_optimizer, **self.state_of_scaler()}
            dcp.load(states, checkpoint_id=self.path)
        if self.scaler is not None:
            self.scaler.load_state_dict(states["scaler"])
        dsd.set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=states["model"],
            optim_state_dict=states["optimizer"],
            options=self.choice,
        )

    def exported(self):
        """The loss of the sharded model, and of a plain one that loads its whole state dict."""
        ids = torch.arange(9)[None]
        with torch.no_grad():
            sharded = F.cross_entropy(self.model(ids)[0].float(), ids[0]).item()
        whole = dsd.get_model_state_dict(
            self.model, options=dsd.StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        if dist.get_rank() != 0:
            return None
        plain = Model()
        plain.load_state_dict(whole)
        return [sharded, F.cross_entropy(plain.double()(ids)[0], ids[0]).item()]


class NamedTraining(Training):
    """With an optimizer that knows its parameters by name, and needs a state before it loads one."""

    def save(self):
        named = self.optimizer.state_dict()
        whole = {"model": self.model.state_dict()}
        whole["optimizer"] = FullyShardedDataParallel.optim_state_dict(self.model, self.optimizer, named)
        if dist.get_rank() == 0:
            torch.save(whole, self.path)
        dist.barrier()

    def load(self):
        states = torch.load(self.path)
        self.optimizer.init_state()
        self.model.zero_grad()
        self.model.load_state_dict(states["model"])
        self.optimizer.load_state_dict(states["optimizer"])


def run_case(folder, options):
    version, *options = options
    dist.init_process_group("gloo")
    training = (NamedTraining if "named" in options else Training)(folder, version, options)
    found = {"sharded by": library_of(training.model)}
    if "resume" not in options:
        found["losses"] = training.train(range(3))
        if "train-only" not in options:
            training.save()
        found["uninterrupted"] = training.train(range(3, 5))
        found["norms"] = list(training.norms)
    if "train-only" not in options:
        training.load()
        found["resumed"] = training.train(range(3, 5))
        found["exported"] = training.exported()
    dist.destroy_process_group()
    return found
