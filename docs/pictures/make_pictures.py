"""Writes what `docs/how-to/explain.md` shows, the tables and the picture: ``python docs/pictures/make_pictures.py``.

Needs matplotlib and transformers. Each table stands in the page after a line ``<!-- NAME -->``.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from torch import nn

import fullshard

PICTURES = Path(__file__).parent
PAGE = PICTURES.parent / "how-to" / "explain.md"
_EXAMPLE = runpy.run_path(str(PICTURES.parents[1] / "examples" / "model.py"))


def example() -> nn.Module:
    """The model of ``examples/train.py``."""
    model: nn.Module = _EXAMPLE["GPT"](_EXAMPLE["MODELS"]["small"])
    return model


def llama() -> nn.Module:
    """Llama 3 with 8 B parameters, from its sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    sizes = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def shown(name: str, text: str, page: str) -> str:
    """``page`` with another text in the block that follows the line of ``name``."""
    changed, count = re.subn(rf"(<!-- {name} -->\n\n```\n).*?(```)", rf"\g<1>{text}\n\g<2>", page, flags=re.DOTALL)
    assert count == 1, f"the page has {count} places for {name}"
    return changed


def shortened(text: str) -> str:
    """The paragraphs of an explanation that the page shows of a large model: groups and advice."""
    starts = ("Llama", "group ", "Advice")
    return "\n\n".join(paragraph for paragraph in text.split("\n\n") if paragraph.startswith(starts))


def main() -> None:
    page = PAGE.read_text()
    small = fullshard.explain(example, ranks=4)
    small.picture(PICTURES / "groups.png")
    page = shown("example", str(small), page)
    page = shown("llama", shortened(str(fullshard.explain(llama, ranks=100_000))), page)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
