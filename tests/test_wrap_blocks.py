"""The blocks that are found without a policy are those that a person would name."""

from __future__ import annotations

import importlib
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from fullshard.wrap import repeated_blocks
from tests.test_wrap import Block, Mlp, Model, names

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "vocab_size": 32,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "vocab_size": 32}
STAGES = {"hidden_sizes": [8, 16, 24, 32]}
WHISPER_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def hf() -> Any:
    """transformers, which takes a second to import."""
    return importlib.import_module("transformers")


#: For each model: how to make it, and how many blocks are where.
ZOO: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "Llama": (lambda: hf().LlamaForCausalLM(hf().LlamaConfig(**GROUPED)), {"model.layers.*": 3}),
    "GPT-2": (
        lambda: hf().GPT2LMHeadModel(hf().GPT2Config(n_embd=16, n_layer=3, n_head=2, vocab_size=32)),
        {"transformer.h.*": 3},
    ),
    "T5": (
        lambda: hf().T5ForConditionalGeneration(hf().T5Config(**T5, num_layers=2, num_decoder_layers=3)),
        {"encoder.block.*": 2, "decoder.block.*": 3},
    ),
    "T5 with one layer a stack": (
        lambda: hf().T5ForConditionalGeneration(hf().T5Config(**T5, num_layers=1)),
        {"encoder.block.*": 1, "decoder.block.*": 1},
    ),
    "BERT": (lambda: hf().BertForMaskedLM(hf().BertConfig(**SMALL)), {"bert.encoder.layer.*": 3}),
    "ViT": (lambda: hf().ViTModel(hf().ViTConfig(**SMALL, image_size=32)), {"*layer*.*": 3}),
    "CLIP": (
        lambda: hf().CLIPModel(hf().CLIPConfig(text_config=SMALL, vision_config={**SMALL, "image_size": 32})),
        {"text_model.encoder.layers.*": 3, "vision_model.encoder.layers.*": 3},
    ),
    "Whisper": (
        lambda: hf().WhisperModel(
            hf().WhisperConfig(d_model=16, encoder_layers=2, decoder_layers=3, vocab_size=32, **HEADS, **WHISPER_IDS)
        ),
        {"encoder.layers.*": 2, "decoder.layers.*": 3},
    ),
    "Mixtral": (
        lambda: hf().MixtralForCausalLM(hf().MixtralConfig(**GROUPED, num_local_experts=4)),
        {"model.layers.*": 3},
    ),
    "Switch (a dict of experts)": (
        lambda: hf().SwitchTransformersForConditionalGeneration(
            hf().SwitchTransformersConfig(**T5, num_layers=2, num_decoder_layers=2, num_experts=4)
        ),
        {"encoder.block.*": 2, "decoder.block.*": 2},
    ),
    "Mamba": (
        lambda: hf().MambaForCausalLM(hf().MambaConfig(hidden_size=16, num_hidden_layers=3, vocab_size=32)),
        {"backbone.layers.*": 3},
    ),
    "Jamba (one attention layer among Mamba layers)": (
        lambda: hf().JambaForCausalLM(
            hf().JambaConfig(
                **{**GROUPED, "num_hidden_layers": 4},
                attn_layer_period=4,
                attn_layer_offset=1,
                num_experts=4,
                use_mamba_kernels=False,
            )
        ),
        {"model.layers.*": 4},
    ),
    "MobileBERT (lists of feed-forwards in a layer)": (
        lambda: hf().MobileBertModel(hf().MobileBertConfig(**SMALL, intra_bottleneck_size=8, embedding_size=8)),
        {"encoder.layer.*": 3},
    ),
    "ResNet": (
        lambda: hf().ResNetModel(hf().ResNetConfig(embedding_size=8, **STAGES, depths=[3, 4, 6, 3])),
        {"encoder.stages.*.layers.*": 16},
    ),
    "Swin": (
        lambda: hf().SwinModel(hf().SwinConfig(embed_dim=16, depths=[2, 2, 6, 2], num_heads=[2] * 4, image_size=64)),
        {"encoder.layers.*.blocks.*": 12},
    ),
    "ConvNeXt": (
        lambda: hf().ConvNextModel(hf().ConvNextConfig(**STAGES, depths=[3, 3, 9, 3])),
        {"encoder.stages.*.layers.*": 18},
    ),
}


@pytest.fixture
def on_meta() -> Iterator[None]:
    with torch.device("meta"):
        yield


def places(model: nn.Module) -> dict[str, int]:
    """How many blocks stand at each name, with a star for numbers."""
    return dict(Counter(re.sub(r"\d+", "*", name) for name in names(model, repeated_blocks(model))))


@pytest.mark.usefixtures("on_meta")
@pytest.mark.parametrize(("make", "expected"), ZOO.values(), ids=ZOO)
def test_blocks_of_known_models_are_what_a_person_would_choose(
    make: Callable[[], nn.Module], expected: dict[str, int]
) -> None:
    found = places(make())
    if "*layer*.*" in expected:  # the name differs between releases of transformers
        found = {"*layer*.*": sum(number for name, number in found.items() if re.search(r"layers?\.\*$", name))}
    assert found == expected


