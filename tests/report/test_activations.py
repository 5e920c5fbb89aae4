"""What is predicted of a batch: activations and FLOPs, beside real forwards and beside arithmetic."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import resident
from benchmarks.models import Block, Transformer, Work
from benchmarks.ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard.report.activations import Activations
from fullshard.report.explain import explain
from tests.harness import World, ranks
from tests.report.cases import each_value

WORK = Work("traced", blocks=3, width=128, sequence=32, vocabulary=64)
#: Tokens, and the bytes of one activation of the model's width, of all its logits, and of a number for each token.
TOKENS = WORK.sequence
WIDE, LOGITS, NARROW = 4 * TOKENS * WORK.width, 4 * TOKENS * WORK.vocabulary, 4 * TOKENS
BLOCK_FLOPS = 2 * TOKENS * 12 * WORK.width**2 + 4 * TOKENS**2 * WORK.width  # matrices, and attention's two products
HEAD_FLOPS = 2 * TOKENS * WORK.width * WORK.vocabulary


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.use_reentrant = inner, use_reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


def predicted(build: Callable[[], nn.Module] = WORK.build, batch: Any = None, **options: Any) -> Activations:
    found = explain(build, ranks=2, batch=WORK.batch(0, 0) if batch is None else batch, **options).activations
    assert found is not None
    return found


@cache
def plainly() -> Activations:
    """What is predicted of the model as it is."""
    return predicted()


def kept_by(run: Callable[[], Tensor], model: nn.Module, batch: Tensor) -> int:
    """The bytes that autograd saves in a real forward, without parameters and the batch, and those of the loss."""
    found: dict[int, int] = {}
    owned = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), batch)}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = run()
    found[loss.untyped_storage().data_ptr()] = loss.untyped_storage().nbytes()
    return sum(found.values())


def test_a_forward_keeps_what_autograd_saves() -> None:
    model, tokens = WORK.build(), WORK.batch(0, 0)
    assert plainly().kept == kept_by(lambda: model(tokens), model, tokens)


def test_the_example_keeps_what_autograd_saves() -> None:
    example = runpy.run_path(str(Path(fullshard.__file__).parents[2] / "examples" / "model.py"))
    model, tokens = example["GPT"](example["MODELS"]["small"]), torch.zeros(2, 33, dtype=torch.long)
    found = predicted(lambda: example["GPT"](example["MODELS"]["small"]), tokens, loss=example["loss_of"])
    assert found.kept == kept_by(lambda: example["loss_of"](model, tokens), model, tokens)
    assert (found.count, found.unit) == (66, "tokens")


@pytest.mark.parametrize(("use_reentrant", "is_inside"), each_value([False, True], [True, False]))
def test_a_checkpointed_block_keeps_its_input_alone_and_computes_its_forward_twice(
    use_reentrant: bool, is_inside: bool
) -> None:
    def build() -> nn.Module:
        model = WORK.build()
        assert isinstance(model, Transformer)
        for at, block in enumerate(model.blocks if is_inside else ()):
            model.blocks[at] = Checkpointed(fullshard.fully_shard(block), use_reentrant)
        for at, block in enumerate(() if is_inside else model.blocks):
            model.blocks[at] = fullshard.fully_shard(Checkpointed(block, use_reentrant))
        return fullshard.fully_shard(model)

    found, plain = predicted(build), plainly()
    # The inputs of the blocks and of the norm, of the head, two numbers of the norm for each token, the logits as
    # cross_entropy has them, the loss and its weight.
    assert found.kept == (WORK.blocks + 1) * WIDE + WIDE + 2 * NARROW + LOGITS + 2 * 4
    for at in (1, 2, 3):
        assert found.flops["forward", at] == plain.flops["forward", at] == BLOCK_FLOPS
        # Recomputation stops before the last product, unless the checkpoint is reentrant.
        least = BLOCK_FLOPS - (not use_reentrant) * 2 * TOKENS * 4 * WORK.width**2
        assert found.flops["backward", at] - plain.flops["backward", at] == least
    assert found.backward - found.kept > plain.backward - plain.kept


def test_flops_are_those_of_products() -> None:
    flops = plainly().flops
    attention = 4 * TOKENS**2 * WORK.width
    for at in (1, 2, 3):
        assert flops["forward", at] == BLOCK_FLOPS
        assert flops["backward", at] == 2 * (BLOCK_FLOPS - attention) + 2.5 * attention  # which it computes once more
    assert flops["forward", 0] == HEAD_FLOPS
    assert flops["backward", 0] == 2 * HEAD_FLOPS


def wrapped(**options: Any) -> nn.Module:
    policy = fullshard.wrap.ModuleWrapPolicy({Block})
    return fullshard.FullyShardedDataParallel(WORK.build(), auto_wrap_policy=policy, **options)


@pytest.mark.parametrize("use_orig_params", [pytest.param(False, marks=pytest.mark.slow), True])
def test_both_front_ends_compute_the_same(use_orig_params: bool) -> None:
    assert predicted(lambda: wrapped(use_orig_params=use_orig_params)) == plainly()


def test_mixed_precision_halves_what_is_kept_of_blocks() -> None:
    low = fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    found, plain = predicted(lambda: fullshard.fully_shard_blocks(WORK.build(), mp_policy=low)), plainly()
    assert found.flops == plain.flops
    assert 0.5 * plain.kept <= found.kept < 0.51 * plain.kept


class Aside(nn.Module):
    """A module with most that a module may have: parameters in a list, buffers, and attributes that forward sets."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 4)
        self.scale = torch.ones(16)
        self.seen: list[Any] = []
        self.cache: Tensor | None = None

    def forward(self, x: Tensor, *, twice: bool = False) -> dict[str, Tensor]:
        self.cache = torch.arange(16)
        self.seen.append(x)
        y = self.norm(self.lstm(x)[0].flatten(0, 1)) * self.scale
        return {"y": self.head(nn.functional.dropout(y + self.cache)) * (2 if twice else 1)}


