"""A small Llama with the Trainer of transformers: trains, saves, resumes, exports and generates."""

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from tests.frameworks.library import LLAMA, library_of

CONFIG = LlamaConfig(**LLAMA)
IDS = torch.randint(0, 97, (32, 16), generator=torch.Generator().manual_seed(0))
DATA = [{"input_ids": row, "labels": row} for row in IDS]


def plain_model(options):
    set_seed(0)
    model = LlamaForCausalLM(CONFIG)
    if "lora" in options:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    return model


def trainer_of(folder, version, kind, *options):
    model = plain_model(options)
    sharding = {
        "version": int(version),
        "state_dict_type": f"{kind}_STATE_DICT",
        "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "activation_checkpointing": "recompute" in options,
        "sync_module_states": False,  # else accelerate asks for an accelerator
    }
    ranks = 1 if "resume" in options else 2
    arguments = TrainingArguments(
        output_dir=str(folder),
        fsdp="full_shard auto_wrap",
        fsdp_config=sharding,
        bf16="bf16" in options,
        use_cpu=True,
        per_device_train_batch_size=4 // ranks,
        gradient_accumulation_steps=2 if "accumulate" in options else 1,
        max_grad_norm=0.5,
        learning_rate=1e-2,
        max_steps=4,
        save_steps=2,
        save_strategy="no" if {"train-only", "trains"} & set(options) else "steps",
        logging_steps=1,
        dataloader_pin_memory=False,
        report_to=[],
        disable_tqdm=True,
    )
    return Trainer(model, arguments, train_dataset=DATA)


def losses_of(trainer, **arguments):
    trainer.train(**arguments)
    return [[each["loss"], each["grad_norm"]] for each in trainer.state.log_history if "grad_norm" in each]


def generated(trainer):
    """Ranks generate different numbers of tokens, together."""
    model, rank = trainer.model, trainer.args.process_index
    asked = {"input_ids": IDS[rank : rank + 1, :4], "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    asked["max_new_tokens"] = 3 + 3 * rank
    model.eval()
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, recurse=False, writeback=False):
            tokens = model.generate(**asked)
    else:
        tokens = model.generate(**asked)
    return trainer.accelerator.gather(trainer.accelerator.pad_across_processes(tokens, dim=1)).tolist()


def exported(trainer, folder, options):
    """What everybody can load: the loss of the sharded model, and of a plain one that reads what it saves."""
    ids = {"input_ids": IDS[:2], "labels": IDS[:2]}
    with torch.no_grad():
        sharded = trainer.model.eval()(**ids).loss.item()
    trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(str(folder))
    trainer.accelerator.wait_for_everyone()
    if "lora" in options:
        model = PeftModel.from_pretrained(plain_model(()), str(folder))
    else:
        model = LlamaForCausalLM.from_pretrained(str(folder))
    return [sharded, model.double().eval()(**ids).loss.item()]


def run_case(folder, options):
    found = {}
    trainer = trainer_of(folder, *options)
    if "resume" not in options:
        found["losses"] = losses_of(trainer)
        if "lora" not in options:
            found["generated"] = generated(trainer)
    if not {"train-only", "trains"} & set(options):
        trainer = trainer_of(folder, *options)
        found["resumed"] = losses_of(trainer, resume_from_checkpoint=str(folder / "checkpoint-2"))
        found["exported"] = exported(trainer, folder / "exported", options)
    found["sharded by"] = library_of(trainer.model)
    return found
