"""Pretrained weights: which files are read, how much of them each rank reads, and what does not fit."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

import fullshard
from fullshard import checkpoint
from fullshard.checkpoint import CheckpointError, pretrained
from fullshard.wrapper.fsdp import FullyShardedDataParallel
from tests.checkpoint.cases import assert_same, save_at
from tests.checkpoint.state_dicts import Net
from tests.checkpoint.test_save import APIS, apis, sharded
from tests.checkpoint.test_selection import Extended, values
from tests.harness import World, ranks
from tests.harness.models import MLP, seeded
from tests.harness.slow import slow, some

LARGEST_PAGE = 2 << 20  # which the kernel may map where one byte is read
KINDS = ("one.safetensors", "several.safetensors", "one.bin", "several.bin")


def write(folder: Path, kind: str, tensors: dict[str, Tensor]) -> Path:
    """Writes files as ``save_pretrained`` does, beside files that are not weights."""
    count, suffix = (1 if kind.startswith("one") else 3), Path(kind).suffix
    plain = f"{'model' if suffix == '.safetensors' else 'pytorch_model'}{suffix}"
    stem = plain.removesuffix(suffix)
    files = [plain] if count == 1 else [f"{stem}-{n:05}-of-{count:05}{suffix}" for n in range(1, count + 1)]
    save: Any = save_file if suffix == ".safetensors" else torch.save
    folder.mkdir(exist_ok=True)
    names = list(tensors)
    for number, file in enumerate(files):
        save({name: tensors[name] for name in names[number::count]}, folder / file)
    if count > 1:
        where = {name: files[at % count] for at, name in enumerate(names)}
        (folder / f"{plain}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "config.json").write_text("{}")
    torch.save({"seed": 1}, folder / "training_args.bin")
    return folder


@ranks(2, 3)
@apis
@pytest.mark.parametrize("kind", some(KINDS, ("several.safetensors", "one.bin")))
def test_both_front_ends_read_every_kind_of_files(world: World, tmp_path: Path, api: str, kind: str) -> None:
    tensors = {name: each.clone() for name, each in seeded(Net).state_dict().items() if name != "second.weight"}
    folder = write(tmp_path / str(world.rank), kind, tensors)
    model = sharded(api, partial(seeded, Net, 5))
    checkpoint.load_pretrained(model, folder)
    found = values(model)
    assert_same(found, {**tensors, "second.weight": tensors["first.weight"]})


@ranks(2)
@apis
def test_values_are_cast_and_renamed(world: World, tmp_path: Path, api: str) -> None:
    tensors = {f"base.{name}": each.bfloat16() for name, each in seeded(MLP).state_dict().items()}
    folder = write(tmp_path / str(world.rank), "one.safetensors", tensors)
    model = sharded(api, partial(seeded, Extended, 5))
    head = values(model)["head.weight"]
    checkpoint.load_pretrained(model, folder / "model.safetensors", rename={"base.": "encoder."}, strict=False)
    found = values(model)
    for name, each in tensors.items():
        assert torch.equal(found[name.replace("base.", "encoder.")], each.float()), name
    assert torch.equal(found["head.weight"], head)


def test_a_plain_model_is_loaded_with_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, other = seeded(MLP), seeded(MLP, 5)
    folder = write(tmp_path, "several.safetensors", model.state_dict())
    with caplog.at_level(logging.INFO, "fullshard"):
        checkpoint.load_pretrained(other, str(folder))
    assert_same(other.state_dict(), model.state_dict())
    assert [record.getMessage() for record in caplog.records] == [f"pretrained weights are loaded from {folder}"]


@ranks(2)
def test_what_does_not_fit_is_named_on_all_ranks(world: World, tmp_path: Path) -> None:
    tensors = seeded(MLP).state_dict()
    del tensors["scale"]
    tensors |= {"more": torch.ones(2), "blocks.0.0.bias": torch.ones(3)}
    folder = write(tmp_path / str(world.rank), "several.bin", tensors)
    model = sharded("fully_shard", partial(seeded, MLP, 5))
    before = values(model)
    with pytest.raises(CheckpointError) as raised:
        checkpoint.load_pretrained(model, folder)
    for text in (
        "'model.blocks.0.0.bias' has the shape (7,) here, but (3,) in",
        "lacks ['model.scale'], which the model has; the model lacks ['model.more'], which",
        "rank 1",
    ):
        assert text in str(raised.value)
    assert_same(values(model), before)
    checkpoint.load_pretrained(model, folder, strict=False)
    kept = ("scale", "blocks.0.0.bias")
    assert_same(values(model), {name: (before if name in kept else tensors)[name] for name in before})


def test_what_is_not_a_directory_of_weights_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="is neither a file nor a directory with files that end in one of"):
        checkpoint.load_pretrained(model, "someone/some-model")
    with pytest.raises(CheckpointError, match="memory://some/run is not on a local disk: copy the files to one"):
        checkpoint.load_pretrained(model, "memory://some/run")
    path = save_at(tmp_path, model, step=1)
    for directory in (tmp_path, path):
        with pytest.raises(CheckpointError, match=r"has checkpoints of fullshard or DCP: load them with checkpoint\.l"):
            checkpoint.load_pretrained(model, directory)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be loaded"):
        checkpoint.load_pretrained(model, tmp_path / "model.safetensors")


class Wide(nn.Module):
    """32 MiB, so that the pages of a file that are read can be told from those that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(2))


def resident(path: Path) -> int:
    """The bytes of a file that this process has mapped and read."""
    found, is_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            is_file = line.endswith(str(path))
        elif is_file and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


@ranks(2)
@pytest.mark.parametrize("api", some(APIS, ["fully_shard"]))
@pytest.mark.parametrize("kind", ["one.safetensors", *slow("one.bin")])
def test_each_rank_reads_only_its_part(
    world: World, tmp_path: Path, api: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / str(world.rank), kind, seeded(Wide).state_dict())
    (file,) = (path for path in folder.iterdir() if path.name in ("model.safetensors", "pytorch_model.bin"))
    model = sharded(api, partial(seeded, Wide, 5))
    measured: list[int] = []
    close = pretrained._PretrainedFiles.close

    def measure(files: Any) -> None:
        measured.append(resident(file))
        close(files)

    monkeypatch.setattr(pretrained._PretrainedFiles, "close", measure)
    checkpoint.load_pretrained(model, folder)
    (read,) = measured
    half = file.stat().st_size / 2
    assert 0.9 * half < read <= half + 2 * LARGEST_PAGE + 65536  # the pages at the ends of 2 tensors
    assert_same(values(model), seeded(Wide).state_dict())


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("api", ["fully_shard", "wrapper"])
def test_a_model_of_transformers_gives_the_same_logits(world: World, tmp_path: Path, api: str, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    saved = seeded(partial(transformers.LlamaForCausalLM, config)).bfloat16()
    saved.save_pretrained(tmp_path, max_shard_size="20KB")  # the first rank writes
    dist.barrier()
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    whole = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    if api == "fully_shard":
        fullshard.fully_shard_blocks(model)
        model.to_empty(device="cpu")
    else:
        model = FullyShardedDataParallel(
            model,
            device_id=torch.device("cpu"),
            param_init_fn=lambda module: module.to_empty(device="cpu", recurse=False),
        )
    rotary = next(module for name, module in model.named_modules() if name.endswith("rotary_emb"))
    rotary.inv_freq.copy_(whole.model.rotary_emb.inv_freq)  # it is not persistent, so no file has it
    checkpoint.load_pretrained(model, tmp_path)
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, whole(ids).logits)