def state(model: nn.Module) -> list[Any]:
    """All that modules, parameters and random numbers are."""
    found: list[Any] = [torch.get_rng_state().tolist()]
    for module in model.modules():
        for name, value in vars(module).items():
            found.append((name, id(value), type(value)))
            if isinstance(value, (dict, list)):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                found += [(key, id(each), getattr(each, "_version", 0)) for key, each in items]
    return found


@ranks(2)
@pytest.mark.parametrize("front_end", ["fully_shard", pytest.param("flat", marks=pytest.mark.slow), "fragments"])
def test_a_model_that_trains_is_as_it_was(world: World, front_end: str) -> None:
    """Also on one rank alone, between two steps, and after an error in the model."""
    torch.manual_seed(0)
    model: Any = fullshard.fully_shard(Aside()) if front_end == "fully_shard" else None
    if model is None:
        model = fullshard.FullyShardedDataParallel(Aside(), use_orig_params=front_end == "fragments")
    x = torch.randn(5, 3, 8)
    model(x)["y"].sum().backward()
    before = state(model)
    if world.rank == 0:
        assert explain(model, batch={"x": x, "twice": True}).activations.kept > 0  # type: ignore[union-attr]
        with pytest.raises(RuntimeError, match="failed on tensors without values, so its activations"):
            explain(model, batch=torch.ones(5, 3, 7))
    assert [each for each in zip(before, state(model), strict=True) if each[0] != each[1]] == []
    model(x)["y"].sum().backward()


def test_samples_are_counted_where_the_batch_is_no_tokens() -> None:
    found = predicted(lambda: nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2)), torch.empty(6, 3, 8, device="meta"))
    assert (found.count, found.unit) == (6, "samples")
    assert found.kept == 4 * 6 * 3 * (4 + 2)  # between the layers, and what forward returned
    assert sum(found.flops.values()) == 2 * 18 * (2 * 8 * 4 + 3 * 4 * 2)  # of the batch nobody needs a gradient


def test_gradients_of_parameters_are_no_activations() -> None:
    """Also where autograd makes them before the gradient of the input."""
    found = predicted(lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(3))), torch.ones(1, 512))
    assert found.kept == 3 * 4 * 512
    assert found.backward < 8 * 4 * 512 < 4 * 512 * 512


