"""torchtitan's debug models: parallelized by its own functions, trained, saved and resumed by its own parts."""

from types import SimpleNamespace

import torch
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, fsdp
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models import deepseek_v3, llama3
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.trainer import Trainer

from tests.frameworks.library import choose_sums, library_of

SEQUENCE = 16
if fsdp.FSDPModule.__module__.startswith("torch"):
    choose_sums(fsdp)


class TrainState:
    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def run_case(folder, options):
    name, *options = options
    torch.distributed.init_process_group("gloo")
    ranks = torch.distributed.get_world_size()
    parallelism = ParallelismConfig(
        tensor_parallel_degree=2 if "tensor_parallel" in options and ranks > 2 else 1,
        data_parallel_replicate_degree=2 if "replicas" in options and ranks > 2 else 1,
        expert_parallel_degree=2 if "experts" in options else 1,
        spmd_backend="partial_dtensor",
    )
    training = TrainingConfig(
        local_batch_size=2,
        seq_len=SEQUENCE,
        mixed_precision_param="float32",
        disable_cuda_graphs=True,
    )
    spec = {"llama3": llama3, "deepseek_v3": deepseek_v3}[name].model_registry("debugmodel")
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
        checkpoint=CheckpointManager.Config(enable=True, interval=3, folder="checkpoint"),
        dump_folder=str(folder),
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
        dump_folder=str(folder),
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
    positions = torch.arange(SEQUENCE).expand(4, SEQUENCE)
    tokens = torch.tensor(float(4 * SEQUENCE))
    batch = parallel_dims.get_mesh("batch")
    train_state = TrainState()

    def train(steps):
        losses = []
        for step in steps:
            ids = torch.randint(0, 2048, (4, SEQUENCE + 1), generator=torch.Generator().manual_seed(step))
            ids = ids.chunk(batch.size())[batch.get_local_rank()]
            inputs, labels, extra = Trainer.post_dataloading_process(
                trainer, {"input": ids[:, :-1], "positions": positions[: len(ids)]}, ids[:, 1:].contiguous()
            )
            loss = Trainer._forward_backward_body(trainer, inputs, labels, tokens, extra)
            norm = dist_utils.clip_grad_norm_(model.parameters(), 1.0, ep_enabled=parallel_dims.ep_enabled)
            optimizers.step()
            schedulers.step()
            optimizers.zero_grad()
            loss = loss.detach().clone()
            torch.distributed.all_reduce(loss, group=batch.get_group())
            losses.append([loss.item(), norm.item()])
            train_state.step = step + 1
        return losses

    def exported():
        """The loss of the sharded model, and of a plain one that loads its whole state dict."""
        ids = torch.arange(4 * SEQUENCE).view(4, SEQUENCE)
        with torch.no_grad(), trainer.train_context():
            loss, _ = trainer.loss_fn(model(ids, positions=positions), ids, tokens, positions=positions)
        whole = {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in model.state_dict().items()
        }
        if torch.distributed.get_rank() != 0:
            return None
        plain = spec.model.build()
        plain.init_weights(buffer_device=None)
        plain.load_state_dict(whole)
        with torch.no_grad():
            logits = plain(ids, positions=positions)
        return [loss.item(), torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).item()]

    checkpointer = config.checkpoint.build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": train_state},
        sd_adapter=spec.state_dict_adapter(spec.model, None),
        base_folder=str(folder),
    )
    found = {"sharded by": library_of(model)}
    if "resume" not in options:
        found["losses"] = train(range(3))
        if "train-only" not in options:
            checkpointer.save(3)
        found["uninterrupted"] = train(range(3, 5))
    if "train-only" not in options:
        checkpointer.load(3)
        assert train_state.step == 3
        found["resumed"] = train(range(3, 5))
        found["exported"] = exported()
    torch.distributed.destroy_process_group()
    return found
