"""Whether the plans of ``fullshard.fit`` fit: what is predicted beside what the kernel counts, and beside other plans.

    python -m benchmarks.fitting [MODEL ...]      # peaks of a step for budgets from roomy to the smallest
    python -m benchmarks.fitting container [MODEL ...]   # 20 more models, in the memory that a container counts
    python -m benchmarks.fitting disk [MODEL ...]   # the same below the smallest, with a disk, as far as that goes
    python -m benchmarks.fitting speed [MODEL ...]  # seconds of a step beside those of plans that were made by hand

For each model, number of ranks and transport a plan is made for each budget, on the ranks themselves, and trains some
steps with AdamW. A budget below the smallest plan must be refused; the bound in the refusal is compared with the peak
of that plan.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from benchmarks import resident
from benchmarks.ranks import run_ranks
from fullshard.report.explain import ADAM
from fullshard.report.plan import Plan, PlannedGroup
from fullshard.report.search import DoesNotFitError, Search
from fullshard.text import bytes_text, seconds_text, table

_STEPS, _ROUNDS = 3, 7
_WORLDS = ((1, "p2p"), (2, "p2p"), (2, "shm"), (4, "p2p"), (4, "shm"))
_HEAD = ["model", "ranks", "transport", "budget", "predicted", "measured", "ratio", "fits", "plan"]
#: Budgets between the smallest plan (0) and the fastest one (1).
_BETWEEN = (1.0, 0.5, 0.0)


@dataclass(frozen=True)
class Case:
    """A model and its batch, small or of the size that is measured; and what its forward reads of tensors."""

    build: Callable[[bool], nn.Module]
    batch: Callable[[bool], Any]
    values: float | None = None


class Mixture(nn.Module):
    """A transformer's layer with experts, each of which sees every token, weighted by a router."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        best = self.router(y).softmax(-1)
        weights = torch.where(best >= best.topk(2).values[..., -1:], best, 0.0)
        return x + sum(weights[..., at : at + 1] * expert(y) for at, expert in enumerate(self.experts))


class Mixtures(nn.Module):
    """An embedding, mixtures of experts and a head."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(Mixture(width, 4) for _ in range(blocks))
        self.head = nn.Linear(width, 1024)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def _config(cls: Any, **fields: Any) -> Any:
    return cls(**fields)


def _llama(is_small: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers = (64, 2) if is_small else (384, 6)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers, "vocab_size": 1024}
    return LlamaForCausalLM(_config(LlamaConfig, **sizes, num_attention_heads=4, use_cache=False))


def _t5(is_small: bool) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    width, layers = (64, 2) if is_small else (384, 4)
    sizes = {"d_model": width, "d_ff": 3 * width, "d_kv": width // 4, "num_layers": layers, "num_heads": 4}
    sizes["decoder_start_token_id"] = 0
    return T5ForConditionalGeneration(_config(T5Config, **sizes, vocab_size=1024, use_cache=False))


def _vit(is_small: bool) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    width, layers = (64, 2) if is_small else (384, 6)
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, "image_size": 64}
    return ViTForImageClassification(_config(ViTConfig, **sizes, patch_size=8, num_attention_heads=4, num_labels=8))


def _resnet(is_small: bool) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = [8, 16] if is_small else [64, 128, 256, 512]
    depths = [2] * len(sizes)
    config = _config(
        ResNetConfig, embedding_size=sizes[0], hidden_sizes=sizes, depths=depths, layer_type="basic", num_labels=8
    )
    return ResNetForImageClassification(config)


def _lora(is_small: bool) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "gate_proj"], task_type="CAUSAL_LM")
    return get_peft_model(_llama(is_small), adapters)


def _tokens(sequences: int, is_small: bool) -> dict[str, Tensor]:
    tokens = torch.randint(0, 1024, (1, 8) if is_small else (sequences, 128))
    return {"input_ids": tokens, "labels": tokens}


def _images(count: int, is_small: bool) -> dict[str, Tensor]:
    count = 2 if is_small else count
    return {"pixel_values": torch.randn(count, 3, 64, 64), "labels": torch.zeros(count, dtype=torch.long)}


CASES = {
    "Llama": Case(_llama, partial(_tokens, 4)),
    "T5": Case(_t5, partial(_tokens, 4)),
    "ViT": Case(_vit, partial(_images, 8)),
    "ResNet": Case(_resnet, partial(_images, 16)),
    "experts": Case(
        lambda is_small: Mixtures(64 if is_small else 256, 2 if is_small else 4),
        lambda is_small: torch.randint(0, 1024, (1, 8) if is_small else (4, 128)),
    ),
    "LoRA": Case(_lora, partial(_tokens, 4)),
}


def _hf(kind: str, model: str, batch: Callable[[bool], Any], values: float | None = None, **sizes: Any) -> Case:
    """A model of transformers. A size is one for both, or a pair: small, and measured."""

    def build(is_small: bool) -> nn.Module:
        import transformers

        found = {name: size[not is_small] if isinstance(size, tuple) else size for name, size in sizes.items()}
        made: nn.Module = getattr(transformers, model)(getattr(transformers, f"{kind}Config")(**found))
        return made

    return Case(build, batch, values)


class Recurrent(nn.Module):
    """An embedding, an LSTM and a head."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(words, width), nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        scores = self.head(self.lstm(self.embedding(tokens))[0])
        return nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())


