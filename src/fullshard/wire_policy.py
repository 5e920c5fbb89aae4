"""How gathers and reductions are encoded on their way between ranks: the settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from fullshard.policies import expect

EncodingName = Literal["exact", "bf16", "fp8", "int8", "int4"]


@dataclass(frozen=True)
class WirePolicy:
    """Encodes what ranks send to one another in fewer bytes::

        fully_shard(model, wire_policy=WirePolicy(gather="int8", reduce="int8"))  # 0.27 of the bytes of fp32

    Shards, optimizer state and sums stay as they are: only what is on its way is encoded. All ranks compute with the
    same decoded parameters, also the rank that has the shard. A receiver decodes the gradients of all others and adds
    them up in fp32, its own as they are. Quantized gathers and reductions are those of ZeRO++ (arXiv 2306.10209), error
    feedback is that of 1-bit SGD (Seide et al. 2014).

    Args:
        gather: of parameters: ``"exact"`` (as they are), ``"bf16"``, ``"fp8"``, ``"int8"`` or ``"int4"``.
        reduce: of gradients, the same.
        block: elements that share a scale, a multiple of 8. Smaller blocks are closer and take more bytes: int8 takes
            8 bytes for each scale, int4 and fp8 take 4.
        error_feedback: add what an encoding of gradients has lost to the gradients of the next step. Each rank keeps it
            in bf16, 2 bytes for each element of the gradients. :func:`fullshard.checkpoint.save` saves it, summed over
            the ranks, except for what is lost between replicas (``outer_wire_policy``), which begins anew after a load.
        min_numel: parameters with fewer elements, over all ranks, travel as they are. So do parameters in fp64,
            complex numbers, integers and packed formats.

    Raises:
        TypeError: ``error_feedback`` is not a bool.
        ValueError: a field has another value than these.

    Ranks: each for itself, alike, which is checked when a module is sharded.
    """

    gather: EncodingName = "exact"
    reduce: EncodingName = "exact"
    block: int = 128
    error_feedback: bool = True
    min_numel: int = 16384

    def __post_init__(self) -> None:
        names = get_args(EncodingName)
        for field in ("gather", "reduce"):
            value = getattr(self, field)
            expect(value in names, f"WirePolicy.{field}", value, f"one of {', '.join(map(repr, names))}", ValueError)
        is_block = type(self.block) is int and self.block > 0 and self.block % 8 == 0
        expect(is_block, "WirePolicy.block", self.block, "a multiple of 8", ValueError)
        expect(isinstance(self.error_feedback, bool), "WirePolicy.error_feedback", self.error_feedback, "True or False")
        is_count = type(self.min_numel) is int and self.min_numel >= 0
        expect(is_count, "WirePolicy.min_numel", self.min_numel, "a number of elements, 0 or more", ValueError)

    @property
    def is_exact(self) -> bool:
        """Whether nothing is encoded."""
        return self.gather == self.reduce == "exact"

    @property
    def text(self) -> str:
        """A line about what is encoded."""
        kinds = [f"{kind} in {name}" for kind, name in (("gathers", self.gather), ("reductions", self.reduce))]
        corrected = ", with error feedback" if self.error_feedback and self.reduce != "exact" else ""
        return f"{', '.join(each for each in kinds if 'exact' not in each)} in blocks of {self.block}{corrected}"


EXACT = WirePolicy()
