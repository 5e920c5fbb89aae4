"""A small Llama with accelerate: trains, saves, goes on, resumes and exports."""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from transformers import LlamaConfig, LlamaForCausalLM

from tests.frameworks.library import LLAMA, library_of


def train(accelerator, model, optimizer, steps):
    losses = []
    for step in steps:
        ids = torch.randint(0, 97, (4, 16), generator=torch.Generator().manual_seed(step))
        ids = ids.chunk(accelerator.num_processes)[accelerator.process_index]
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def run_case(folder, options):
    version, *options = options
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=int(version),
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type=next((each for each in options if each.endswith("STATE_DICT")), "FULL_STATE_DICT"),
        use_orig_params="flat" not in options if version == "1" else None,
        cpu_ram_efficient_loading="low_memory" in options,
        activation_checkpointing="recompute" in options,
        cpu_offload="offload" in options,
    )
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=plugin,
        mixed_precision="bf16" if "bf16" in options else "no",
        gradient_accumulation_steps=2 if "accumulate" in options else 1,
    )
    set_seed(0)
    config = LlamaConfig(**LLAMA, tie_word_embeddings="tied" in options)
    model = LlamaForCausalLM(config)
    if "bf16_weights" in options:
        model = model.to(torch.bfloat16)
    if "compile" in options:
        model = torch.compile(model, backend="aot_eager")
    if "flat" in options:  # the parameters are others afterwards
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3))
    else:
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    found = {"sharded by": library_of(accelerator.unwrap_model(model) if version == "2" else model)}
    if "resume" not in options:
        found["losses"] = train(accelerator, model, optimizer, range(2))
        if "train-only" not in options:
            accelerator.save_state(str(folder))
        found["uninterrupted"] = train(accelerator, model, optimizer, range(2, 4))
    if "train-only" not in options:
        accelerator.load_state(str(folder))
        found["resumed"] = train(accelerator, model, optimizer, range(2, 4))
        found["exported"] = exported(accelerator, model, config)
    return found


def exported(accelerator, model, config):
    """The loss of the sharded model, and of a plain one that loads its state dict."""
    ids = torch.arange(16)[None]
    with torch.no_grad():
        sharded = model(input_ids=ids, labels=ids).loss.item()
    whole = accelerator.get_state_dict(model)
    if not accelerator.is_main_process:
        return None
    plain = LlamaForCausalLM(config)
    plain.load_state_dict({name.removeprefix("_orig_mod."): value for name, value in whole.items()})
    return [sharded, plain.double()(input_ids=ids, labels=ids).loss.item()]
