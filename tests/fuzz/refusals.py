"""What the library refuses with an error that says so, and in which programs it may.

An error counts as a refusal only if it stands here and the program has what its entry names; torch's own FSDP refuses
or cannot do the same. Everything else that raises is a finding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.fuzz.actions import Resume, SwapOptimizer
from tests.fuzz.programs import Program, all_layers
from tests.fuzz.steps import LOW_BIT


@dataclass(frozen=True)
class Refusal:
    """A message, and the programs that may end with it."""

    name: str
    message: str
    may: Callable[[Program], bool]


def _hands_on_plain_objects(program: Program) -> bool:
    """Nobody finds tensors in an object that is no container: `Unit` cannot know when its backward begins."""
    return any(layer.pack == "plain" for layer in all_layers(program.model.layers))


def _broadcasts_no_state(program: Program) -> bool:
    """`set_optimizer_state_dict` looks for a tensor in the optimizer's state, in plain models too; SGD has none."""
    return program.optimizer in ("sgd", "temporary") and any(
        getattr(action, "kind", "") == "dcp full" for action in program.actions
    )


def _has_parameters_without_gradients(program: Program) -> bool:
    """Reentrant checkpoints compute none where no input requires one; torch's functions want states of all that do."""
    return any(layer.checkpoint.endswith(" reentrant") for layer in all_layers(program.model.layers))


def _resumes_quantized_state(program: Program) -> bool:
    """A model that is sharded later may be cut between other blocks: its ranks take turns to begin."""
    kinds = {program.optimizer, *(each.kind for each in program.actions if isinstance(each, SwapOptimizer))}
    return bool(kinds.intersection(LOW_BIT)) and any(isinstance(action, Resume) for action in program.actions)


REFUSALS = (
    Refusal("optimizer without state", "Expected device to be set", _broadcasts_no_state),
    Refusal("plain object", "ended without having begun", _hands_on_plain_objects),
    Refusal("plain object", "out of bounds for storage of size 0", _hands_on_plain_objects),
    Refusal("plain object", "A different number of tensors was saved", _hands_on_plain_objects),
    Refusal("plain object", "was computed while its group was", _hands_on_plain_objects),
    Refusal("no gradient", "requires gradients but has no saved optimizer state", _has_parameters_without_gradients),
    Refusal("quantized state", "It is quantized and cannot be cut again", _resumes_quantized_state),
)


def refusal_of(program: Program, error: BaseException) -> Refusal | None:
    """The entry under which an error is expected of a program."""
    message = str(error)
    return next((each for each in REFUSALS if each.message in message and each.may(program)), None)
