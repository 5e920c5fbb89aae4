"""Models as people bring them: transformers' own classes, tiny and random, trained sharded and unsharded.

Every model is built from a config, without a download, and sharded as its user would: the repeated blocks each for
themselves, then the model. What it computes is compared with the same training unsharded, and with torch's own
`fully_shard` where that supports the case; see `tests.harness.compare` for the rule. There is no dropout, and on two
ranks there is no rounding either: a sum of two gradients is rounded once, however it is made.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fullshard
from fullshard.wrap import repeated_blocks
from tests.harness import World, ranks
from tests.harness.compare import Batch, Call, Training, compare
from tests.harness.models import seeded

VOCABULARY = 29
LENGTH = 7
SIZES: dict[str, Any] = {
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.2,
}
T5_SIZES: dict[str, Any] = {
    "d_model": 12,
    "d_kv": 6,
    "d_ff": 18,
    "num_heads": 2,
    "vocab_size": VOCABULARY,
    "dropout_rate": 0.0,
}
NO_SPECIAL_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def hf() -> Any:
    """transformers, which takes a second to import."""
    return importlib.import_module("transformers")


def llama() -> nn.Module:
    """A Llama, with fewer key heads than query heads."""
    config = hf().LlamaConfig(**SIZES, **NO_SPECIAL_TOKENS, vocab_size=VOCABULARY, num_key_value_heads=1)
    return hf().LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    """A GPT-2, whose head is its embedding."""
    sizes: dict[str, Any] = {"n_embd": 12, "n_layer": 2, "n_head": 2, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    no_dropout: dict[str, Any] = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    return hf().GPT2LMHeadModel(hf().GPT2Config(**sizes, **no_dropout, **NO_SPECIAL_TOKENS, initializer_range=0.2))


def t5() -> nn.Module:
    """A T5, of which encoder, decoder and head have one embedding."""
    return hf().T5ForConditionalGeneration(hf().T5Config(**T5_SIZES, num_layers=2))


def mixtral() -> nn.Module:
    """A Mixtral, whose experts lie in one parameter, with the loss that balances them."""
    experts: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    config = hf().MixtralConfig(**SIZES, **experts, vocab_size=VOCABULARY, num_key_value_heads=1)
    return hf().MixtralForCausalLM(config)


def switch_transformers() -> nn.Module:
    """A Switch Transformer, whose experts are modules of their own: so many that some get no token."""
    sizes: dict[str, Any] = {
        **T5_SIZES,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_experts": 8,
        "expert_capacity": 4,
    }
    sparse: dict[str, Any] = {
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "router_jitter_noise": 0.0,
    }
    return hf().SwitchTransformersForConditionalGeneration(hf().SwitchTransformersConfig(**sizes, **sparse))


def bert() -> nn.Module:
    """A BERT, whose head is its embedding; its keys' biases are frozen."""
    config = hf().BertConfig(**SIZES, **NO_DROPOUT, vocab_size=VOCABULARY, max_position_embeddings=LENGTH)
    model = hf().BertForMaskedLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("self.key.bias"):  # its gradient is zero but for rounding: there is nothing to compare
            parameter.requires_grad_(False)
    return model


def vit() -> nn.Module:
    """A ViT, without biases of query, key and value, for the reason given for BERT's."""
    config = hf().ViTConfig(**SIZES, **NO_DROPOUT, image_size=8, patch_size=4, num_labels=5, qkv_bias=False)
    return hf().ViTForImageClassification(config)


def mamba() -> nn.Module:
    """A Mamba: a state space in place of attention, and parameters that stand in no layer of torch's."""
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 12, "state_size": 4, "num_hidden_layers": 2}
    return hf().MambaForCausalLM(hf().MambaConfig(**sizes, **NO_SPECIAL_TOKENS, initializer_range=0.2))


def token_ids(seed: int, *shape: int) -> Tensor:
    """Tokens from all of the vocabulary."""
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def text(seed: int) -> Batch:
    """Two pieces of text."""
    return (token_ids(seed, 2, LENGTH),)


def translation(seed: int) -> Batch:
    """Two texts with their mask, and two others to write: what the decoder sees of them, and all of them."""
    source, target = token_ids(seed, 2, LENGTH), token_ids(seed + 1000, 2, LENGTH - 2)
    return source, torch.ones_like(source), target.roll(1, 1), target


def masked_text(seed: int) -> Batch:
    """Two texts with a token hidden, and all of them."""
    ids = token_ids(seed, 2, LENGTH)
    return ids.index_fill(1, torch.tensor([2]), 0), ids


