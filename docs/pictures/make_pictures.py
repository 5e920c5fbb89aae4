"""Draws ``memory.png`` and ``groups.png``, and writes two explanations into `docs/how-to/explain.md`.

    python docs/pictures/make_pictures.py

Needs matplotlib and transformers. Each table stands in the page between ``<!-- begin NAME -->`` and
``<!-- end NAME -->``.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fullshard
from fullshard.report.explain import Explanation
from fullshard.report.pictures import MEMORY
from fullshard.report.tables import estimate_text

PICTURES = Path(__file__).parent
PAGE = PICTURES.parent / "how-to" / "explain.md"
_EXAMPLE = runpy.run_path(str(PICTURES.parents[1] / "examples" / "model.py"))


def example() -> nn.Module:
    """The model of ``examples/train.py``."""
    model: nn.Module = _EXAMPLE["GPT"](_EXAMPLE["MODELS"]["small"])
    return model


def explained() -> Explanation:
    """The explanation of the example."""
    batch = torch.empty(8, 129, dtype=torch.long, device="meta")
    return fullshard.explain(example, ranks=4, batch=batch, loss=_EXAMPLE["loss_of"], device_memory="80GB")


def llama() -> nn.Module:
    """Llama 3 with 70 B parameters, from its sizes, with activation checkpointing and mixed precision."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 64, "num_key_value_heads": 8}
    sizes = {"vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    model.gradient_checkpointing_enable()
    low = fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (model.model.embed_tokens, model.lm_head):
        fullshard.fully_shard(module, mp_policy=low)
    return fullshard.fully_shard_blocks(model, mp_policy=low)


def tokens() -> dict[str, torch.Tensor]:
    """A batch of one rank for :func:`llama`."""
    ids = torch.empty(1, 8192, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


def small_llama() -> nn.Module:
    """Llama 3 with 8 B parameters, with a group for each layer, one for the embedding and one for the head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    sizes = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    for module in (model.model.embed_tokens, *model.model.layers, model.lm_head):
        fullshard.fully_shard(module)
    return fullshard.fully_shard(model)


def memory_of(explanation: Explanation) -> dict[str, float]:
    """The memory of a rank at the peak of backward, in GiB, by part."""
    found = dict.fromkeys(("parameters", "gradients", "optimizer", "other"), 0.0)
    names = {"shards": "parameters", "gradients": "gradients", "optimizer state": "optimizer"}
    backward = next(phase for phase in explanation.memory if phase.name.startswith("backward"))
    for what, count, nbytes in backward.parts:
        found[names.get(what, "other")] += count * nbytes / 2**30
    return found


def draw_memory(file: Path) -> None:
    """Draws the memory of a rank: with DDP, which keeps everything whole, and sharded over more and more ranks.

    DDP is shown at its least: with ``gradient_as_bucket_view``. Without it, its buckets hold the gradients once more.
    """
    import matplotlib
    from matplotlib.figure import Figure

    whole = memory_of(fullshard.explain(small_llama, ranks=1))
    whole |= {"gradients": whole["parameters"], "other": 0.0}  # DDP has all gradients at its peak, and gathers nothing
    bars = {"DDP, on any\nnumber of ranks": whole}
    bars |= {f"fullshard, {n} ranks": memory_of(fullshard.explain(small_llama, ranks=n)) for n in (8, 64)}
    figure = Figure(figsize=(10, 2.5), layout="constrained")
    axes: Any = figure.add_subplot()
    labels = ("parameters", "gradients", "optimizer state (AdamW)", "whole layers, while they are in use")
    left = [0.0] * len(bars)
    for part, label in zip(whole, labels, strict=True):
        sizes = [each[part] for each in bars.values()]
        axes.barh([*bars], sizes, 0.62, left, label=label, **MEMORY[part].bar)
        left = [before + size for before, size in zip(left, sizes, strict=True)]
    for row, total in enumerate(left):
        axes.text(total + 1, row, f"{total:.0f} GiB", va="center", fontweight="bold")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * max(left))
    axes.set_xlabel("GiB on a rank at the peak of backward, without activations (Llama 3, 8 B parameters, float32)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.legend(loc="outside upper center", ncols=len(labels), frameon=False)
    with matplotlib.rc_context({"hatch.linewidth": 0.5}):
        figure.savefig(file, dpi=110)


def shown(name: str, text: str, page: str) -> str:
    """``page`` with another text in the block of ``name``."""
    part = rf"(<!-- begin {name} -->\n\n```\n).*?(```\n\n<!-- end {name} -->)"
    changed, count = re.subn(part, rf"\g<1>{text}\n\g<2>", page, flags=re.DOTALL)
    assert count == 1, f"the page has {count} places for {name}"
    return changed


def shortened(text: str) -> str:
    """The paragraphs of the example's explanation that the page shows."""
    starts = ("GPT", "group", "Memory", "Fits", "a step")
    return "\n\n".join(paragraph for paragraph in text.split("\n\n") if paragraph.startswith(starts))


def main() -> None:
    draw_memory(PICTURES / "memory.png")
    page, small = PAGE.read_text(), explained()
    small.picture(PICTURES / "groups.png")
    page = shown("example", shortened(str(small)), page)
    large = fullshard.explain(llama, ranks=1024, batch=tokens())
    network = {"bandwidth": 150e9, "ranks_per_node": 8, "node_bandwidth": 400e9, "latency": 5e-6}
    estimate = large.estimate(peak_flops=989e12, efficiency=0.5, **network)  # type: ignore[arg-type]
    PAGE.write_text(shown("llama", estimate_text(estimate), page))


if __name__ == "__main__":
    main()
