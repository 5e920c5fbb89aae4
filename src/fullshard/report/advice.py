"""Advice about how a model is sharded: what could be better, and how. Owns the limits above which advice is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fullshard.report.facts import GroupFacts, ModelFacts
from fullshard.text import bytes_text, percent

#: A group below this many bytes is small. At 10 GB/s, its three exchanges take about as long as the host's fixed work
#: for a group in a step: 0.3 ms on a slow core (``docs/explanation/measurements.md``).
_SMALL = 2**20
#: A group is large above these bytes and this share of all parameters. Below: the same for a root that stays whole.
_LARGE, _LARGE_SHARE = 2**26, 0.25
_ROOT, _ROOT_SHARE = 2**24, 0.1
#: Padding is mentioned above these bytes and this share of the parameters.
_PADDING, _PADDING_SHARE = 2**20, 0.03
#: From _MANY ranks on, sums in low precision may lose small values. Up to _FEW ranks, they lose at most one rounding.
_MANY, _FEW = 64, 8
_LOW = {"bfloat16", "float16"}


@dataclass(frozen=True)
class Advice:
    """Something that could be better.

    Args:
        problem: what was found, and where.
        remedy: what to do.
    """

    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.problem}. {self.remedy}."


def advise(facts: ModelFacts) -> Iterator[Advice]:
    """Yields what could be better."""
    groups = [group for group in facts.groups if group.elements]
    every = sum(group.whole for group in groups)
    if len(groups) == 1 and facts.blocks:
        yield Advice(
            f"All parameters are one group, so a rank holds the whole model while it runs; there are "
            f"{len(facts.blocks)} repeated blocks ({facts.blocks[0]})",
            "Shard each block first, as fully_shard_blocks(model) does, or give auto_wrap_policy",
        )
    if facts.left_out:
        yield Advice(
            f"{_are(facts.left_out)} in no group: every rank keeps it whole, and reduces no gradient of it",
            "Apply fully_shard to the root too, or name it in ignored_params if that is what you want",
        )
    several = groups if len(groups) > 1 else []
    if small := [each.title for each in several if each.reshards and each.communicates and each.whole < _SMALL]:
        yield Advice(
            f"{_are(small)} smaller than 1 MiB: exchanges this small cost more than they move",
            "Leave the parameters to the module around, or shard several modules together: fully_shard([a, b])",
        )
    for each in several:
        share = each.whole / every
        if each.reshards and share > _LARGE_SHARE and each.whole > _LARGE:
            yield Advice(
                f"{each.title} has {percent(share)} of all bytes, and is whole while it runs",
                "Shard its submodules first",
            )
        if not (each.name or each.reshards) and each.communicates and share >= _ROOT_SHARE and each.whole >= _ROOT:
            yield _of_root(each, share)
    yield from _of_padding([each for each in groups if each.padding_share > _PADDING_SHARE and each.padding > _PADDING])
    for each in groups:
        inside = f"{each.name}." if each.name else ""
        for param in (param for param in each.parameters if len(param.places) > 1):
            elsewhere = [other_name for other_name in param.places if not other_name.startswith(inside)]
            if elsewhere and each.whole > 8 * param.numel:
                yield Advice(
                    f"'{param.name}' is also '{elsewhere[0]}', so all of {each.title} is gathered for that module too",
                    "Leave it to the module around both: shard that one, and not the one inside",
                )
    yield from _of_reductions(groups)


def _of_root(root: GroupFacts, share: float) -> Advice:
    """Advice about a root that stays whole from the beginning of forward to the end of backward."""
    largest = max(root.parameters, key=lambda each: each.numel)
    return Advice(
        f"The root's group has {percent(share)} of all bytes, mostly '{largest.name}', and stays whole from the "
        f"beginning of forward to the end of backward",
        "It is tied and needed at both ends, so this may be what you want; reshard_after_forward=True frees it"
        if len(largest.places) > 1
        else f"Shard that module by itself before the root: fully_shard(model.{largest.name.rpartition('.')[0]})",
    )


def _of_padding(padded: Sequence[GroupFacts]) -> Iterator[Advice]:
    if not padded:
        return
    worst = max(padded, key=lambda each: each.padding_share)
    cut = [each for each in worst.parameters if each.dim is not None]
    bad = max(cut, key=lambda each: worst.ranks * each.chunk - each.numel, default=None)
    where = f", most of it for '{bad.name}' of shape {bad.shape}, cut along dim {bad.dim}" if bad else ""
    yield Advice(
        f"Padding makes the shards of {_few([each.title for each in padded])} larger, by "
        f"{percent(worst.padding_share)} in {worst.title}{where}",
        "Cut a dim that the number of ranks divides (shard_placement_fn), shard over fewer ranks and replicate "
        "(a 2-D mesh), or use FullyShardedDataParallel, whose cuts fall anywhere",
    )


def _of_reductions(groups: Sequence[GroupFacts]) -> Iterator[Advice]:
    """Advice about the dtypes in which gradients are sent and added up."""
    low = [each for each in groups if _LOW & set(each.reduce) and not each.adds_in_fp32 and each.summed >= _MANY]
    if low:
        yield Advice(
            f"Gradients of {_few([each.title for each in low])} are added up over {low[0].summed} ranks in "
            f"{low[0].reduce[0]}",
            "Set MixedPrecisionPolicy(reduce_dtype=torch.float32) if the loss stalls; it doubles the bytes sent",
        )
    wide = [each for each in groups if _LOW & set(each.compute) and each.reduce == ("float32",) and each.communicates]
    exact = [each for each in wide if each.adds_in_fp32 and each.replicas == 1]
    for found in (exact, [each for each in wide if not each.adds_in_fp32 and each.summed <= _FEW]):
        if not found:
            continue
        first, more = found[0], sum(each.gradient * (each.ranks - 1) // each.ranks for each in found) // 2
        result = "gives the same sums" if found is exact else f"rounds each sum {first.summed - 1} times more"
        yield Advice(
            f"Gradients of {_few([each.title for each in found])} are computed in {first.compute[0]} and travel in "
            f"float32: {bytes_text(more)} more in a step",
            f"reduce_dtype=torch.{first.compute[0]} {result}. Keep float32 if the gradients of several "
            f"micro-batches add up before they are reduced",
        )


def _few(names: Sequence[str]) -> str:
    """A few of the names, written for a sentence."""
    shown = [f"'{name}'" for name in names[:2]]
    return f"{', '.join(shown)} and {len(names) - 2} more" if len(names) > 2 else " and ".join(shown)


def _are(names: Sequence[str]) -> str:
    return f"{_few(names)} {'is' if len(names) == 1 else 'are each'}"
