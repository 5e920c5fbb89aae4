"""Groups whose replicas train apart, and so differ between two synchronizations.

Owns which groups these are, over which ranks their replicas lie, and who counts their optimizer steps. Optimizers,
gradient scalers and checkpoints ask here. :class:`~fullshard.optim.local_steps.LocalSteps` lets replicas train apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fullshard.group.context import GroupContext
from fullshard.group.mesh import DataMesh
from fullshard.optim.steps import checks
from fullshard.schedule.unit import groups_in


class StepCounter(Protocol):
    """Counts the steps of an optimizer between two synchronizations."""

    optimizer: Optimizer

    @property
    def differing(self) -> Sequence[str]:
        """Names of the parameters that replicas may have changed since the last synchronization."""


#: The replicas of each mesh that has no ``replicate_group`` because they train apart. Copies of a group share the mesh.
_replicas: weakref.WeakKeyDictionary[DataMesh, dist.ProcessGroup] = weakref.WeakKeyDictionary()
#: The counter of the steps on each group. (The optimizer's hooks keep it alive.)
_counters: weakref.WeakKeyDictionary[GroupContext, weakref.ref[StepCounter]] = weakref.WeakKeyDictionary()


def let_diverge(data: DataMesh, over: dist.ProcessGroup) -> DataMesh:
    """Note that the replicas of a mesh, which has one replica only, lie over these ranks. Returns the mesh."""
    _replicas[data] = over
    if refuse_uncounted not in checks:
        checks.append(refuse_uncounted)
    return data


def replicas_apart(group: GroupContext) -> dist.ProcessGroup | None:
    """The ranks over which the replicas of a group train apart, if they do."""
    return _replicas.get(group.data)


def count_steps(group: GroupContext, counter: StepCounter) -> None:
    """Note the counter of the optimizer's steps on a group."""
    _counters[group] = weakref.ref(counter)


def counter_of(group: GroupContext) -> StepCounter | None:
    """The counter of the optimizer's steps on a group, if there is one."""
    counter = _counters.get(group)
    return counter() if counter is not None else None


def replica_of(model: nn.Module) -> tuple[int, int] | None:
    """The number of this rank's replica and how many there are, if the replicas of a model train apart."""
    over = next((found for group in groups_in(model, recurse=True) if (found := replicas_apart(group))), None)
    return None if over is None else (over.rank(), over.size())


def refuse_mixture(model: nn.Module) -> None:
    """Raise RuntimeError if the replicas of a model train apart, and their parameters may differ now."""
    for group in groups_in(model, recurse=True):
        if replicas_apart(group) is None:
            continue
        counter = counter_of(group)
        if counter is None:
            raise RuntimeError(
                f"{group.title} belongs to a copy of a model whose replicas train apart, and the copies on different "
                f"replicas may differ: save the model itself, inside of local_steps.global_parameters()"
            )
        if names := counter.differing:
            raise RuntimeError(
                f"replicas have trained apart since their last synchronization, and differ in {len(names)} parameters, "
                f"such as '{names[0]}': a checkpoint would mix them. Save inside of local_steps.global_parameters()"
            )


def refuse_uncounted(optimizer: Optimizer, groups: Iterable[GroupContext]) -> None:
    """Raise RuntimeError if the replicas of these groups train apart, and nobody counts the steps of the optimizer."""
    if not _replicas:
        checks.remove(refuse_uncounted)  # until replicas train apart again
    for group in groups:
        if replicas_apart(group) is not None:
            counter = counter_of(group)
            if counter is None or counter.optimizer is not optimizer:
                raise RuntimeError(
                    f"the replicas of {group.title} train apart, but no LocalSteps counts the steps of this "
                    f"{type(optimizer).__name__}: they would never be synchronized. Make LocalSteps(model, optimizer) "
                    f"with it"
                )