class ChannelsLast(nn.Conv2d):
    """A convolution whose input and output have their channels in the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


#: Layers whose kernels take more than their results, each with the shape of its input.
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LSTM": (lambda: nn.LSTM(768, 512, batch_first=True), (4, 128, 768)),  # an input wider than the output
    "convolution": (lambda: nn.Conv2d(144, 40, 3, padding=1), (4, 144, 64, 64)),
    "channels last": (lambda: ChannelsLast(256, 256, 7, padding=3), (4, 16, 16, 256)),
    "each channel for itself": (lambda: ChannelsLast(256, 256, 7, padding=3, groups=256), (4, 16, 16, 256)),
}


def bytes_taken_by(layer: str) -> tuple[float, float]:
    """What forward and backward of a layer take at their peaks, as the kernel counts it."""
    resident.return_what_is_freed()
    build, shape = LAYERS[layer]
    model, x = build(), torch.randn(shape, requires_grad=True)
    for _ in range(2):
        model.zero_grad()
        x.grad = None
        resident.settle()
        before = resident.bytes_now()
        with resident.Peak() as forward:
            found = model(x)
            loss = (found[0] if isinstance(found, tuple) else found).sum()
        del found
        with resident.Peak() as backward:
            loss.backward()
    return forward.bytes - before, backward.bytes - before


@pytest.mark.parametrize(
    "layer", ["LSTM", *(pytest.param(name, marks=pytest.mark.slow) for name in LAYERS if name != "LSTM")]
)
def test_what_a_kernel_takes_beside_its_results_counts(layer: str) -> None:
    build, shape = LAYERS[layer]
    found = predicted(build, torch.empty(shape, requires_grad=True))
    gradients = max(4 * param.numel() for param in build().parameters())  # the others count where a kernel makes two
    measured = run_ranks(bytes_taken_by, 1, layer)[0]
    for nbytes, most in zip(measured, (found.forward, found.backward + gradients), strict=True):
        assert 0.8 * most < nbytes < most + 2**20  # of objects and tables


def bytes_kept_by_products() -> float:
    """What the products of two layers' forward leave in the process, as the kernel counts it."""
    sizes = [(8, 8, 8), (512, 384, 768), (512, 768, 1024)]
    first, *given = [(torch.ones(a, b), torch.ones(b, c), torch.zeros(a, c)) for a, b, c in sizes]
    torch.mm(*first[:2], out=first[2])
    resident.settle()
    before = resident.bytes_now()
    for left, right, result in given:
        torch.mm(left, right, out=result)
    return resident.bytes_now() - before


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="the products are those of MKL")
def test_what_products_of_matrices_leave_behind_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    measured = run_ranks(bytes_kept_by_products, 1)[0]
    found = predicted(lambda: nn.Sequential(nn.Linear(384, 768), nn.Linear(768, 1024)), torch.ones(512, 384))
    assert found.workspace == pytest.approx(measured, rel=0.1)


class ManySmall(nn.Linear):
    """Makes many small tensors in forward, and frees them."""

    def forward(self, x: Tensor) -> Tensor:
        pieces = [torch.zeros(2**14) for _ in range(64)]
        return super().forward(x) + sum(piece[0] for piece in pieces)


def test_memory_of_small_pieces_stays_in_the_heap() -> None:
    found = predicted(lambda: ManySmall(64, 64), torch.ones(8, 64))
    assert found.backward < 64 * 2**16 <= min(found.peaks.values())


def test_the_order_is_that_of_the_forward() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(2, 3), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Any:
            return self.last(self.first(x))

    def build() -> nn.Module:
        model = Backwards()
        for layer in (model.last, model.first):
            fullshard.fully_shard(layer)
        return model

    assert explain(build, ranks=2).order == ("last", "first")
    found = explain(build, ranks=2, batch=torch.ones(1, 4))
    assert found.order == ("first", "last")
    assert "Order (of a forward of the batch; 1 gathered ahead): first > last" in str(found)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"batch": 3}, ValueError, "batch has no tensor"),
        ({"loss": lambda model, batch: 0}, ValueError, "a loss and no batch"),
        ({"batch": torch.ones(1, 4), "loss": lambda model, batch: 0}, ValueError, "returned requires gradients"),
        (
            {"batch": torch.ones(1, 4), "loss": lambda m, b: m(b) if m(b).sum() > 0 else 0},
            RuntimeError,
            r"reads the value of a tensor at test_activations.py:\d+",
        ),
    ],
)
def test_a_batch_that_cannot_be_run_is_refused(options: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        explain(lambda: nn.Linear(4, 4), ranks=2, **options)
