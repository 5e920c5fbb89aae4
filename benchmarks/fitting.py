"""Whether the plans of ``fullshard.fit`` fit: what is predicted beside what the kernel counts, and beside other plans.

    python -m benchmarks.fitting [MODEL ...]      # peaks of a step for budgets from roomy to the smallest
    python -m benchmarks.fitting disk [MODEL ...]   # the same below the smallest, with a disk, as far as that goes
    python -m benchmarks.fitting speed [MODEL ...]  # seconds of a step beside those of plans that were made by hand

For each model, number of ranks and transport a plan is made for each budget, on the ranks themselves, and trains some
steps with AdamW. A budget below the smallest plan must be refused; the bound in the refusal is compared with the peak
of that plan.
"""

from __future__ import annotations

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
from fullshard.report.text import bytes_text, seconds_text, table

_STEPS, _ROUNDS = 3, 7
_WORLDS = ((1, "p2p"), (2, "p2p"), (2, "shm"), (4, "p2p"), (4, "shm"))
#: Budgets between the smallest plan (0) and the fastest one (1).
_BETWEEN = (1.0, 0.5, 0.0)


@dataclass(frozen=True)
class Case:
    """A model and its batch, small or of the size that is measured."""

    build: Callable[[bool], nn.Module]
    batch: Callable[[bool], Any]


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


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] == ["speed"]:
        return _speed(arguments[1:] or ["Llama", "ResNet"])
    has_disk = arguments[:1] == ["disk"]
    head = ["model", "ranks", "transport", "budget", "predicted", "measured", "ratio", "fits", "plan"]
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
    print(table(head, rows))


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
    case, precision = CASES[name], fullshard.MixedPrecisionPolicy()
    disk = tempfile.gettempdir() if has_disk else ""
    return Search(case.build(is_small), case.batch(is_small), ADAM, None, None, precision, {}, disk)


def measure_peak(name: str, transport: str, plan: Plan) -> float:
    """Bytes at the peak of a step, above what the process had before the model was built."""
    resident.return_what_is_freed()
    case = CASES[name]
    _trained(case, True, _search(name, transport, is_small=True).plan(2**40))()  # what a first step imports and keeps
    resident.settle()
    before = resident.bytes_now()
    train = _trained(case, False, plan)
    for _ in range(_STEPS - 1):
        train()
    with resident.Peak() as step:
        train()
    return step.bytes - before


def _trained(case: Case, is_small: bool, plan: Plan) -> Callable[[], object]:
    torch.manual_seed(0)
    model, batch = case.build(is_small), case.batch(is_small)
    plan.apply(model)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-4)

    def train() -> None:
        output = model(**batch) if isinstance(batch, dict) else model(batch)
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
