"""Which parameters lie in what a module tree shows, and under which names.

Owns the step from the parameters that an optimizer has (shards, fragments, flat parameters) to those of the model
without sharding, by the names that these have below a given root. Tied parameters go by the first of their names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn as nn

from fullshard.group.group import Group
from fullshard.group.parameter import ShardedParameter, plain_name
from fullshard.schedule.unit import unit_of


@dataclass(frozen=True)
class Place:
    """One parameter of the original model."""

    name: str  # fully qualified, below the root, without wrappers
    group: Group | None = None  # that shards it; ``None`` for one that is whole on every rank
    index: int = 0  # which of the group's parameters it is

    @property
    def param(self) -> ShardedParameter | None:
        return None if self.group is None else self.group.params[self.index]


def shown_parameters(root: nn.Module) -> dict[nn.Parameter, list[Place]]:
    """Every parameter that optimizers of ``root`` may have, with the original ones that lie in it, in their order.

    That is one for each, but for a flat parameter. Parameters whose modules are not below ``root`` are left out.
    """
    paths = {module: f"{path}." if path else "" for path, module in root.named_modules()}
    units = dict.fromkeys(unit for module in paths if (unit := unit_of(module)) is not None)
    shown: dict[nn.Parameter, list[Place]] = {}
    taken: set[str] = set()  # where a sharded parameter stands, whatever is shown there at present
    for group in dict.fromkeys(group for unit in units for group in unit.groups):
        for index, param in enumerate(group.params):
            names = [plain_name(paths[at.module] + at.name) for at in param.locations if at.module in paths]
            if names:
                shown.setdefault(param.sharded, []).append(Place(names[0], group, index))
                taken.update(names)
    for module, path in paths.items():
        for name, whole in module._parameters.items():
            if whole is not None and whole not in shown and (plain := plain_name(path + name)) not in taken:
                shown[whole] = [Place(plain)]
    return shown
