"""What users do with a model, in steps and between them; each action does it to the sharded model and to the reference.

An action is data: a frozen dataclass, whose `repr` is the line by which a program tells of it. The reference always
goes first: an action that unsharded training refuses makes the program invalid, and is nobody's defect.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

import fullshard
from fullshard.optim import ShardedGradScaler
from tests.fuzz import sharding
from tests.fuzz.checkpoints import cloned
from tests.fuzz.layout import local, shown_parameters
from tests.fuzz.models import Control
from tests.fuzz.sharding import plain_name
from tests.fuzz.steps import PATTERNS, Batch, Call, Several, descend, objective
from tests.harness.faults import Fault, failing

if TYPE_CHECKING:
    from tests.fuzz.run import Run


class EndOfProgram(Exception):
    """What follows would mean nothing."""


class Action:
    """One thing that a user does."""

    def apply(self, run: Run) -> None:
        raise NotImplementedError


_DIVERGED = 1e6  # a loss after which training has no digits to compare


@dataclass(frozen=True)
class Train(Action):
    """One step of training.

    `sync` says when gradients are communicated over `micro` micro-batches: `each`, only the `last`, the last while
    parameters stay whole before it (`kept`), or the last over replicas alone (`all-reduce`). `between` happens between
    forward and backward, an evaluation with this mode `after` the backward, `edit` to gradients before the step.
    Without `step` gradients stay for the next action.
    `autocast` is around each forward, and casts to bfloat16. With the `zero` "zeros" a first micro-batch that is not
    communicated alone is given up.
    """

    pattern: str = "one"
    micro: int = 1
    sync: str = "each"
    between: str = ""
    after: str = ""
    edit: str = ""
    clip: float = 0.0
    step: bool = True
    zero: str = "none"
    autocast: bool = False

    def apply(self, run: Run) -> None:
        pattern = PATTERNS[self.pattern]
        for micro in range(self.micro):
            if micro == 1 and self.sync != "each" and self.zero == "zeros":  # gives up the first, which waits
                run.reference.optimizer.zero_grad(set_to_none=False)
                run.optimizer.zero_grad(set_to_none=False)
            pairs = run.next_batches(2)
            run.reference.refresh()
            expected: list[Tensor] = []
            for rank, worker in enumerate(run.reference.copies):
                call = Call(worker, autocast=self.autocast)
                batches = [pair[rank] for pair in pairs]
                with run.as_reference():
                    seen = pattern(call, batches, partial(self._interlude, run, call, batches[1]))
                expected = seen if rank == run.world.rank else expected
            has_any = run.reference.collect()
            run.is_unsettled = not has_any  # a forward that nobody goes back through leaves whole parameters
            if self.sync != "each" and micro == self.micro - 1 and not has_any:
                raise EndOfProgram  # no backward is there to bring home what waits
            with self._accumulating(run, micro == self.micro - 1):
                call, batches = Call(run.model, autocast=self.autocast), [pair[run.world.rank] for pair in pairs]
                found = pattern(call, batches, partial(self._interlude, run, call, batches[1]))
            run.compare("loss", found, expected)
            if any(float(loss.detach().abs().max()) > _DIVERGED for loss in expected):
                raise EndOfProgram  # from here on rounding decides
            if run.finalizes_by_hand and (handle := run.model.finalize_backward(async_op=micro % 2 == 1)):
                handle.wait()
        if self.after:
            Evaluate(self.after).apply(run)
        run.compare_gradients()
        if self.edit:
            self._edit(run)
        if self.clip:
            norm = nn.utils.clip_grad_norm_(run.reference.master.parameters(), self.clip)
            wraps = run.program.sharding.wraps
            clipped = run.model.clip_grad_norm_(self.clip) if wraps else run.clip_grad_norm(self.clip)
            run.compare("norm", [clipped.to(norm.dtype)], [norm])
        if self.step:
            run.round_gradients()
            run.reference.optimizer.step()
            run.optimizer.step()
            if self.zero != "keep":
                run.reference.optimizer.zero_grad(set_to_none=self.zero == "none")
                run.optimizer.zero_grad(set_to_none=self.zero == "none")

    def _interlude(self, run: Run, call: Call, batch: Any) -> list[Tensor]:
        """What happens between a forward and its backward."""
        if self.between == "evaluate":
            with torch.no_grad():
                return call(batch)
        if self.between == "infer":
            with torch.inference_mode():
                return [output.clone() for output in call(batch)]
        if call.model is run.model:
            if self.between == "state dict":
                run.model.state_dict()
            elif self.between == "reshard":
                for module in run.sharded_modules():
                    module.reshard()
            elif self.between == "unshard":
                run.sharded_modules()[0].unshard()
        return []

    @contextmanager
    def _accumulating(self, run: Run, last: bool) -> Iterator[None]:
        if self.sync == "each":
            yield
        elif run.program.sharding.wraps:
            context: AbstractContextManager[Any] = nullcontext() if last else run.model.no_sync()
            with context:
                yield
        else:
            setter = run.model.set_requires_all_reduce if self.sync == "all-reduce" else None
            (setter or run.model.set_requires_gradient_sync)(last)
            if self.sync == "kept":
                run.model.set_is_last_backward(last)
                run.model.set_reshard_after_backward(last)
            yield

    def _edit(self, run: Run) -> None:
        for parameters in (run.reference.master.named_parameters(), run.shown().items()):
            for name, parameter in parameters:
                if parameter.grad is None:
                    continue
                if self.edit == "scale":
                    parameter.grad.mul_(0.5)
                elif self.edit == "replace":
                    parameter.grad = parameter.grad * 0.5
                elif self.edit == "drop" and run.is_chosen(name):
                    parameter.grad = None


@dataclass(frozen=True)
class Evaluate(Action):
    """Forwards without a backward; `mode` is `no_grad`, `inference` or `grad`, whose graph is dropped."""

    mode: str = "no_grad"
    training: bool = False
    times: int = 1

    def apply(self, run: Run) -> None:
        run.is_unsettled |= self.mode == "grad"
        context = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": nullcontext}[self.mode]
        for _ in range(self.times):
            (batches,) = run.next_batches(1)
            run.reference.refresh()
            expected: list[Tensor] = []
            for rank, worker in enumerate(run.reference.copies):
                worker.train(self.training)
                with context(), run.as_reference():
                    outputs = Call(worker)(batches[rank])
                expected = outputs if rank == run.world.rank else expected
                worker.train()
            run.model.train(self.training)
            with context():
                found = Call(run.model)(batches[run.world.rank])
            run.compare("output", found, expected)
            del found, expected
            run.model.train()
        stay = [
            each for each in run.program.actions if getattr(each, "sync", "") == "kept" or isinstance(each, Unshard)
        ]
        sets = [each for each in run.program.actions if getattr(each, "name", "") == "set_reshard_after_backward"]
        run.shows_shards = not (stay or sets or (self.mode == "grad" and self.training))


@dataclass(frozen=True)
class Write(Action):
    """Parameters are changed between steps, each rank its own part."""

    how: str = "in place"

    def apply(self, run: Run) -> None:
        run.settle()
        master = dict(run.reference.master.named_parameters())
        with torch.no_grad():
            new = {name: parameter * 0.9 + 0.01 for name, parameter in master.items() if parameter.is_floating_point()}
            shown = {name: p for name, p in shown_parameters(run.model).items() if p.is_floating_point()}
            parts = dict(run.layout.expected(shown, {**run.reference.parameters(), **new}))
            for name, parameter in master.items():
                if name in new:
                    parameter.copy_(new[name])
            for name, parameter in shown.items():
                value = parts[name]
                assert value is not None
                self._write(parameter, value.nan_to_num(0))  # NaN is padding
            if self.how == "foreach" and shown:
                torch._foreach_mul_([local(p) for p in shown.values()], 0.9)
                torch._foreach_add_([local(p) for p in shown.values()], 0.01)

    def _write(self, parameter: Any, value: Tensor) -> None:
        if self.how == "in place":
            parameter.mul_(0.9).add_(0.01)
        elif self.how == "data":
            parameter.data.mul_(0.9).add_(0.01)
        elif self.how == "local":
            local(parameter).mul_(0.9).add_(0.01)
        elif self.how == "copy":
            local(parameter).copy_(value)
        elif self.how == "data copy":
            local(parameter.data).copy_(value)
        elif self.how == "new data":
            parameter.data = parameter.data * 0.9 + 0.01


@dataclass(frozen=True)
class Summon(Action):
    """Whole parameters are looked at, and written to."""

    write: bool = False
    writeback: bool = True
    with_grads: bool = False
    rank0_only: bool = False

    def apply(self, run: Run) -> None:
        summon = fullshard.FullyShardedDataParallel.summon_full_params if run.program.sharding.wraps else None
        with (summon or fullshard.summon_full_params)(
            run.model, writeback=self.writeback, rank0_only=self.rank0_only, with_grads=self.with_grads
        ):
            if self.rank0_only and not run.is_first_of_shards():
                return
            found = shown_parameters(run.model)
            run.compare_named("whole parameter", found, run.reference.parameters())
            if self.with_grads:
                run.compare_named(
                    "whole gradient",
                    {n: p.grad for n, p in found.items() if p.requires_grad},
                    {n: g for n, g in run.reference.gradients().items() if found[n].requires_grad},
                )
            if self.write:
                with torch.no_grad():
                    for parameter in found.values():
                        if parameter.is_floating_point():
                            parameter.mul_(0.9).add_(0.01)
        if self.write and (self.writeback or run.is_never_sharded()):
            with torch.no_grad():
                for parameter in run.reference.master.parameters():
                    if parameter.is_floating_point():
                        parameter.mul_(0.9).add_(0.01)


@dataclass(frozen=True)
class Freeze(Action):
    """The parameters of a cell stop to be trained, or begin to."""

    cell: int
    trained: bool = False

    def apply(self, run: Run) -> None:
        run.settle()
        prefix = f"cells.{self.cell}."
        for parameters in (run.reference.master.named_parameters(), shown_parameters(run.model).items()):
            for name, parameter in parameters:
                if name.startswith(prefix) and parameter.is_floating_point():
                    parameter.requires_grad_(self.trained)
                    parameter.grad = None


@dataclass(frozen=True)
class LearningRate(Action):
    """Another learning rate from now on."""

    factor: float = 0.5

    def apply(self, run: Run) -> None:
        for optimizer in (run.reference.optimizer, run.optimizer):
            for group in optimizer.param_groups:
                group["lr"] *= self.factor


@dataclass(frozen=True)
class SwapOptimizer(Action):
    """A new optimizer of another class."""

    kind: str

    def apply(self, run: Run) -> None:
        run.new_optimizers(self.kind)


@dataclass(frozen=True)
class Raise(Action):
    """A step is cut short by an error of the user's model, on all ranks; the user recovers as the guide says.

    In a `gather` the error comes from what is told of communication right before it starts, such as an observer of the
    user, before that of a `cell`.
    """

    where: str
    cell: int

    def apply(self, run: Run) -> None:
        run.is_unsettled = True
        (batches,) = run.next_batches(1)
        if self.where == "gather":
            self._raise_in_gather(run, batches[run.world.rank])
        else:
            self._raise_in_model(run, batches)
        if not run.program.sharding.wraps:
            run.model.reset_iter_state()
        run.reference.drop_gradients()
        for optimizer in (run.reference.optimizer, run.optimizer):
            optimizer.zero_grad()

    def _raise_in_model(self, run: Run, batches: Any) -> None:
        control, expected = Control(self.where, self.cell), False
        run.reference.refresh()
        for rank, worker in enumerate(run.reference.copies):
            with run.as_reference():
                expected = self._raises(Call(worker, control), batches[rank])
        found = self._raises(Call(run.model, control), batches[run.world.rank])
        if found is not expected:
            run.note(f"the error of the user was {'' if found else 'not '}raised")

    def _raise_in_gather(self, run: Run, batch: Any) -> None:
        held = [module._buffers for module in run.model.modules()]
        before = [{name: None if each is None else each.clone() for name, each in now.items()} for now in held]
        with failing("fullshard.schedule.step_log:StepLog.__call__", self.cell + 1, "before"):
            self._raises(Call(run.model), batch)
        for buffers, were in zip(held, before, strict=True):
            buffers.update(were)

    def _raises(self, call: Call, batch: Any) -> bool:
        try:
            PATTERNS["one"](call, [batch], list)
        except Fault:
            return True
        return False


@dataclass(frozen=True)
class SkipStep(Action):
    """Gradients are infinite on the first rank, a scaler skips the step on all, and the user clears them."""

    def apply(self, run: Run) -> None:
        (batches,) = run.next_batches(1)
        run.reference.refresh()
        trains = False
        for rank, worker in enumerate(run.reference.copies):
            with run.as_reference():
                loss = objective(Call(worker)(batches[rank]))
                descend(loss)  # a recomputation may write to buffers
                trains = loss.requires_grad
        run.reference.drop_gradients()
        loss = objective(Call(run.model)(batches[run.world.rank]))
        run.is_unsettled = not trains
        optimizers = run.optimizer if isinstance(run.optimizer, Several) else [run.optimizer]
        if trains:
            scaler = ShardedGradScaler("cpu", init_scale=1.0)
            (scaler.scale(loss) * (torch.inf if run.world.rank == 0 else 1.0)).backward()
            if run.finalizes_by_hand:
                run.model.finalize_backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() != 0.5:
                run.note("the scaler found no infinity")
        for optimizer in (run.reference.optimizer, run.optimizer):
            optimizer.zero_grad()


@dataclass(frozen=True)
class Unshard(Action):
    """Parameters are gathered by hand between steps, written to (which is thrown away, unless each rank has all of
    them), and freed again or not."""

    modules: int = 1
    asynchronous: bool = False
    write: bool = False
    reshard: bool = True

    def apply(self, run: Run) -> None:
        chosen = run.sharded_modules()[: self.modules]
        for handle in filter(None, [module.unshard(async_op=self.asynchronous) for module in chosen]):
            handle.wait()
        expected = dict(run.reference.parameters())
        if not run.program.sharding.param_dtype:
            for name, parameter in shown_parameters(run.model).items():
                if not isinstance(parameter, DTensor):
                    run.compare("unsharded parameter " + name, [parameter.detach()], [expected[name]])
        how = run.program.sharding
        is_cut = how.stage > 0 and how.strategy != "NO_SHARD" and (how.mesh[-1] if how.mesh else run.world.size) > 1
        writes = self.write and is_cut
        if writes:
            with torch.no_grad():
                for parameter in run.model.parameters():
                    if not isinstance(parameter, DTensor) and parameter.is_floating_point():
                        parameter.mul_(3.0)
        for module in run.sharded_modules() if self.write else chosen if self.reshard else ():
            module.reshard()


@dataclass(frozen=True)
class FreeBuffers(Action):
    """What is kept for the next step is given back."""

    def apply(self, run: Run) -> None:
        run.model.free_buffers()


@dataclass(frozen=True)
class Set(Action):
    """A setting is changed."""

    name: str
    value: Any

    def apply(self, run: Run) -> None:
        sharding.set_up(run.model, ((self.name, self.value),))


@dataclass(frozen=True)
class Touch(Action):
    """A conversion that converts nothing."""

    how: str = "to"

    def apply(self, run: Run) -> None:
        if self.how == "to":
            run.model.to("cpu")
        elif self.how == "requires_grad":
            run.settle()
            for parameter in run.model.parameters():
                parameter.requires_grad_(parameter.requires_grad)
        elif self.how == "state dict":
            state = {plain_name(name): value for name, value in run.model.state_dict().items()}
            if not run.program.sharding.wraps:
                run.compare_local("saved", state, run.reference.state_dict())


@dataclass(frozen=True)
class Copy(Action):
    """A deep copy is trained in place of the model, which must not change by it."""

    def apply(self, run: Run) -> None:
        run.settle()
        original = run.model
        before = {name: parameter.detach().clone() for name, parameter in run.reference.master.named_parameters()}
        state = cloned(run.optimizer.state_dict())
        run.model = copy.deepcopy(original)
        run.new_optimizers(run.optimizer_kind, keep=True)
        run.optimizer.load_state_dict(state)
        run.reload_reference()
        run.reference.master.zero_grad()
        run.model.zero_grad()
        run.compare_parameters()
        Train().apply(run)
        shown = shown_parameters(original)
        run.compare_parts("original", shown, {name: local(parameter) for name, parameter in shown.items()}, before)


@dataclass(frozen=True)
class Average(Action):
    """A deep copy follows the parameters over some steps as their moving average, and is evaluated."""

    steps: int = 2

    def apply(self, run: Run) -> None:
        run.settle()
        average, worker = copy.deepcopy(run.model), copy.deepcopy(run.reference.mine)
        whole = {
            name: parameter.clone() for name, parameter in run.reference.parameters().items() if parameter is not None
        }
        for _ in range(self.steps):
            Train().apply(run)
            run.settle()
            self._follow(whole.values(), run.reference.master)
            self._follow(average.parameters(), run.model)
        (batches,) = run.next_batches(1)
        for own, value in zip(worker.parameters(), whole.values(), strict=True):
            own.data.copy_(value)
        with torch.no_grad():
            with run.as_reference():
                expected = Call(worker.eval())(batches[run.world.rank])
            run.compare("output of the average", Call(average.eval())(batches[run.world.rank]), expected)

    @torch.no_grad()
    def _follow(self, values: Iterable[Tensor], model: nn.Module) -> None:
        for value, parameter in zip(values, model.parameters(), strict=True):
            if value.is_floating_point():
                value.mul_(0.5).add_(parameter, alpha=0.5)


@dataclass(frozen=True)
class Functional(Action):
    """A forward and a backward with whole values that stand in for parameters, for all or for some of them."""

    some: bool = False

    def apply(self, run: Run) -> None:
        (batches,) = run.next_batches(1)
        run.reference.refresh()
        expected: list[Tensor] = []
        for rank, worker in enumerate(run.reference.copies):
            with run.as_reference():
                outputs = self._call(run, worker, batches[rank])
            expected = outputs if rank == run.world.rank else expected
        run.compare("functional call", self._call(run, run.model, batches[run.world.rank]), expected)

    def _call(self, run: Run, model: Any, batch: Batch) -> list[Tensor]:
        values = {
            name: (parameter.detach() * 0.9 if parameter.is_floating_point() else parameter.detach().clone())
            for name, parameter in run.reference.mine.named_parameters()
            if not self.some or run.is_chosen(name)
        }
        trained = [value.requires_grad_() for value in values.values() if value.is_floating_point()]
        # Of a module with two names torch keeps what stood in for its parameters, in plain models too.
        stands_twice = any(layer.same is not None for layer in run.program.model.layers)
        loss = objective(Call(partial(functional_call, model, values, tie_weights=not stands_twice))(batch))
        grads = torch.autograd.grad(loss, trained, allow_unused=True) if trained and loss.requires_grad else ()
        return [loss, *grads]


@dataclass(frozen=True)
class Rewind(Action):
    """The state is saved, a step is made, and the state is loaded again; `kind` is how."""

    kind: str = "plain"
    assign: bool = False

    def apply(self, run: Run) -> None:
        run.settle()
        saved = run.save(self.kind)
        master, optimizer = run.reference.master, run.reference.optimizer
        state = {name: value.clone() for name, value in master.state_dict().items()}
        buffers = [{name: buffer.clone() for name, buffer in worker.named_buffers()} for worker in run.reference.copies]
        optimizer_state = cloned(optimizer.state_dict())
        Train().apply(run)
        master.load_state_dict(state)
        for worker, values in zip(run.reference.copies, buffers, strict=True):
            for name, buffer in worker.named_buffers():
                if name in state:
                    buffer.copy_(values[name])
        run.load(self.kind, saved, self.assign)
        optimizer.load_state_dict(optimizer_state)


@dataclass(frozen=True)
class Resume(Action):
    """The state is saved and loaded into a new model with other values and a new optimizer."""

    kind: str = "plain"

    def apply(self, run: Run) -> None:
        run.settle()
        saved = run.save(self.kind)
        buffers = {plain_name(name): buffer.clone() for name, buffer in run.model.named_buffers()}
        run.start_anew()
        run.load(self.kind, saved, False)
        run.reload_reference()
        for name, buffer in run.model.named_buffers():
            if plain_name(name) not in run.reference.master.state_dict():
                buffer.copy_(buffers[plain_name(name)])
        run.reference.master.zero_grad()


ACTIONS = {
    kind.__name__: kind
    for kind in (
        Train, Evaluate, Write, Summon, Freeze, LearningRate, SwapOptimizer, Raise, Unshard, FreeBuffers, Set, Touch,
        Copy, Average, Functional, Rewind, Resume, SkipStep,
    )
}  # fmt: skip
