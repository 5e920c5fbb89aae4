"""The Trainer of transformers on two ranks: trains with FSDP as with DDP, and resumes from its checkpoint."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import fullshard

fullshard.patch()
IDS = torch.randint(0, 97, (32, 16), generator=torch.Generator().manual_seed(0))
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
FSDP = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}}


def train(folder, seed=0, resume=None, **options):
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        max_steps=4,
        save_steps=2,
        logging_steps=1,
        **options,
    )
    set_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in IDS])
    trainer.train(resume_from_checkpoint=resume)
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.ranks(2)
def test_it_trains_as_with_ddp_and_resumes(tmp_path):
    _, expected = train(tmp_path / "ddp")
    trainer, losses = train(tmp_path / "fsdp", **FSDP)
    assert isinstance(trainer.model, fullshard.FSDPModule)
    assert losses == pytest.approx(expected, rel=1e-4)
    _, resumed = train(tmp_path / "fsdp", seed=1, resume=tmp_path / "fsdp" / "checkpoint-2", **FSDP)
    assert resumed == losses
