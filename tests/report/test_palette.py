"""The colours of pictures can be told apart in grey, too."""

from __future__ import annotations

from itertools import combinations

from fullshard.report import palette


def test_all_colours_are_distinct_in_grey_or_have_another_hatch() -> None:
    for looks in (palette.STATES, palette.MEMORY, dict(enumerate(palette.RANKS))):
        for one, other in combinations(looks.values(), 2):
            assert one.hatch != other.hatch or abs(lightness(one) - lightness(other)) > 0.1


def lightness(look: palette.Look) -> float:
    """From 0 for black to 1 for white."""
    from matplotlib.colors import to_rgb  # a second of each test run's begin

    red, green, blue = to_rgb(look.color)
    return 0.299 * red + 0.587 * green + 0.114 * blue
