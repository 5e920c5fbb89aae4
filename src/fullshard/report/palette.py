"""The colours of all pictures: those of Okabe and Ito, which colour-blind people can tell apart.

Each colour comes with a hatch, so that pictures stay readable in grey. Matplotlib and plotly use the same letters for
hatches, and matplotlib draws them closer if they are repeated.
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

    @property
    def marker(self) -> dict[str, Any]:
        """The ``marker`` of a bar of plotly."""
        pattern = {"shape": self.hatch, "fgcolor": "rgba(0,0,0,0.45)", "size": 8, "solidity": 0.15}
        return {"color": self.color, "pattern": pattern, "line": {"color": "black", "width": 0.5}}


#: The lanes of a trace, and in ``whole`` the time in which a group may compute.
LANES = {
    "pass": Look(GREY),
    "computation": Look(GREEN),
    "whole": Look(GREEN),
    "gather": Look(SKY, "/"),
    "reduce": Look(ORANGE, "."),
    "all-reduce": Look(YELLOW, "\\"),
    "host": Look(PURPLE, "-"),
    "wait": Look(VERMILION, "x"),
    "disk": Look(BLUE, "+"),
}
#: The parts of a step.
TIME = {
    "computing": Look(GREEN),
    "optimizer": Look(BLUE, "|"),
    "copying": Look(PURPLE, "-"),
    "waiting": Look(VERMILION, "x"),
    "outside": Look(WHITE),
    "disk": Look(BLUE, "+"),
}
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