class Recommender(nn.Module):
    """A table for each feature, and a perceptron over what they give."""

    def __init__(self, tables: int, rows: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, 64) for _ in range(tables))
        self.top = _perceptron(64 * tables, 512, 2, 1)

    def forward(self, features: Tensor) -> Tensor:
        found = [table(features[:, at]) for at, table in enumerate(self.tables)]
        return self.top(torch.cat(found, -1)).square().mean()


class Towers(nn.Module):
    """Towers that see different inputs, whose outputs are compared."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.towers = nn.ModuleList(_perceptron(width, width, layers, 64) for _ in range(2))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        ours, theirs = (tower(x) for tower, x in zip(self.towers, (left, right), strict=True))
        return nn.functional.cross_entropy(ours @ theirs.T, torch.arange(len(left)))


class UNet(nn.Module):
    """Convolutions down and up, with skips."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        sizes = [3, *(width << level for level in range(levels))]
        self.down = nn.ModuleList(_convolutions(a, b) for a, b in itertools.pairwise(sizes))
        self.up = nn.ModuleList(_convolutions(a + b, a) for a, b in reversed([*itertools.pairwise(sizes[1:])]))
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept, y = [], x
        for down in self.down:
            y = down(y)
            kept.append(y)
            y = nn.functional.max_pool2d(y, 2)
        y = kept.pop()
        for up in self.up:
            y = up(torch.cat([nn.functional.interpolate(y, scale_factor=2.0), kept.pop()], 1))
        return nn.functional.mse_loss(self.last(y), x)


def _perceptron(width: int, inside: int, layers: int, out: int) -> nn.Sequential:
    sizes = [width, *[inside] * layers]
    parts = [nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*parts, nn.Linear(inside, out))


def _convolutions(before: int, after: int, groups: int = 1) -> nn.Sequential:
    first = nn.Conv2d(before, after, 3, padding=1, groups=groups)
    return nn.Sequential(first, nn.BatchNorm2d(after), nn.ReLU(), nn.Conv2d(after, after, 3, padding=1), nn.ReLU())