class Bottleneck(nn.Module):
    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width_in, width, 3)
        self.bn = nn.BatchNorm2d(width)
        self.downsample = None
        if width_in != width:
            self.downsample = nn.Sequential(nn.Conv2d(width_in, width, 1), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn(self.conv(x))


def chain_of_bottlenecks(width_in: int, width: int, depth: int) -> list[nn.Module]:
    return [Bottleneck(width_in if i == 0 else width, width) for i in range(depth)]


class ResNet(nn.Module):
    """Stages as attributes, the way torchvision has them."""

    def __init__(self, *depths: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 7), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
        for i, depth in enumerate(depths, 1):
            self.add_module(f"layer{i}", nn.Sequential(*chain_of_bottlenecks(2 * 2**i, 4 * 2**i, depth)))
        self.fc = nn.Linear(64, 10)


class Attention(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.qkv(x)


class MoeLayer(nn.Module):
    """Hardly more than a list of experts."""

    def __init__(self, experts: int = 8) -> None:
        super().__init__()
        self.gate = nn.Linear(4, experts)
        self.experts = nn.ModuleList(Mlp() for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Residual(nn.Sequential):
    pass


class EncoderBlock(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Residual(nn.LayerNorm(4), Attention()), Residual(nn.LayerNorm(4), Mlp()))


class Tower(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


HAND_MADE: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "a list": (lambda: Model(Block(), Block()), {"blocks.*": 2}),
    "a root that is a Sequential": (lambda: nn.Sequential(nn.Embedding(8, 4), Block(), Block()), {"*": 2}),
    "a dict with numbers for names": (
        lambda: nn.ModuleDict({"layers": nn.ModuleDict({str(i): MoeLayer() for i in range(3)})}),
        {"layers.*": 3},
    ),
    "a dict that holds embeddings beside a list": (
        lambda: nn.ModuleDict(
            {
                "wte": nn.Embedding(8, 4),
                "wpe": nn.Embedding(8, 4),
                "h": nn.ModuleList([Block(), Block()]),
                "ln_f": nn.LayerNorm(4),
            }
        ),
        {"h.*": 2},
    ),
    "a dict of alike modules": (
        lambda: nn.ModuleDict({"one": Block(), "two": Block()}),
        {"one": 1, "two": 1},
    ),
    "a dict of towers": (
        lambda: nn.ModuleDict({"text": Tower(2), "image": Tower(3)}),
        {"text.layers.*": 2, "image.layers.*": 3},
    ),
    "layers that are little more than experts": (
        lambda: Model(MoeLayer(), MoeLayer(), MoeLayer()),
        {"blocks.*": 3},
    ),
    "two layers of experts of which the first has fewer": (
        lambda: Model(MoeLayer(4), MoeLayer(8)),
        {"blocks.*": 2},
    ),
    "a dense layer, then experts": (lambda: Model(Block(), MoeLayer(), MoeLayer()), {"blocks.*": 3}),
    "stages as attributes": (
        lambda: ResNet(2, 1, 3, 2),
        {"layer*.*": 8},
    ),
    "stages in a Sequential": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3),
            *(nn.Sequential(*chain_of_bottlenecks(4 * 2**i, 8 * 2**i, i + 1)) for i in range(3)),
            nn.Linear(4, 4),
        ),
        {"*.*": 6},
    ),
    "lists of lists": (
        lambda: Model(*(nn.ModuleList([Attention(), Mlp()]) for _ in range(3))),
        {"blocks.*.*": 6},
    ),
    "blocks that are Sequentials of residuals": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(*(EncoderBlock() for _ in range(3))), nn.Linear(4, 4)),
        {"*.*": 3},
    ),
    "blocks that are Sequentials without a class": (
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(3))),
        {"*": 3},
    ),
    "a perceptron": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8)),
        {"*": 2},
    ),
    "a user's layer without children": (lambda: nn.ModuleList([Scale(), Scale()]), {"*": 2}),
    "norms beside the blocks": (
        lambda: nn.ModuleDict({"b": Model(Block(), Block()), "norms": nn.ModuleList([Scale(), Scale()])}),
        {"b.blocks.*": 2},
    ),
    "parametrized layers beside the blocks": (
        lambda: nn.ModuleDict(
            {"b": Model(Block(), Block()), "convs": nn.ModuleList(weight_norm(nn.Conv1d(4, 4, 3)) for _ in range(3))}
        ),
        {"b.blocks.*": 2},
    ),
    "one block": (lambda: Model(Block()), {}),
    "no container": (lambda: Block(), {}),
    "no parameters": (lambda: nn.Sequential(nn.ReLU(), nn.ReLU()), {}),
}


@pytest.mark.parametrize(("make", "expected"), HAND_MADE.values(), ids=HAND_MADE)
def test_blocks_of_hand_made_models_are_what_a_person_would_choose(
    make: Callable[[], nn.Module], expected: dict[str, int]
) -> None:
    assert places(make()) == expected


class TestRepeatedBlocks:
    def test_parametrized_blocks_repeat(self) -> None:
        blocks = [weight_norm(Scaled()) for _ in range(3)]
        assert repeated_blocks(nn.Sequential(*blocks)) == blocks

    def test_a_block_in_two_places_is_found_once(self) -> None:
        shared = Block()
        model = Model(shared, Block(), shared)
        assert repeated_blocks(model) == [shared, model.blocks[1]]

    def test_blocks_come_in_order_of_registration(self) -> None:
        model = nn.Sequential(
            OrderedDict(first=Tower(2), lone=Model(Block()), middle=Block(), second=Tower(1), last=Block())
        )
        found = repeated_blocks(model)
        order = list(model.modules())
        assert found == sorted(found, key=order.index)
        assert len(found) == 5

    def test_no_block_is_inside_another(self) -> None:
        model = nn.ModuleList([Tower(2), Tower(2), Block(), MoeLayer()])
        found = repeated_blocks(model)
        assert found
        for block in found:
            assert not set(found) & set(list(block.modules())[1:])

    def test_only_what_can_be_called_is_found(self) -> None:
        class Shelf(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.block = Block()
                self.blocks = nn.ModuleList([Block()])

        model = nn.ModuleList([Shelf(), Shelf()])
        assert names(model, repeated_blocks(model)) == ["0.blocks.0", "1.blocks.0"]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) @ self.weight
