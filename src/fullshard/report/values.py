"""Values that a forward reads of tensors that have none: numbers, and sizes that depend on values.

Owns where in the user's code a value is read, and the answers that the user gives: one for all lines, or one by line.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fullshard.torch_private import ctc_loss, read_number

#: What a forward gets where it reads a value: one number, or numbers by line, such as ``{"model.py:31": 4}``.
Values = float | Mapping[str, float]
_LIBRARIES = tuple(str(Path(each).parent) for each in (torch.__file__, Path(__file__).parent))
_PYTHON = sysconfig.get_path("stdlib")
_aten: Any = torch.ops.aten


class UnknownValueError(RuntimeError):
    """A forward reads a value, and no answer was given."""


def answer(func: Any, args: tuple[Any, ...], values: Values | None) -> Any:
    """The result of an operation that reads values, made from the value that the user gave for this line."""
    operator = getattr(func, "overloadpacket", func)
    if operator is ctc_loss:
        return _ctc_loss(*args[:2])
    if operator not in _ANSWERS:
        raise UnknownValueError(f"{func} makes as many elements as values say, at {_line()}")
    line = _line()
    where = line.partition(" ")[0]
    value = values.get(where) if isinstance(values, Mapping) else values
    if value is None:
        raise UnknownValueError(
            f"it reads the value of a tensor at {line}: give what it reads there, a number or how many elements are "
            f'chosen, as values={{"{where}": ...}}, or one number for all lines'
        )
    return _ANSWERS[operator](func, args, value)


def _line() -> str:
    """The line of the user's code that runs: ``file.py:12 (code)``."""
    frames = [each for each in traceback.extract_stack() if not each.filename.startswith((*_LIBRARIES, "<"))]
    frames = [each for each in frames if not each.filename.startswith(_PYTHON) or "site-packages" in each.filename]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno} ({frames[-1].line})" if frames else "an unknown line"


def _ctc_loss(scores: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of ``ctc_loss`` for targets as long as they may be."""
    steps, *batch, _ = scores.shape
    return scores.new_empty(batch), scores.new_empty((*(batch or [1]), steps, 2 * targets.shape[-1] + 1))


def _number(func: Any, args: tuple[Any, ...], value: float) -> Any:
    kind = bool if args[0].dtype is torch.bool else float if args[0].is_floating_point() else int
    return kind(value)


def _index(func: Any, args: tuple[Any, ...], value: float) -> Any:
    tensor, indices, *others = args
    chosen = [
        [each.new_zeros(int(value), dtype=torch.long)] * each.ndim
        if each is not None and each.dtype is torch.bool
        else [each]
        for each in indices
    ]
    return func(tensor, [each for many in chosen for each in many], *others)


_ANSWERS: dict[Any, Any] = {
    read_number: _number,
    _aten.nonzero: lambda func, args, value: args[0].new_empty((int(value), args[0].ndim), dtype=torch.long),
    _aten.masked_select: lambda func, args, value: args[0].new_empty(int(value)),
    _aten.index: _index,
}
