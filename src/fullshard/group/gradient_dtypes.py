"""The dtypes in which the gradients of a group arrive, travel and become ``param.grad``.

Owns the rules, which follow the installed torch: first ``reduce_dtype``, then the ``grad_dtype`` that was assigned to a
parameter, then the parameter's own dtype (from torch 2.15 on) or that of its computation. Gradients that travel
together have the dtype to which theirs promote.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress, count
from typing import Any

import torch

from fullshard.buffer.sections import Section
from fullshard.device import is_host
from fullshard.group.context import GroupContext
from fullshard.group.strategy import Placement
from fullshard.torch_private import GRADIENTS_KEEP_DTYPE


class GradientDtypes:
    """The dtypes of the gradients of one group."""

    def __init__(self, group: GroupContext) -> None:
        self._group = group
        self.found: dict[int, torch.dtype] = {}  # by index, the widest that came, where any dtype may come

    def _wanted(self, index: int) -> torch.dtype | None:
        """The dtype in which the options let a gradient travel alone; ``None`` for the dtype that it has."""
        group, param = self._group, self._group.params[index]
        reduce_dtype = group.options.mp_policy.reduce_dtype
        if reduce_dtype is not None and not param.dtype.is_complex:
            return reduce_dtype
        if param.grad_dtype != "own":
            return None if param.grad_dtype == "any" else param.grad_dtype
        return param.dtype if GRADIENTS_KEEP_DTYPE and not group.moves_all else group.compute_dtype(param)

    def alone(self, index: int) -> torch.dtype:
        """The dtype in which a gradient would travel if it were alone."""
        group = self._group
        return self._wanted(index) or self.found.setdefault(index, group.compute_dtype(group.params[index]))

    def together(self, indices: Iterable[int]) -> list[tuple[tuple[torch.dtype, torch.dtype], list[int]]]:
        """Sort parameters by the dtypes of ``param.grad`` and of the gradient that travels."""
        params, alone = self._group.params, {index: self.alone(index) for index in indices}
        travels: dict[bool, torch.dtype] = {}  # by whether it is complex: real gradients must not become complex
        for dtype in alone.values():
            travels[dtype.is_complex] = torch.promote_types(travels.get(dtype.is_complex, dtype), dtype)
        members: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
        for index, dtype in alone.items():
            travel, home = travels[dtype.is_complex], params[index].grad_dtype
            home = params[index].dtype if home == "own" else travel if home == "any" else home
            members.setdefault((home, travel), []).append(index)
        return list(members.items())

    def sections(
        self, trainable: Sequence[bool], keeps_whole: bool = False
    ) -> tuple[tuple[Section, ...], list[torch.dtype]]:
        """A section for each dtype of ``param.grad``, and the dtypes in which these travel. With ``keeps_whole`` large
        gradients are not in the buffer, unless other ranks read them there."""
        group = self._group
        if group.moves_all:  # parameters must be cut where their shards are: the frozen ones travel too
            sections = tuple(each for each in group.sections if any(trainable[i] for i in each.members))
            return sections, [self.alone(each.members[0]) for each in sections]
        chosen = self.together(compress(count(), trainable))
        as_messages = not group.is_alone(group.reduce_transport) and group.reduce_transport.takes_messages
        as_messages = as_messages and not self._casts_in_slots(chosen)
        found = list[Section]()
        for (home, travels), members in chosen:
            plan = group.plan(members)
            if keeps_whole and home == travels and not group.reduce_transport.compares_reductions:
                plan = plan.without(0 if group.data.replicate_size == 1 else plan.least_zero_copy)
            found.append(Section(home, tuple(members), plan.messages if as_messages else plan))
        return tuple(found), [travels for (_, travels), _ in chosen]

    def _casts_in_slots(self, chosen: Sequence[Any]) -> bool:
        """Whether a device casts gradients into a slot, and sends them from there. A group that stays unsharded, as
        the root does, does not share its slot with other groups: its gradients are cast into new memory.
        """
        group = self._group
        if is_host(group.device) or group.options.strategy.after_forward is Placement.REPLICATED:
            return False
        return any(
            group.plan(members).zero_copy and any(group.compute_dtype(group.params[i]) != travels for i in members)
            for (_, travels), members in chosen
        )

    def kept(self, sections: Sequence[Section], dtypes: Sequence[torch.dtype]) -> frozenset[int]:
        """Parameters whose gradients stay where autograd made them, although the buffer has a place for them."""
        group, found = self._group, set[int]()
        for section, dtype in zip(sections, dtypes, strict=True):
            if group.keeps_whole and group.reduce_transport.compares_reductions and section.dtype == dtype:
                large = (param.numel >= section.plan.least_zero_copy for param in section.plan.params)
                found.update(compress(section.members, large))
        return frozenset(found)

    def tell_autograd(self, index: int, leaf: torch.Tensor) -> None:
        """Tell autograd the dtype of the gradients that a leaf takes."""
        param, wanted = self._group.params[index], self._wanted(index)
        if self._group.moves_all or not (GRADIENTS_KEEP_DTYPE or param.grad_dtype != "own"):
            return
        # The copy to a wider buffer casts. But tensor parallel adds gradients up before, and must do so in that dtype.
        casts = wanted is not None and (wanted.itemsize <= leaf.itemsize or param.unsharded_spec is not None)
        leaf.grad_dtype = wanted if casts else None

    def widens(self, index: int, dtype: torch.dtype) -> bool:
        """Whether a gradient of ``dtype`` needs a wider buffer than all earlier gradients of its parameter."""
        before = self.found.get(index)
        if before is None or torch.promote_types(before, dtype) == before:
            return False
        self.found[index] = torch.promote_types(before, dtype)
        return True

    def refuse_unknown(self) -> None:
        """Raise ValueError if ranks on which gradients are missing could not know in which dtype these travel."""
        if self.found:
            names = sorted(self._group.params[index].name for index in self.found)
            raise ValueError(
                f"gradients of {names} may have any dtype (grad_dtype=None), and ranks on which they are missing "
                f"(set_reduce_scatter_unused_params(True)) could not know which: give the MixedPrecisionPolicy a "
                f"reduce_dtype"
            )
