"""One program on one rank: both sides of the training, and what differs between them.

Differences are noted and the program goes on: so all ranks come to its end, and what follows from a first difference
can be told from it by its place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fullshard
from fullshard.buffer import plan
from tests.fuzz.actions import EndOfProgram, Evaluate
from tests.fuzz.checkpoints import cloned, load, save
from tests.fuzz.layout import Layout, local, shown_parameters
from tests.fuzz.models import build
from tests.fuzz.programs import Program
from tests.fuzz.reference import Reference
from tests.fuzz.sharding import dtype_of, mesh_of, plain_name, shard
from tests.fuzz.steps import BY_BLOCKS, OPTIMIZERS, Batch, make_batch, round_gradient
from tests.harness import HOSTS, World, pretended_hosts
from tests.harness.faults import Fault

_MOST_NOTES = 12
_SMALLEST = 1e-3  # what is smaller may be zero in exact arithmetic, such as the gradient of a key's bias


class InvalidProgram(Exception):
    """Unsharded training raised, so there is nothing to compare with."""


@contextmanager
def surroundings(program: Program) -> Iterator[None]:
    """The environment of a program, as a context: its transport, from which size on a gradient is large, and that
    optimizers do not compile their steps, which takes long, for the same values."""
    before, least = os.environ.get("FULLSHARD_TRANSPORT"), plan.LEAST_ZERO_COPY
    if program.transport:
        os.environ["FULLSHARD_TRANSPORT"] = program.transport
    plan.LEAST_ZERO_COPY = 8 if program.seed % 2 else least  # models are small: nothing would be
    plan._make_plan.cache_clear()
    try:
        hosts = HOSTS if program.transport == "hosts" else ""
        with patch.object(torch, "compile", lambda function, **_: function), pretended_hosts(hosts):
            yield
    finally:
        plan.LEAST_ZERO_COPY = least
        plan._make_plan.cache_clear()
        os.environ.pop("FULLSHARD_TRANSPORT", None)
        if before is not None:
            os.environ["FULLSHARD_TRANSPORT"] = before


class Run:
    """A program that is being run.

    Attributes:
        notes: what differed from the reference, or was otherwise not as it should be.
    """

    def __init__(self, world: World, program: Program) -> None:
        self.world, self.program = world, program
        self.notes: list[str] = []
        self._where = "when sharding"
        self._batches = 0
        plain = build(program.model)
        self.layout = Layout(plain, program.sharding)
        self.reference = Reference(plain, program.sharding, self.layout, world.size, world.rank)
        for name, value in program.sharding.settings:
            if name == "set_gradient_divide_factor":
                self.reference.divisor = value
        self.finalizes_by_hand = ("set_manual_backward_finalization", True) in program.sharding.settings
        self._sharded: dict[str, Any] = {}
        self.model: Any = shard(build(program.model), program.sharding, world.size)
        self.is_unsettled = False  # whether a wrapper may show whole parameters: no backward has ended the last step
        self.shows_shards = False  # whether the last action was an evaluation
        self.optimizer: Any
        self.optimizer_kind = program.optimizer
        self.new_optimizers(program.optimizer)

    def go(self) -> list[str]:
        """Run all actions; returns what was not as it should be."""
        self.compare_parameters()
        for number, action in enumerate(self.program.actions):
            self._where = f"action {number}, {action}"
            try:
                action.apply(self)
            except EndOfProgram:
                break
            self.shows_shards &= isinstance(action, Evaluate)
            self.compare_parameters()
            self.compare_buffers()
        return self.notes

    def note(self, problem: str) -> None:
        if len(self.notes) < _MOST_NOTES:
            self.notes.append(f"{self._where}: {problem}")

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """What raises in here is not the library's."""
        try:
            yield
        except Fault:
            raise
        except Exception as error:
            raise InvalidProgram(f"{self._where}: {type(error).__name__}: {error}") from error

    # -- what actions need -------------------------------------------------------------------------------------------

    def next_batches(self, count: int) -> list[list[Batch]]:
        """The next batches, for all ranks."""
        spec = self.program.model
        casts = self.program.sharding.cast_inputs or self.program.sharding.wraps
        dtype = getattr(torch, spec.dtype if casts else self.program.sharding.param_dtype or spec.dtype)
        numbers = range(self._batches, self._batches + count)
        self._batches += count
        return [[make_batch(spec, dtype, number, rank) for rank in range(self.world.size)] for number in numbers]

    def sharded_modules(self) -> list[Any]:
        """The modules to which `fully_shard` was applied."""
        return [module for module in self.model.modules() if isinstance(module, fullshard.FSDPModule)]

    def is_chosen(self, name: str) -> bool:
        """Some of the parameters, by their names in the plain model."""
        return sum(map(ord, name)) % 2 == 0

    def is_first_of_shards(self) -> bool:
        """Whether this rank is the one that `rank0_only` means."""
        mesh = mesh_of(self.program.sharding, self.world.size)
        if mesh is not None and mesh.ndim == 2 and mesh.size(1) > 1:
            return int(mesh.get_local_rank(1)) == 0
        return self.world.rank == 0

    def is_never_sharded(self) -> bool:
        """Whether the wrapper keeps all on every rank: then writes to whole parameters are writes to parameters."""
        return self.program.sharding.wraps and (
            self.world.size == 1
            or self.program.sharding.strategy == "NO_SHARD"
            or self.program.sharding.mesh[1:] == (1,)
        )

    def clip_grad_norm(self, most: float) -> Tensor:
        parameters = self.model.parameters() if self.shows_shards else self.shown().values()
        norm = nn.utils.clip_grad_norm_(parameters, most)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def round_gradients(self) -> None:
        """Round all gradients, if the optimizer magnifies their last digits."""
        if self.optimizer_kind in BY_BLOCKS:
            for parameter in (*self.reference.master.parameters(), *self.shown().values()):
                if parameter.grad is not None:
                    round_gradient(local(parameter.grad))

    def new_optimizers(self, kind: str, keep: bool = False) -> None:
        """An optimizer for the sharded model, and one for the reference unless it is to `keep` its own."""
        self.settle()
        self.optimizer_kind = kind
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        if not keep:
            self.reference.optimizer = OPTIMIZERS[kind](self.reference.master.parameters())

    def reload_reference(self) -> None:
        """Save and load the state of the reference's optimizer, which may change dtypes of scalars."""
        optimizer = self.reference.optimizer
        optimizer.load_state_dict(cloned(optimizer.state_dict()))

    def start_anew(self) -> None:
        """A new model with other values, and a new optimizer for it."""
        model = replace(self.program.model, seed=self.program.model.seed + 1)
        requires_grad = [parameter.requires_grad for parameter in self.reference.master.parameters()]
        fresh = build(model)
        for parameter, trained in zip(fresh.parameters(), requires_grad, strict=True):
            if parameter.is_floating_point():
                parameter.requires_grad_(trained)
            else:
                parameter.data.copy_(dict(self.reference.master.named_parameters())[_name_of(fresh, parameter)].data)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.model = shard(fresh, self.program.sharding, self.world.size)
        self.new_optimizers(self.optimizer_kind, keep=True)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def save(self, kind: str) -> Any:
        return save(self.model, self.optimizer, kind)

    def load(self, kind: str, saved: Any, assign: bool) -> None:
        """Load what was saved, and let the reference have the buffers that come with it."""
        rebuilt = load(self.model, self.optimizer, kind, saved, assign, OPTIMIZERS[self.optimizer_kind])
        self.optimizer = rebuilt
        if kind == "dcp full":
            self.reference.share_buffers(0)

    # -- comparisons -------------------------------------------------------------------------------------------------

    def compare(self, what: str, found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
        """Note tensors that differ."""
        if len(found) != len(expected):
            self.note(f"{len(found)} of {what} instead of {len(expected)}")
        for number, (here, there) in enumerate(zip(found, expected, strict=False)):
            self._compare_one(f"{what} {number}", here, there)

    def compare_named(self, what: str, found: Mapping[str, Any], expected: Mapping[str, Tensor | None]) -> None:
        if list(found) != list(expected):
            self.note(f"{what}s are {list(found)} instead of {list(expected)}")
            return
        for name, value in found.items():
            self._compare_one(f"{what} {name}", value, expected[name])

    def compare_local(self, what: str, found: Mapping[str, Any], expected: Mapping[str, Tensor]) -> None:
        """The same where values may be DTensors, of which this rank's part is compared."""
        if sorted(found) != sorted(expected):
            self.note(f"{what}s are {sorted(found)} instead of {sorted(expected)}")
            return
        for name, value in found.items():
            whole = expected[name]
            if isinstance(value, DTensor):
                part = dict(self.layout.expected({name: value}, {name: whole}))[name]
                self._compare_one(f"{what} {name}", local(value), part)
            else:
                self._compare_one(f"{what} {name}", value, whole)

    def shown(self) -> dict[str, Any]:
        """The sharded parameters by plain names, also where a forward has left its parameters whole."""
        now = shown_parameters(self.model)
        if self.program.sharding.wraps:
            return now
        self._sharded.update({name: p for name, p in now.items() if isinstance(p, DTensor)})
        return {name: self._sharded.get(name, parameter) for name, parameter in now.items()}

    def settle(self) -> None:
        """Let the model show its sharded parameters: what is written to whole ones may be thrown away. After an
        evaluation it shows them by itself."""
        if self.shows_shards:
            return
        if not self.program.sharding.wraps:
            for module in self.sharded_modules():
                module.reshard()
        elif self.is_unsettled:
            self.is_unsettled = False
            Evaluate().apply(self)

    def compare_parameters(self) -> None:
        if any(type(group.reshard) is int for group in self.program.sharding.groups):
            self.settle()  # after a forward they are shown as they rest on the smaller mesh, in the computed dtype
        shown = self.shown()
        self.compare_parts(
            "parameter", shown, {name: local(p) for name, p in shown.items()}, self.reference.parameters()
        )

    def compare_gradients(self) -> None:
        shown = self.shown()
        found = {name: None if p.grad is None or not p.requires_grad else local(p.grad) for name, p in shown.items()}
        self.compare_parts("gradient", shown, found, self.reference.gradients())

    def compare_buffers(self) -> None:
        found = {plain_name(name): buffer for name, buffer in self.model.named_buffers()}
        self.compare_named("buffer", found, dict(self.reference.mine.named_buffers()))

    def compare_parts(
        self,
        what: str,
        shown: Mapping[str, Tensor],
        found: Mapping[str, Tensor | None],
        whole: Mapping[str, Tensor | None],
    ) -> None:
        """Note parameters, or what belongs to them, of which this rank holds something else than its part."""
        if not self.program.sharding.wraps and list(shown) != list(whole):
            self.note(f"{what}s are {list(shown)} instead of {list(whole)}")
            return
        sizes = {
            name: value.detach().abs().max().item()
            for name, value in whole.items()
            if value is not None and value.numel()
        }
        rounding = self.program.rounding * max(sizes.values(), default=0)
        for name, part in self.layout.expected(shown, whole):
            here = found[name]
            if self.program.sharding.wraps and here is None and part is not None and part.numel() == 0:
                continue  # a rank that holds nothing of a parameter has no gradient of it
            self._compare_one(f"{what} {name}", here, part, max(_SMALLEST, sizes.get(name, 0), rounding))

    def _compare_one(self, what: str, here: Tensor | None, there: Tensor | None, smallest: float = _SMALLEST) -> None:
        """Note a difference, as a fraction of the largest entry, or of `smallest` where that is larger."""
        if here is None or there is None:
            if here is not there:
                self.note(f"{what}: {'None' if here is None else 'a tensor'} instead of "
                          f"{'None' if there is None else 'a tensor'}")  # fmt: skip
            return
        here, there = here.detach(), there.detach()
        if "_flat_param" in what and here.shape == there.shape:
            here, there = here[~there.isnan()], there[~there.isnan()]
        if self.program.sharding.wraps and here.dtype == dtype_of(self.program.sharding.param_dtype):
            there = there.to(here.dtype)  # a forward left its parameters whole
        if (here.shape, here.dtype) != (there.shape, there.dtype):
            self.note(f"{what}: {here.dtype} of {list(here.shape)} instead of {there.dtype} of {list(there.shape)}")
        elif there.numel():
            wide = torch.complex128 if there.is_complex() else torch.float64
            difference, largest = (here.to(wide) - there.to(wide)).abs().max(), there.to(wide).abs().max()
            if not (error := (difference / largest.clamp(min=smallest)).item()) <= self.program.tolerance:
                self.note(f"{what}: off by {error:.2e} of its largest entry")


def _name_of(model: nn.Module, parameter: nn.Parameter) -> str:
    return next(name for name, other in model.named_parameters() if other is parameter)