class Scored(nn.Sequential):
    """Modules whose outputs' mean square is the loss."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)  # type: ignore[no-untyped-call]
        return getattr(y, "last_hidden_state", y).square().mean()


def _scored(case: Case) -> Case:
    return replace(case, build=lambda is_small: Scored(case.build(is_small)))


def _pixels(count: int, size: int, is_small: bool) -> Tensor:
    return torch.randn(2 if is_small else count, 3, size, size)


def _clip(is_small: bool) -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    width, layers = (64, 1) if is_small else (320, 4)
    sizes = {
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
    }
    text = {**sizes, "vocab_size": 1024, "eos_token_id": 1023, "max_position_embeddings": 128}
    return CLIPModel(CLIPConfig(text_config=text, vision_config={**sizes, "image_size": 64, "patch_size": 8}))


_GPT: dict[str, Any] = {"n_embd": (64, 384), "n_layer": (2, 6), "n_head": 4}
_SIZES: dict[str, Any] = {"hidden_size": (64, 320), "intermediate_size": (128, 960), "num_hidden_layers": (2, 5)}
_SIZES["num_attention_heads"] = 4
_VOCABULARY: dict[str, Any] = {**_SIZES, "vocab_size": 1024}
_text, _image = partial(_tokens, 4), partial(_pixels, 8, 64)
#: Models on which nothing was tuned.
UNTUNED: dict[str, Case] = {
    "GPT-2, small": _hf("GPT2", "GPT2LMHeadModel", _text, n_embd=(64, 192), n_layer=4, n_head=4, vocab_size=1024),
    "GPT-2": _hf("GPT2", "GPT2LMHeadModel", _text, **_GPT, vocab_size=1024, use_cache=False),
    "60,000 words": _hf("GPT2", "GPT2LMHeadModel", _text, **{**_GPT, "n_layer": 2}, vocab_size=(1024, 60_000)),
    "BERT": _hf("Bert", "BertForMaskedLM", _text, **_VOCABULARY),
    "Mistral": _hf("Mistral", "MistralForCausalLM", _text, **_VOCABULARY, num_key_value_heads=2, use_cache=False),
    "Qwen2": _hf("Qwen2", "Qwen2ForCausalLM", _text, **_VOCABULARY, num_key_value_heads=2, tie_word_embeddings=True),
    "Mixtral": _hf("Mixtral", "MixtralForCausalLM", _text, **_VOCABULARY, num_key_value_heads=2, num_local_experts=4),
    "OPT": _hf(
        "OPT",
        "OPTForCausalLM",
        _text,
        0,
        hidden_size=(64, 320),
        ffn_dim=(128, 960),
        num_hidden_layers=(2, 5),
        num_attention_heads=4,
        vocab_size=1024,
        word_embed_proj_dim=(64, 320),
    ),
    "DINOv3": _scored(_hf("DINOv3ViT", "DINOv3ViTModel", _image, **_SIZES, image_size=64, patch_size=8)),
    "ConvNext": _scored(
        _hf(
            "ConvNext",
            "ConvNextModel",
            _image,
            depths=[2, 2, 2],
            num_stages=3,
            hidden_sizes=([16, 32, 64], [64, 128, 256]),
        )
    ),
    "CLIP": Case(
        _clip,
        lambda small: {
            "input_ids": _text(small)["input_ids"],
            "return_loss": True,
            "pixel_values": _pixels(4, 64, small)[: 1 if small else 4],
        },
    ),
    "LSTM": Case(lambda small: Recurrent(1024, 64 if small else 512), lambda small: _text(small)["input_ids"]),
    "LSTM, many words": Case(
        lambda small: Recurrent(1024 if small else 20_000, 64 if small else 256),
        lambda small: _text(small)["input_ids"],
    ),
    "recommender": Case(
        lambda small: Recommender(4 if small else 8, 64 if small else 20_000),
        lambda small: torch.randint(0, 64, (4 if small else 512, 4 if small else 8)),
    ),
    "towers": Case(
        lambda small: Towers(64 if small else 768, 2 if small else 6),
        lambda small: (torch.randn(512, 64 if small else 768), torch.randn(512, 64 if small else 768)),
    ),
    "perceptron": Case(
        lambda small: Scored(_perceptron(64 if small else 1024, 64 if small else 1024, 8, 64)),
        lambda small: torch.randn(64, 64 if small else 1024),
    ),
    "wide batch": Case(
        lambda small: Scored(_perceptron(64, 128, 6, 64)), lambda small: torch.randn(64 if small else 16384, 64)
    ),
    "VGG": Case(
        lambda small: Scored(*(_convolutions(*each) for each in ((3, 32), (32, 64), (64, 8 if small else 256)))),
        partial(_pixels, 4, 64),
    ),
    "grouped convolutions": Case(
        lambda small: Scored(_convolutions(3, 64), *(_convolutions(64, 64, 64) for _ in range(2 if small else 8))),
        partial(_pixels, 4, 64),
    ),
    "U-Net": Case(lambda small: UNet(8 if small else 48, 3), partial(_pixels, 4, 64)),
}


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] == ["container"]:
        return _container(arguments[1:] or [*UNTUNED])
    if arguments[:1] == ["speed"]:
        return _speed(arguments[1:] or ["Llama", "ResNet"])
    has_disk = arguments[:1] == ["disk"]
    rows = []
    for name in arguments[has_disk:] or CASES:
        for ranks, transport in _WORLDS:
            for plan in run_ranks(make_plans, ranks, name, transport, has_disk)[0]:
                measured = max(run_ranks(measure_peak, ranks, name, transport, plan))
                rows.append(
                    [
                        name,
                        str(ranks),
                        transport,
                        bytes_text(plan.memory),
                        bytes_text(plan.needed),
                        bytes_text(measured),
                        f"{plan.needed / measured:.3f}",
                        "yes" if measured <= plan.memory else f"by {bytes_text(measured - plan.memory)} not",
                        short(plan),
                    ]
                )
                print(table((), rows[-1:]), flush=True)
    print(table(_HEAD, rows))


def _container(names: list[str]) -> None:
    """What a container counts, freed memory that the heap keeps included, beside the prediction and the budget."""
    rows = []
    for name in names:
        for ranks, transport in ((1, "p2p"), (2, "shm")):
            for plan in run_ranks(make_plans, ranks, name, transport)[0]:
                measured = max(run_ranks(measure_peak, ranks, name, transport, plan, True))
                numbers = [bytes_text(round(each)) for each in (plan.memory, plan.needed, measured)]
                above = measured - plan.memory
                fits = "yes" if above <= 0 else f"no, by {bytes_text(round(above))}"
                rows.append([name, str(ranks), transport, *numbers, f"{plan.needed / measured:.3f}", fits, short(plan)])
                print(table((), rows[-1:]), flush=True)
    print(table(_HEAD, rows))


def short(plan: Plan) -> str:
    """A plan in a few words."""
    freed, again = sum(group.reshards for group in plan.groups), len(plan.recomputed)
    shares = f", {plan.offloaded_state:.0%} of state and {plan.offloaded_parameters:.0%} of parameters offloaded"
    text = f"{len(plan.groups)} groups, {freed} freed, {again} recomputed, {plan.prefetch} ahead"
    return text + (shares if plan.offloaded_state else "")


def make_plans(name: str, transport: str, has_disk: bool = False) -> list[Plan]:
    """The plan for each budget; the smallest budget is the bound of a refusal. With a disk the largest one is the
    smallest without it."""
    search = _search(name, transport, has_disk=has_disk)
    most, least = search.plan(2**40).needed, _bound(search)
    if has_disk:
        most = _bound(_search(name, transport))
    return [search.plan(round(least + share * (most - least))) for share in _BETWEEN[dist.get_world_size() > 1 :]]


def _bound(search: Search) -> int:
    """The smallest memory, as a refusal says it."""
    try:
        raise AssertionError(search.plan(2**20))
    except DoesNotFitError as error:
        return error.smallest


def _search(name: str, transport: str, is_small: bool = False, has_disk: bool = False) -> Search:
    os.environ["FULLSHARD_TRANSPORT"] = transport
    case, precision = (CASES | UNTUNED)[name], fullshard.MixedPrecisionPolicy()
    disk = tempfile.gettempdir() if has_disk else ""
    return Search(case.build(is_small), case.batch(is_small), ADAM, None, None, precision, {}, disk, case.values)


def measure_peak(name: str, transport: str, plan: Plan, in_container: bool = False) -> float:
    """Bytes at the peak of a step, above what the process had before the model was built; as a container counts them,
    freed memory that the heap keeps and tables of pages are among them."""
    if not in_container:
        resident.return_what_is_freed()
    case = (CASES | UNTUNED)[name]
    _trained(case, True, _search(name, transport, is_small=True).plan(2**40))()  # what a first step imports and keeps
    resident.settle()
    before = resident.bytes_now() + in_container * resident.page_tables()
    train = _trained(case, False, plan)
    for _ in range(_STEPS - 1):
        train()
    with resident.Peak() as step:
        train()
    return step.bytes + in_container * resident.page_tables() - before


def _trained(case: Case, is_small: bool, plan: Plan) -> Callable[[], object]:
    torch.manual_seed(0)
    model, batch = case.build(is_small), case.batch(is_small)
    plan.apply(model)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-4)

    def train() -> None:
        output = model(**batch) if isinstance(batch, dict) else model(*batch if isinstance(batch, tuple) else [batch])
        (output if isinstance(output, Tensor) else output.loss).backward()
        del output
        optimizer.step()
        optimizer.zero_grad()

    return train


def _speed(names: list[str]) -> None:
    """Each planned step beside the steps of plans that were made by hand and that are predicted to fit as well."""
    rows = []
    for name in names:
        for transport in ("p2p", "shm"):
            found = run_ranks(_measure_speed, 2, name, transport)[0]
            planned, best = found["fit"], min((s for way, s in found.items() if way != "fit"), default=math.nan)
            others = ", ".join(f"{way} {seconds_text(seconds)}" for way, seconds in found.items() if way != "fit")
            rows.append([name, transport, seconds_text(planned), f"{planned / best:.2f}", others])
            print(table((), rows[-1:]), flush=True)
    print(table(["model", "transport", "fit", "by the best", "by hand"], rows, "lllrl"))


def _measure_speed(name: str, transport: str) -> dict[str, float]:
    """Seconds of a step by plan, in half of the memory between the smallest plan and the fastest: the median of the
    steps, in which the plans take turns."""
    search = _search(name, transport)
    memory = round((_bound(search) + search.plan(2**40).needed) / 2)
    plan = search.plan(memory)
    blocks = search.blocks
    names = [(block,) for block in blocks] + [("",)]
    plans = {"fit": plan}
    for freed in (False, True):
        groups = tuple(PlannedGroup(modules, freed and modules != ("",)) for modules in names)
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            again = tuple(blocks[: round(share * len(blocks))]) if search.recomputes else ()
            stage = 3 if freed else 2
            other = replace(plan, zero_stage=stage, groups=groups, recomputed=again, prefetch=1)
            if search.agreed(search.checked(other).most) <= memory:
                plans[f"{'freed' if freed else 'whole'}, {len(again)} recomputed"] = other
    trained = {way: _trained(CASES[name], False, each) for way, each in plans.items()}
    seconds: dict[str, list[float]] = {way: [] for way in trained}
    for number in range(_ROUNDS + 2):
        for way, train in trained.items():
            dist.barrier()
            begin = time.perf_counter()
            train()
            seconds[way] += [time.perf_counter() - begin] * (number > 1)
    return {way: sorted(found)[_ROUNDS // 2] for way, found in seconds.items()}


if __name__ == "__main__":
    main()
