"""Fine-tune a language model of transformers with LoRA, sharded: ``make finetune``, or torchrun on this file.

The base model is made from a config with random weights, or read from a local directory (``--weights DIR``). PEFT adds
the adapters. All of it is sharded, computed in bf16, recomputed in backward, and trained with gradient accumulation,
clipping and an average of the trained weights. A run goes on from its checkpoint, on any number of ranks. At the end
``DIR/merged`` has the averaged weights, merged into the base: ``AutoModelForCausalLM.from_pretrained`` reads it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as states
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import data
from fullshard import MixedPrecisionPolicy, checkpoint, fully_shard_blocks

SEED = 0


def build(weights: Path | None) -> peft.PeftModel:
    """Make the model with its adapters, unsharded: the same on every rank and in every run."""
    torch.manual_seed(SEED)
    also = None if weights else ["embed_tokens", "lm_head"]  # random weights alone have nothing that could be adapted
    if weights:
        base: Any = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    else:  # a token is a byte
        sizes: Any = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}
        base = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    base.config.use_cache = False
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", modules_to_save=also, task_type="CAUSAL_LM")
    return peft.get_peft_model(base, lora)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean loss of predicting each token of (batch, time) from those before it, in nats a byte."""
    return model(input_ids=tokens, labels=tokens).loss


def step_of(model: peft.PeftModel, micro_batches: tuple[Tensor, ...]) -> Tensor:
    """Add up the gradients of all micro-batches; ranks communicate them in the last backward."""
    total = torch.zeros((), device=micro_batches[0].device)
    for number, tokens in enumerate(micro_batches, start=1):
        model.set_requires_gradient_sync(number == len(micro_batches))
        loss = loss_of(model, tokens) / len(micro_batches)
        loss.backward()
        total += loss.detach()
    return total


def export(average: AveragedModel, options: argparse.Namespace) -> Path:
    """Write the averaged weights as an ordinary model of transformers. Every rank calls this; rank 0 writes."""
    whole = states.StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    trained = states.get_model_state_dict(average.module, options=whole)
    merged = options.directory / "merged"
    if dist.get_rank() == 0:
        model = build(options.weights)
        assert not model.load_state_dict(trained, strict=False).unexpected_keys
        model.merge_and_unload().save_pretrained(merged)
    dist.barrier()
    return merged


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter, description=__doc__)
    parser.add_argument("--weights", type=Path, help="local directory of a causal language model that reads bytes")
    parser.add_argument("--directory", type=Path, default=Path("runs/finetune"), help="for all that is written")
    parser.add_argument("--steps", type=int, default=60, help="train up to this step")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences a step, over all ranks together")
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences a rank computes at a time")
    parser.add_argument("--seq-len", type=int, default=128, help="bytes of a sequence")
    options = parser.parse_args()

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(dist.get_node_local_rank())
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    say = print if rank == 0 else lambda *_, **__: None
    corpus = data.standard_library()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard_blocks(build(options.weights).to(device), mp_policy=policy)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.0)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))  # a sharded copy
    averaged = nn.ParameterList(parameter for parameter in average.parameters() if parameter.requires_grad)
    averaged.register_buffer("count", average.n_averaged)
    # Checkpoints hold what is trained. What is frozen comes from the seed or from --weights again.
    done = (checkpoint.load(options.directory, model, optimizer, state={"average": averaged}) or {"step": 0})["step"]
    say(f"{sum(map(Tensor.numel, trained)):,} parameters are trained from step {done} on. Number of ranks: {ranks}.")

    clock = time.perf_counter()
    for step in range(done, options.steps):
        batch = data.training_batch(corpus, SEED, step, options.batch_size, options.seq_len)
        loss = step_of(model, batch.chunk(ranks)[rank].to(device).split(options.micro_batch))
        norm: Any = nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        if (step + 1) % 10 == 0 or step + 1 == options.steps:
            dist.all_reduce(loss)
            speed = (step + 1 - done) * options.batch_size * options.seq_len / (time.perf_counter() - clock)
            size = norm.full_tensor().item()
            say(f"step {step + 1}/{options.steps}  loss {loss / ranks:.3f}  norm {size:.2f}  {speed:,.0f} tokens/s")
    if done < options.steps:
        kept = {"average": averaged}
        checkpoint.save(options.directory, model, optimizer, step=options.steps, trainable_only=True, state=kept)

    with torch.no_grad():
        tokens = data.validation_batches(corpus, 1, options.batch_size, options.seq_len)[0]
        loss = loss_of(average, tokens.chunk(ranks)[rank].to(device))
    dist.all_reduce(loss)
    say(f"Validation loss of the averaged weights: {loss / ranks:.3f} nats a byte.")
    say(f"The merged model is in {export(average, options)}.")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
