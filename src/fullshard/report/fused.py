"""Operators that a GPU fuses and the CPU does not, while a step for a GPU is traced on the CPU.

On a GPU these keep less for backward than the operations into which they fall apart on the CPU. Each is replaced by an
operator that keeps the same there, and whose results torch can predict without a GPU. What is not named here runs as
on the CPU: pointwise operations, products, other norms and losses keep the same on both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fullshard.torch_private import efficient_attention, flash_attention, scoped_library

_aten: Any = torch.ops.aten
_HALVES = torch.float16, torch.bfloat16
_WIDEST_HEAD = 256  # of flash attention
_tracing = threading.local()  # of the threads that trace for a GPU


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor | None:
    """It keeps its input and one number a row; a layer norm keeps its input and two."""
    if x.dtype not in (torch.float32, *_HALVES) or (weight is not None and weight.dtype != x.dtype):
        return None
    return F.layer_norm(x, shape, weight)


def _dropout(x: Tensor, p: float, is_training: bool) -> Tensor | None:
    """It keeps a byte for each element."""
    return torch.native_dropout(x, p, True)[0] if is_training and 0 < p < 1 and x.numel() else None


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """It keeps its inputs, its output and one number a row, where one of torch's fused kernels takes the inputs: flash
    attention, or else the memory-efficient one, as torch chooses on a GPU. They also keep a mask."""
    tensors, head = (query, key, value), query.shape[-1]
    is_fused = all(each.ndim == 4 and each.dtype is query.dtype and each.stride(-1) == 1 for each in tensors)
    is_fused = is_fused and head == key.shape[-1] and all(each.numel() for each in tensors)
    is_flash = mask is None and query.dtype in _HALVES and head == value.shape[-1] and head <= _WIDEST_HEAD
    if is_causal and query.shape[-2] != key.shape[-2]:
        is_flash = False
    if is_fused and is_flash and cuda.flash_sdp_enabled():
        padded = [F.pad(each, (0, -head % 8)) if head % 8 else each for each in tensors]
        found = flash_attention(*padded, dropout, is_causal, scale=scale or head**-0.5)
        return found[0][..., :head]
    aligned = 8 if query.dtype in _HALVES else 4
    same_heads = query.shape[:-2] == key.shape[:-2]
    if (
        is_fused
        and same_heads
        and query.dtype in (torch.float32, *_HALVES)
        and not (head % aligned or value.shape[-1] % aligned)
        and cuda.mem_efficient_sdp_enabled()
    ):
        keeps = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
        bias = None if mask is None else _bias(mask, query, key)
        found = efficient_attention(query, key, value, bias, keeps, dropout, is_causal, scale=scale)
        return found[0]
    with sdpa_kernel(SDPBackend.MATH):
        return _aten.scaled_dot_product_attention.default.decompose(
            query, key, value, mask, dropout, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as the memory-efficient kernel takes it: numbers to add, in rows that begin at multiples of 16."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    if rest := -mask.shape[-1] % 16:
        mask = F.pad(mask, (0, rest))[..., : mask.shape[-1]]
    return mask.expand(*query.shape[:-1], key.shape[-2])


#: What stands for each operator. ``None`` for arguments that a GPU does not fuse either.
_FUSED: dict[str, Callable[..., Tensor | None]] = {
    "rms_norm": _rms_norm,
    "dropout": _dropout,
    "scaled_dot_product_attention": _attention,
}


def _kernel(name: str) -> Callable[..., Tensor]:
    operator, fused = getattr(_aten, name).default, _FUSED[name]

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        found = fused(*args, **kwargs) if getattr(_tracing, "depth", 0) else None
        return operator.decompose(*args, **kwargs) if found is None else found

    return kernel


@contextmanager
def fused_operators() -> Iterator[None]:
    """A context in which operators on the CPU keep for backward what they keep on a GPU, in this thread."""
    with scoped_library("aten", "IMPL") as library:
        for name in _FUSED:
            library.impl(name, _kernel(name), "AutogradCPU")
        _tracing.depth = getattr(_tracing, "depth", 0) + 1
        try:
            yield
        finally:
            _tracing.depth -= 1
