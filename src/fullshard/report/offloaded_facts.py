"""What of a group is offloaded, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fullshard.buffer.sections import Section
from fullshard.group.param_group import ParamGroup
from fullshard.text import percent

#: How the names of kinds of memory end that are offloaded.
ON_CPU, ON_DISK = " on the CPU", " on a disk"


@dataclass(frozen=True)
class OffloadedFacts:
    """What of a group is offloaded, on this rank. Sizes are in bytes.

    Attributes:
        what: ``"parameters"`` with their gradients and optimizer state, ``"optimizer state"``, or ``""`` for nothing.
        place: ``" on the CPU"``, ``" on a disk"``, or ``""``.
        shard, reduced: how much of the shard and of the reduced gradients is offloaded.
        trained: the number of elements whose optimizer state is offloaded.
        behind: the most bytes of gradients that are in memory while they are written to a disk, which is half of what
            an optimizer's step may read and write at once.
    """

    what: str = ""
    place: str = ""
    shard: int = 0
    reduced: int = 0
    trained: int = 0
    behind: int = 0

    def split(self, kind: str, nbytes: int, offloaded: int) -> dict[str, int]:
        """Divides ``nbytes`` of a kind of memory into those in place, and those that are offloaded."""
        return {kind: nbytes - offloaded, kind + self.place: offloaded} if self.place else {kind: nbytes}

    def part(self, state: float, parameters: float) -> OffloadedFacts:
        """About what is offloaded with smaller shares of a group."""
        shard, reduced, trained = self.shard * parameters, self.reduced * parameters, self.trained * state
        return replace(self, shard=round(shard), reduced=round(reduced), trained=round(trained))

    def text(self, shard: int, trained: int) -> str:
        """Says how much is offloaded of ``shard`` bytes of parameters, and of the state of ``trained`` elements."""
        shares = {"parameters": self.shard / max(1, shard), "optimizer state": self.trained / max(1, trained)}
        if round(shares["parameters"], 3) in (0, round(shares["optimizer state"], 3)):
            shares = {self.what: shares[self.what]}
        parts = [f"{percent(share, 1)} of the {kind}" if share < 1 else kind for kind, share in shares.items()]
        return " and ".join(parts) + self.place


def offloaded_facts(group: ParamGroup, shards: Sequence[Section], gradients: Sequence[Section]) -> OffloadedFacts:
    """What of a group is offloaded, given the sections of its shard and of its reduced gradients."""
    offloaded = group.offloaded
    if not offloaded.state:
        return OffloadedFacts()

    def nbytes(sections: Sequence[Section]) -> int:
        return sum(_elements(group, each, offloaded.parameters) * each.dtype.itemsize for each in sections)

    return OffloadedFacts(
        what="parameters" if offloaded.parameters else "optimizer state",
        place=ON_CPU if offloaded.disk is None else ON_DISK,
        shard=nbytes(shards),
        reduced=nbytes(gradients),
        trained=sum(_elements(group, each, offloaded.state) for each in gradients),
        behind=0 if offloaded.disk is None else offloaded.disk.staging_bytes // 2,
    )


def _elements(group: ParamGroup, section: Section, chosen: frozenset[int]) -> int:
    """The elements of a section's shard that belong to chosen parameters. Padding beside these counts as theirs."""
    others = [group.params[index].local.numel() for index in section.members if index not in chosen]
    return section.plan.shard_numel - sum(others) if len(others) < len(section.members) else 0
