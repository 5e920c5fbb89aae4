# ruff: noqa: E402
"""torchtitan's debug models: parallelized by its own functions, trained, saved and resumed by its own parts."""

import json
import os
import sys
from importlib import import_module
from types import SimpleNamespace

import torch

from tests.frameworks.lift import library_of, torchtitan_on_cpu

torchtitan_on_cpu()
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.trainer import Trainer

folder, name, *options = sys.argv[1:]
SEQUENCE = 16
torch.distributed.init_process_group("gloo")
ranks = torch.distributed.get_world_size()
rank = torch.distributed.get_rank()
parallelism = ParallelismConfig(
    tensor_parallel_degree=2 if "tensor-parallel" in options else 1,
    data_parallel_replicate_degree=2 if "replicas" in options else 1,
    expert_parallel_degree=2 if "experts" in options else 1,
    spmd_backend="partial_dtensor",
)
training = TrainingConfig(
    local_batch_size=2,
    seq_len=SEQUENCE,
    mixed_precision_param="float32",
    disable_cuda_graphs=True,
)
spec = import_module(f"torchtitan.models.{name}").model_registry("debugmodel")
spec.model.layers = spec.model.layers[:3]
for layer in spec.model.layers:
    layer.attention.inner_attention = ScaledDotProductAttention.Config()  # the default has no backward on CPUs
recompute = FullAC.Config() if "recompute" in options else None
config = Trainer.Config(
    model_spec=spec,
    loss=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size),
    parallelism=parallelism,
    training=training,
    activation_checkpoint=recompute,
    optimizer=default_adamw(lr=1e-3),
    lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
    checkpoint=CheckpointManager.Config(enable=True, interval=4, folder="checkpoint"),
    dump_folder=folder,
)
parallel_dims = ParallelDims.from_config(parallelism, ranks)
parallel_dims.build_mesh()
dist_utils.set_spmd_backend(parallelism.spmd_backend)
dist_utils.set_determinism(parallel_dims, torch.device("cpu"), config.debug, distinct_seed_mesh_dims=["pp"])
torch.manual_seed(0)
spec.model.update_from_config(config=config)
with torch.device("meta"):
    model = spec.model.build()
model = spec.parallelize_fn(
    model,
    parallel_dims=parallel_dims,
    training=training,
    parallelism=parallelism,
    compile_config=CompileConfig(),
    ac_config=recompute,
    dump_folder=folder,
)
model.to_empty(device="cpu")
with torch.no_grad():
    model.init_weights(buffer_device=None)
model.train()
optimizers = config.optimizer.build(model_parts=[model])
if spec.post_optimizer_build_fn is not None:
    spec.post_optimizer_build_fn(optimizers, [model], parallel_dims)
schedulers = config.lr_scheduler.build(optimizers=optimizers, training_steps=8)
trainer = SimpleNamespace(
    config=config,
    device=torch.device("cpu"),
    loss_fn=config.loss.build(compile_config=CompileConfig()),
    model_config=spec.model,
    model_parts=[model],
    ntokens_seen=0,
    parallel_dims=parallel_dims,
    train_context=dist_utils.get_spmd_context(parallel_dims=parallel_dims),
)
batch = parallel_dims.get_optional_mesh("batch")
group = batch.get_local_rank() if batch is not None else 0


class TrainState:
    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


train_state = TrainState()


def train(steps):
    losses = []
    for step in steps:
        torch.manual_seed(100 * step + group)
        ids = torch.randint(0, 2048, (2, SEQUENCE + 1))
        positions = torch.arange(SEQUENCE).expand(2, SEQUENCE)
        tokens = torch.tensor(float(2 * SEQUENCE * (batch.size() if batch is not None else 1)))
        inputs, labels, extra = Trainer.post_dataloading_process(
            trainer, {"input": ids[:, :-1], "positions": positions}, ids[:, 1:].contiguous()
        )
        loss = Trainer._forward_backward_body(trainer, inputs, labels, tokens, extra)
        norm = dist_utils.clip_grad_norm_(model.parameters(), 1.0, ep_enabled=parallel_dims.ep_enabled)
        optimizers.step()
        schedulers.step()
        optimizers.zero_grad()
        loss = loss.detach().clone()
        torch.distributed.all_reduce(loss)
        losses.append([loss.item(), norm.item()])
        train_state.step = step + 1
    return losses


checkpointer = config.checkpoint.build(
    dataloader=None,
    model_parts=[model],
    optimizers=optimizers,
    lr_schedulers=schedulers,
    states={"train_state": train_state},
    sd_adapter=spec.state_dict_adapter(spec.model, None),
    base_folder=folder,
)
found = {}
found["losses"] = train(range(4))
if "train-only" not in options:
    checkpointer.save(4)
found["uninterrupted"] = train(range(4, 6))
if "train-only" not in options:
    checkpointer.load(4)
    found["step"] = train_state.step
    found["resumed"] = train(range(4, 6))
found["sharded by"] = library_of(model)
if rank == 0:
    with open(os.path.join(folder, "result.json"), "w") as file:
        json.dump(found, file)
torch.distributed.destroy_process_group()
