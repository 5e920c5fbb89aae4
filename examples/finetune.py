"""Fine-tune a language model of transformers with LoRA, sharded: ``make finetune``, or torchrun on this file.

The base model is made from a config with random weights, or read from a local directory (``--weights DIR``). PEFT adds
the adapters. All of it is sharded, recomputed in backward, and trained with gradient accumulation, clipping and an
average of the trained weights, in bf16 if the device is faster in it. A run resumes from its checkpoint, on any number
of ranks. At the end
``DIR/merged`` has the averaged weights, merged into the base: ``AutoModelForCausalLM.from_pretrained`` reads it.
"""

from __future__ import annotations

import argparse
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as states
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

import data
import report
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
    base.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    base.config.use_cache = False
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", modules_to_save=also, task_type="CAUSAL_LM")
    with warnings.catch_warnings():  # PEFT asks for this name of transformers, which is deprecated
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return peft.get_peft_model(base, lora)


def fastest_dtype(device: torch.device) -> tuple[torch.dtype, str]:
    """Time matrix products in fp32 and bf16. Returns the faster dtype, the same on every rank, and a sentence."""
    seconds = []
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(512, 512, dtype=dtype, device=device)
        times = []
        for _ in range(10):
            clock = time.perf_counter()
            (matrix @ matrix)[0, 0].item()  # waits for the device
            times.append(time.perf_counter() - clock)
        seconds.append(min(times))
    speed = torch.tensor(seconds[0] / seconds[1], device=device)
    dist.all_reduce(speed, dist.ReduceOp.MIN)  # of the slowest rank
    dtype = torch.bfloat16 if speed > 1 else torch.float32
    text = (
        f"Computes in {dtype}: matrix products in bf16 are {speed:.1f} times as fast as in fp32 on this {device.type}"
    )
    if dtype is torch.float32 and device.type == "cpu":
        has = [name for name, there in torch.cpu.get_capabilities().items() if "bf16" in name and there is True]
        text += f", which has {', '.join(has) or 'no instructions for bf16'}"
    return dtype, text + "."


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
    disable_progress_bar()
    dtype, sentence = fastest_dtype(device)
    say(sentence, flush=True)
    corpus = data.standard_library()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model = fully_shard_blocks(build(options.weights).to(device), mp_policy=policy)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.0)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))  # a sharded copy
    averaged = nn.ParameterList(parameter for parameter in average.parameters() if parameter.requires_grad)
    averaged.register_buffer("count", average.n_averaged)
    # Checkpoints hold what is trained. What is frozen comes from the seed or from --weights again.
    done = (checkpoint.load(options.directory, model, optimizer, state={"average": averaged}) or {"step": 0})["step"]
    total = sum(map(Tensor.numel, model.parameters()))
    say(f"Trains {sum(map(Tensor.numel, trained)):,} of {total:,} parameters on {ranks} ranks, from step {done} on.")

    log = report.RunLog(options.directory, done, options.steps) if rank == 0 else None
    with log or nullcontext():
        for step in range(done, options.steps):
            clock = time.perf_counter()
            batch = data.training_batch(corpus, SEED, step, options.batch_size, options.seq_len)
            loss = step_of(model, batch.chunk(ranks)[rank].to(device).split(options.micro_batch))
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            dist.all_reduce(loss)
            speed = options.batch_size * options.seq_len / (time.perf_counter() - clock)
            if log:
                log.add(step + 1, loss.item() / ranks, speed)
    if done < options.steps:
        kept = {"average": averaged}
        checkpoint.save(options.directory, model, optimizer, step=options.steps, trainable_only=True, state=kept)

    with torch.no_grad():
        tokens = data.validation_batches(corpus, 1, options.batch_size, options.seq_len)[0]
        loss = loss_of(average, tokens.chunk(ranks)[rank].to(device))
    dist.all_reduce(loss)
    say(f"Validation loss of the averaged weights: {loss / ranks:.3f} nats a byte.")
    merged = export(average, options)
    if rank == 0:
        say(f"Written: the merged model in {merged}, and {report.draw(options.directory)}.")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