def images(seed: int) -> Batch:
    """Two pictures and their classes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, 8, 8, generator=generator), torch.randint(5, (2,), generator=generator)


def next_token_loss(call: Call, batch: Batch) -> Tensor:
    """How well a causal model predicts its own input, and what it adds for the balance of its experts."""
    (ids,) = batch
    output = call(ids)
    loss = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    balance = getattr(output, "aux_loss", None)
    return loss if balance is None else loss + 0.1 * balance


def label_loss(call: Call, batch: Batch) -> Tensor:
    """How well a model predicts the labels, which come last in its batch."""
    *inputs, labels = batch
    return F.cross_entropy(call(*inputs).logits.flatten(0, -2), labels.flatten())


def sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """Plain SGD: its steps are as large as the gradients are."""
    return torch.optim.SGD(parameters, lr=0.1)


def shard_blocks(fsdp: ModuleType, model: Any) -> None:
    """`fullshard.fully_shard_blocks`, or the same spelled out for torch."""
    if fsdp is fullshard:
        fullshard.fully_shard_blocks(model)
        return
    for block in repeated_blocks(model):
        fsdp.fully_shard(block)
    fsdp.fully_shard(model)


def shard_blocks_with_idle_experts(fsdp: ModuleType, model: Any) -> None:
    """As above, for ranks that use different parameters."""
    shard_blocks(fsdp, model)
    model.set_reduce_scatter_unused_params(True)


def with_blocks_that_sum_first(build: Callable[[], nn.Module]) -> nn.Module:
    """A reference that adds in the order in which blocks with a boundary do.

    The output of an encoder is read by each block of the decoder, and a block may read it twice. Its gradient is a sum
    over all uses; with a boundary around a block, over those inside of each first. That alone is worth 2e-6 of the
    largest entry after five steps, the same for torch and for fullshard; with the order made equal, both agree exactly.
    """

    def sum_first(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        def boundary(value: Any) -> Any:
            return value.view_as(value) if isinstance(value, Tensor) and value.requires_grad else value

        return tuple(map(boundary, args)), {name: boundary(value) for name, value in kwargs.items()}

    model = seeded(build)
    for block in repeated_blocks(model):
        block.register_forward_pre_hook(sum_first, with_kwargs=True)
    return model


def training(build: Callable[[], nn.Module], batch: Callable[[int], Batch] = text, **options: Any) -> Training:
    """Five steps, of a causal language model unless said otherwise."""
    settings: dict[str, Any] = {"loss": next_token_loss if batch is text else label_loss, "shard": shard_blocks}
    return Training(build=lambda: seeded(build), batch=batch, optimizer=sgd, steps=5, **{**settings, **options})


def encoder_decoder(build: Callable[[], nn.Module], **options: Any) -> Training:
    """Five steps of a model that reads one text and writes another."""
    return training(build, translation, build_reference=lambda: with_blocks_that_sum_first(build), **options)


CASES: dict[str, Callable[[], Training]] = {
    "Llama": lambda: training(llama),
    "GPT-2": lambda: training(gpt2),
    "T5": lambda: encoder_decoder(t5),
    "Mixtral": lambda: training(mixtral),
    "SwitchTransformers": lambda: encoder_decoder(
        switch_transformers, shard=shard_blocks_with_idle_experts, unused_are_zero=True
    ),
    "BERT": lambda: training(bert, masked_text),
    "ViT": lambda: training(vit, images),
    "Mamba": lambda: training(mamba),
}


@ranks(2)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("Llama", "T5", "BERT") else pytest.mark.slow) for name in CASES],
)
def test_trains_as_the_unsharded_model_does(world: World, name: str) -> None:
    compare(world, CASES[name]())


@ranks(2)
def test_its_layers_are_the_modules_that_are_sharded(world: World) -> None:
    model = fullshard.fully_shard_blocks(seeded(t5))
    names = [name for name, module in model.named_modules() if isinstance(module, fullshard.FSDPModule)]
    assert names == ["", *(f"{stack}.block.{at}" for stack in ("encoder", "decoder") for at in (0, 1))]


@ranks(2)
def test_some_experts_of_the_switch_transformer_are_used_by_one_rank_only(world: World) -> None:
    """So that the comparison above is about what it says."""
    case = CASES["SwitchTransformers"]()
    model = case.build()
    case.loss(model, case.micro(0, world.rank, world.size, 0)).backward()
    used = [name for name, parameter in model.named_parameters() if "expert_" in name and parameter.grad is not None]
    of_ranks: list[list[str]] = [[], []]
    dist.all_gather_object(of_ranks, used)
    assert set(of_ranks[0]) - set(of_ranks[1])
    assert set(of_ranks[1]) - set(of_ranks[0])


@ranks(2)
def test_gpt2_with_its_tied_embedding_and_head_in_two_groups(world: World) -> None:
    def shard(fsdp: ModuleType, model: Any) -> None:
        for module in (model.transformer.wte, *model.transformer.h, model.lm_head, model):
            fsdp.fully_shard(module)

    compare(world, training(gpt2, shard=shard), with_torch=False)  # torch refuses a tie between groups


@ranks(2)
def test_t5_with_its_shared_embedding_in_a_group_apart(world: World) -> None:
    def shard(fsdp: ModuleType, model: Any) -> None:
        for module in (model.shared, *model.encoder.block, *model.decoder.block, model.lm_head, model):
            fsdp.fully_shard(module)

    compare(world, replace(encoder_decoder(t5), shard=shard), with_torch=False)


@ranks(2)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_llama_with_its_own_checkpointing(world: World, use_reentrant: bool) -> None:
    def build() -> nn.Module:
        model: Any = llama()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        return model

    compare(world, training(build))


@ranks(2)
def test_llama_generates_what_it_generated_unsharded(world: World) -> None:
    model: Any = seeded(llama).eval()
    sharded = fullshard.fully_shard_blocks(seeded(llama).eval())
    fullshard.register_fsdp_forward_method(sharded, "generate")
    settings = {"max_new_tokens": 5, "do_sample": False}
    (ids,) = text(world.rank)
    assert torch.equal(sharded.generate(ids, **settings), model.generate(ids, **settings))
