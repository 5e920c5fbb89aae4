"""LoRA adapters on a small Llama whose frozen weights are sharded too: trains, saves both ways, resumes, exports."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from tests.frameworks.library import LLAMA, library_of

CONFIG = LlamaConfig(**LLAMA)
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
ADAPTERS = StateDictOptions(ignore_frozen_params=True, strict=False)
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def plain_model():
    set_seed(0)
    return LlamaForCausalLM(CONFIG)


def sharded_model(options):
    model = get_peft_model(plain_model(), LORA)
    if "wrapped" in options:
        policy = fsdp_auto_wrap_policy(model)
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params="flat" not in options)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def optimizer_of(model):
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        ids = torch.randint(0, 97, (4, 16), generator=torch.Generator().manual_seed(step))
        ids = ids.chunk(dist.get_world_size())[dist.get_rank()]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach() / dist.get_world_size()
        dist.all_reduce(loss)
        losses.append(loss.item())
    return losses


def state_of(model, optimizer):
    return {
        "model": get_model_state_dict(model, options=ADAPTERS),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=ADAPTERS),
    }


def exported(model, folder):
    """The loss of the sharded model, and of a plain one that reads the adapters alone, as PEFT saves them."""
    ids = torch.arange(16)[None]
    with torch.no_grad():
        sharded = model(input_ids=ids, labels=ids).loss.item()
    whole = get_model_state_dict(model, options=WHOLE)
    if dist.get_rank() == 0:
        if isinstance(model, FullyShardedDataParallel):  # PEFT looks for adapters by names that wrapping changes
            model = get_peft_model(plain_model(), LORA)
            model.load_state_dict(whole)
        model.save_pretrained(folder, state_dict=whole)
    dist.barrier()
    assert sum(file.stat().st_size for file in folder.iterdir()) < 30_000, "more than the adapters was saved"
    plain = PeftModel.from_pretrained(plain_model(), str(folder)).double()
    return [sharded, plain(input_ids=ids, labels=ids).loss.item()]


def run_case(folder, options):
    dist.init_process_group("gloo")
    found = {}
    model = sharded_model(options)
    optimizer = optimizer_of(model)
    if "resume" not in options:
        found["losses"] = train(model, optimizer, range(3))
        if "train-only" not in options:
            dcp.save(state_of(model, optimizer), checkpoint_id=str(folder / "sharded"))
        found["uninterrupted"] = train(model, optimizer, range(3, 5))
    if "train-only" not in options:
        model = sharded_model(options)
        optimizer = optimizer_of(model)
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=str(folder / "sharded"))
        set_model_state_dict(model, state["model"], options=ADAPTERS)
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=ADAPTERS)
        found["resumed"] = train(model, optimizer, range(3, 5))
        found["exported"] = exported(model, folder / "adapters")
    found["sharded by"] = library_of(model)
    dist.destroy_process_group()
    return found
