"""Loads pretrained weights from Hugging Face's files. Each rank reads only its own parts, directly into the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch.nn as nn
from torch.distributed import ProcessGroup

from fullshard.checkpoint.blocks import CheckpointError, without_collections
from fullshard.checkpoint.convert import WrongUse, tensors_of
from fullshard.checkpoint.load import Loading
from fullshard.checkpoint.manifest import Entry, Location, Manifest, StoredPiece, Tensors, few
from fullshard.checkpoint.ranks import Ranks
from fullshard.checkpoint.reader import Checkpoint, Target, list_checkpoints
from fullshard.checkpoint.selection import Selection
from fullshard.checkpoint.storage import located
from fullshard.policies import warn

if TYPE_CHECKING:
    from upath import UPath


@without_collections()
def load_pretrained(
    model: nn.Module,
    directory: str | Path | UPath,
    *,
    rename: Mapping[str, str] | None = None,
    strict: bool = True,
    process_group: ProcessGroup | None = None,
) -> None:
    """Loads the parameters and buffers of a model from Hugging Face's files.

    The counterpart of ``from_pretrained`` for a model that does not fit on one rank: build it on the meta device, shard
    it, call ``to_empty()``, then this. Each rank reads only its own parts of tensors, and casts them to the model's
    dtypes. A tied parameter may be stored under any of its names.

    Args:
        model: sharded by ``fully_shard`` or ``FullyShardedDataParallel``, or not sharded.
        directory: a local directory with ``model.safetensors``, ``pytorch_model.bin``, or several such files and
            their index; or a single such file. Files of ``torch.save`` are read with ``weights_only=True``.
        rename: new names, as in :func:`load`.
        strict: ``False``: ignore what only the files have, and keep what only the model has, or has in a different
            shape.
        process_group: the ranks of the model, if they are not all ranks.

    Raises:
        CheckpointError: on all ranks, if there are no such files, or if they do not fit the model. It names tensors
            that are missing, unknown, or of a different shape. The model may then be partly loaded.

    Ranks: all ranks of ``process_group`` alike.
    """
    ranks, path = Ranks(process_group), located(directory)
    loading = Loading(path, partial(_PretrainedFiles, path), selection := Selection(None, rename, strict), ranks)
    with loading.opened:
        loading.read(model, None, {})
        ranks.attempt(partial(loading.apply, None, {}))
    if ranks.first:
        selection.log(f"pretrained weights are loaded from {path}")


class _PretrainedFiles(Checkpoint):
    """Hugging Face's files as a checkpoint of a model. They are mapped: only what is copied is read."""

    def __init__(self, path: Location) -> None:
        self.path, self._readers, self._unpin = path, {}, lambda: None
        if not isinstance(path, Path):
            raise CheckpointError(f"{path} is not on a local disk: copy the files to one, and give their directory")
        if path.is_dir() and list_checkpoints(path):
            raise CheckpointError(f"{path} has checkpoints of fullshard or DCP: load them with checkpoint.load()")
        try:
            self._mapped, left_out = tensors_of(path)
        except WrongUse as error:
            raise CheckpointError(str(error)) from error
        if left_out:
            warn(f"{few(left_out)} of {path} are not tensors and are not loaded")
        entries = {}
        for name, tensor in self._mapped.items():  # a piece's file is the name in the files, which rename keeps
            shape = tuple(tensor.shape)
            entries[f"model.{name}"] = Entry(
                tensor.dtype, shape, [StoredPiece(name, 0, 0, -1, (0,) * len(shape), shape)]
            )
        self.manifest = Manifest(tensors=Tensors.of(entries))

    def read(self, targets: Iterable[Target]) -> None:
        for name, shape, offsets, into in targets:
            (piece,) = self.tensors[name].pieces
            if piece.sizes != shape:
                raise ValueError(f"'{name}' has the shape {shape} here, but {piece.sizes} in {self.path}")
            box = tuple(slice(at, at + size) for at, size in zip(offsets, into.shape, strict=True))
            into.detach().copy_(self._mapped[piece.file][box])
