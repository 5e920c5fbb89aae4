"""A small Llama with three trainers of TRL: trains, saves, resumes, exports."""

import argparse
import inspect
import string

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from tests.frameworks.library import LLAMA, library_of

#: Every character is a token.
VOCABULARY = {each: number for number, each in enumerate(["<pad>", "<eos>", "<unk>", *string.printable])}
CHARACTERS = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
CHARACTERS.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
CHARACTERS.decoder = decoders.Fuse()
TOKENIZER = PreTrainedTokenizerFast(
    tokenizer_object=CHARACTERS, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
)
LINES = [line.strip() for line in inspect.getsource(argparse).splitlines() if len(line) > 40][:32]
SIZES = {"vocab_size": len(VOCABULARY), "max_position_embeddings": 128}
CONFIG = LlamaConfig(**{**LLAMA, **SIZES}, pad_token_id=0, eos_token_id=1, bos_token_id=None)


def varied(completions, **others):
    return [len(set(completion)) / 8 for completion in completions]


def trainer_of(folder, kind, version, saved, *options):
    set_seed(0)
    model = LlamaForCausalLM(CONFIG)
    common = {
        "output_dir": str(folder),
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {
            "version": int(version),
            "state_dict_type": f"{saved}_STATE_DICT",
            "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
            "sync_module_states": False,  # else accelerate asks for an accelerator
        },
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 2 if "resume" not in options else 4,
        "learning_rate": 1e-2,
        "max_steps": 4,
        "save_steps": 2,
        "save_strategy": "no" if "train-only" in options else "steps",
        "logging_steps": 1,
        "dataloader_pin_memory": False,
        "report_to": [],
        "disable_tqdm": True,
    }
    if kind == "SFT":
        data = Dataset.from_list([{"text": line} for line in LINES])
        return SFTTrainer(model, SFTConfig(**common, max_length=32), train_dataset=data, processing_class=TOKENIZER)
    if kind == "DPO":
        data = [{"prompt": line[:12], "chosen": line[12:24], "rejected": line[12:24][::-1]} for line in LINES]
        arguments = DPOConfig(**common, max_length=32)
        set_seed(0)
        reference = LlamaForCausalLM(CONFIG)
        return DPOTrainer(
            model, reference, args=arguments, train_dataset=Dataset.from_list(data), processing_class=TOKENIZER
        )
    data = Dataset.from_list([{"prompt": line[:12]} for line in LINES])
    arguments = GRPOConfig(**common, num_generations=2, max_completion_length=8)
    return GRPOTrainer(model, varied, args=arguments, train_dataset=data, processing_class=TOKENIZER)


def losses_of(trainer, **arguments):
    trainer.train(**arguments)
    told = [each for each in trainer.state.log_history if "grad_norm" in each]
    return [[each[key] for key in ("loss", "grad_norm", "reward", "rewards/margins") if key in each] for each in told]


def exported(trainer, folder):
    """The loss of the sharded model, and of a plain one that reads what it saves."""
    ids = torch.arange(16)[None]
    with torch.no_grad():
        sharded = trainer.model.eval()(input_ids=ids, labels=ids).loss.item()
    trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(str(folder))
    trainer.accelerator.wait_for_everyone()
    model = LlamaForCausalLM.from_pretrained(str(folder)).double()
    return [sharded, model(input_ids=ids, labels=ids).loss.item()]


def run_case(folder, options):
    found = {}
    trainer = trainer_of(folder, *options)
    if "resume" not in options:
        found["losses"] = losses_of(trainer)
    if "train-only" not in options:
        trainer = trainer_of(folder, *options)
        found["resumed"] = losses_of(trainer, resume_from_checkpoint=str(folder / "checkpoint-2"))
        found["exported"] = exported(trainer, folder / "exported")
    found["sharded by"] = library_of(trainer.model)
    return found
