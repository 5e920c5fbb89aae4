"""The colours of all pictures: those of Okabe and Ito, which colour-blind people can tell apart.

Each colour comes with a hatch, so that pictures stay readable in grey. Matplotlib draws the
lines of a hatch closer if its letter is repeated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY, WHITE = "#DDDDDD", "#FFFFFF"


class Look(NamedTuple):
    """The fill of a bar."""

    color: str
    hatch: str = ""

    @property
    def bar(self) -> dict[str, Any]:
        """The arguments of matplotlib's ``bar``, ``barh`` and patches."""
        return {"facecolor": self.color, "hatch": 4 * self.hatch, "edgecolor": "black", "linewidth": 0.6}


#: The states of a group in a step.
STATES = {"gathered": Look(SKY, "/"), "whole": Look(GREEN), "reduced": Look(ORANGE, ".")}
#: The parts of a rank's memory.
MEMORY = {
    "parameters": Look(SKY),
    "gradients": Look(ORANGE, "/"),
    "optimizer": Look(GREEN, "x"),
    "activations": Look(PURPLE, "."),
    "other": Look(GREY),
}
#: Ranks, in turn.
RANKS = (
    Look(SKY),
    Look(ORANGE, "/"),
    Look(GREEN, "."),
    Look(YELLOW, "x"),
    Look(PURPLE, "\\"),
    Look(BLUE, "-"),
    Look(VERMILION, "|"),
    Look(GREY, "+"),
)
