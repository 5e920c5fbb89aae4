"""The parameters of a model as optimizers have them, and the original parameters that are in each.

Owns their names in the plain model. State dicts, checkpoints and optimizers' state look here, whichever front end
sharded the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from fullshard.group.param_group import ParamGroup
from fullshard.group.parameter import plain_name
from fullshard.schedule.unit import unit_of


@dataclass(eq=False, slots=True)
class OriginalParameter:
    """One parameter of the original model."""

    name: str  # fully qualified, below the root, without wrappers
    group: ParamGroup | None = None  # the group that shards it; ``None`` if it is whole on every rank
    index: int = 0  # its index in the group
    param: Any = None  # the group's :class:`ShardedParameter`

    @property
    def has_run(self) -> bool:
        """Whether this rank has a run of its elements, perhaps an empty one."""
        return self.param is not None and self.param.run is not None


@dataclass(eq=False, slots=True)
class GroupParameters:
    """The parameters of a group as optimizers have them, their modules, and what checkpoints cache about them."""

    paths: dict[nn.Module, str | None]  # path of each module; ``None`` if it is not below the root
    shown: dict[nn.Parameter, list[OriginalParameter]]
    names: list[str]
    saved: Any = None


def shown_parameters(
    root: nn.Module, found: list[GroupParameters] | None = None
) -> dict[nn.Parameter, list[OriginalParameter]]:
    """Every parameter that optimizers of ``root`` may have, with the original parameters in it, in order.

    A flat parameter has several original parameters, any other has one. A tied parameter has the first of its names.
    Parameters whose modules are not below ``root`` are left out. ``found``, if given, gets the parameters of each
    group, and at the end those that belong to no group.
    """
    paths = {module: f"{plain}." if (plain := plain_name(path)) else "" for path, module in root.named_modules()}
    groups = dict.fromkeys(group for module in paths if (unit := unit_of(module)) for group in unit.groups)
    for group in groups:
        group.notice_changes()  # users may have replaced parameters since the last step
    shown: dict[nn.Parameter, list[OriginalParameter]] = {}
    known_names: set[str] = set()  # names of sharded parameters
    found = [] if found is None else found
    for group in groups:
        presentation = group.module_params.as_sharded
        known: GroupParameters | None = presentation.found
        if known is None or any(paths.get(module) != path for module, path in known.paths.items()):
            presentation.found = known = GroupParameters({}, {}, [])
            for index, param in enumerate(group.params):
                known.paths |= {at.module: paths.get(at.module) for at in param.locations}
                names = [paths[at.module] + at.name for at in param.locations if at.module in paths]
                if names:
                    known.shown.setdefault(param.sharded, []).append(OriginalParameter(names[0], group, index, param))
                    known.names += names
        found.append(known)
        shown.update(known.shown)
        known_names.update(known.names)
    found.append(others := GroupParameters({}, {}, []))
    for module, path in paths.items():
        for name, whole in module._parameters.items():
            if whole is not None and path + name not in known_names and whole not in shown:
                others.shown[whole] = shown[whole] = [OriginalParameter(path + name)]
    return shown


def holds_several(param: object) -> bool:
    """Whether a parameter is this rank's shard of several original parameters, which lie end to end."""
    return getattr(param, "_is_flat_param", False)


def expect(known: Collection[Any], keys: Iterable[Any], problem: str = "") -> None:
    """Raise KeyError unless all keys are known."""
    problem = problem or "the model lacks these parameters of the optimizer"
    if unknown := [tuple(key.shape) if isinstance(key, torch.Tensor) else key for key in keys if key not in known]:
        raise KeyError(f"{problem}: {unknown}. The optimizer must be made from the parameters() of the sharded model")
