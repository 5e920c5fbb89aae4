"""Each message that docs/how-to/troubleshooting.md has in a first column is given: by fullshard's source, or by torch
for the mistake that the page names."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from tests import test_raw_errors as raw
from tests.harness import World, ranks
from tests.harness.models import shard_each

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "how-to" / "troubleshooting.md"
X = torch.ones(2, 4)


class Keeps(nn.Linear):
    """Leaves what it computes in an attribute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = x @ self.weight
        return super().forward(x)


def keeper() -> Any:
    model = nn.Sequential(*(Keeps(4, 4) for _ in range(4)))
    return shard_each(*model, model)


def use_what_forward_left() -> None:
    model = keeper()
    model(X)
    model[1].kept.sum().backward()  # of the first block there would be no gradient to compute from the weight


def assign_an_element() -> None:
    raw.sharded().blocks[0][0].weight.data[0] = 0


def save_in_safetensors() -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file(raw.sharded().state_dict(), "never written")


def differentiate_by_hand() -> None:
    model = raw.sharded()
    torch.autograd.grad(model(raw.X).sum(), [*model.parameters()])


def batch_norm_in_the_wrapper() -> None:
    policy = fullshard.MixedPrecision(param_dtype=torch.bfloat16)
    fullshard.FullyShardedDataParallel(nn.BatchNorm1d(4), mixed_precision=policy)(X)


def two_stores() -> None:
    first = dist.TCPStore("localhost", 0, 1, is_master=True)
    dist.TCPStore("localhost", first.port, 1, is_master=True)


def ask_for_too_much_shared_memory() -> None:
    torch.UntypedStorage._new_shared(1 << 50)


#: What torch says, and the mistake. (The launcher's own words are tested below.)
TORCHS: dict[str, Callable[[], Any]] = {
    "EADDRINUSE": two_stores,
    "appears to not have been used in the graph": differentiate_by_hand,
    "autograd.grad": differentiate_by_hand,
    "c10d": raw.broadcast,
    "expected scalar type BFloat16 but found Float": batch_norm_in_the_wrapper,
    "got mixed torch.Tensor and DTensor": raw.write_a_plain_tensor,
    "invalid python storage": save_in_safetensors,
    "is not supported for tensor subclasses": lambda: raw.sharded().scale.tolist(),
    "modified by an inplace operation": use_what_forward_left,
    "unable to allocate shared memory": ask_for_too_much_shared_memory,
    "unsupported format string passed to DTensor": raw.print_a_norm,
}
#: From torch 2.15 on, it loses what is assigned to elements of a sharded tensor.
LOSES_ELEMENTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
NO_STRATEGY = "does not have a sharding strategy registered"
if not LOSES_ELEMENTS:
    TORCHS[NO_STRATEGY] = assign_an_element


@ranks(2)
@pytest.mark.skipif(not LOSES_ELEMENTS, reason="torch before 2.15 refuses to assign elements")
def test_torch_loses_elements_that_are_assigned(world: World) -> None:
    weight = raw.sharded().blocks[0][0].weight
    before = weight.full_tensor().clone()
    weight.data[0] = 7
    assert torch.equal(weight.full_tensor(), before)


@ranks(2)
@pytest.mark.parametrize("message", TORCHS)
def test_torch_says_so(world: World, message: str) -> None:
    with pytest.raises(Exception, match=re.escape(message) if message != "autograd.grad" else "graph"):
        TORCHS[message]()


def test_torch_says_what_a_launcher_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="environment variable RANK expected"):
        dist.init_process_group()


#: Messages that other tests show: one that the wrapper gives, and one of gloo that ends a process.
ELSEWHERE = {"environment variable RANK expected", "EnforceNotMet", NO_STRATEGY}
#: Messages that are put together, and their parts.
COMPOSED = {
    "the ranks do not shard the same parameters": ["do not shard the same parameters"],
    "was built before fully_shard": ["was built …", "before fully_shard"],
}


def messages() -> list[str]:
    """What stands in backticks in the first column of the tables, but for code."""
    rows = re.findall(r"^\| ([^|]*) \|", PAGE.read_text(), re.MULTILINE)
    found = (message for row in rows for message in re.findall(r"`([^`]+)`", row))
    return [each for each in dict.fromkeys(found) if " " in each or each in TORCHS]


def own_texts() -> Iterator[str]:
    """The texts in the source, with spaces and what is filled in as one dot each."""
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_each_message_is_given() -> None:
    texts = "\n".join(own_texts())
    shown = messages()
    assert len(shown) > 25
    own = {each: COMPOSED.get(each, [each]) for each in shown if each not in TORCHS.keys() | ELSEWHERE}
    assert not [each for each, parts in own.items() if not all(part in texts for part in parts)]
