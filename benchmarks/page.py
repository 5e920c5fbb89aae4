"""Pages of documentation that hold tables: their marked parts are replaced, and the prose around them stays.

::

    <!-- begin steps -->
    whatever a run has to say of steps
    <!-- end steps -->
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

_PART = re.compile(r"<!-- begin ([\w-]+) -->\n.*?<!-- end \1 -->", re.DOTALL)


def update(pages: Sequence[Path], parts: dict[str, str]) -> list[str]:
    """Put each of ``parts`` between its marks in one of ``pages``; parts that are not given stay as they are.

    Returns:
        The names of parts for which no page has marks.

    Raises:
        ValueError: a page has no marks at all.
    """
    places = set[str]()

    def replace(match: re.Match[str]) -> str:
        places.add(name := match[1])
        return f"<!-- begin {name} -->\n\n{parts[name].strip()}\n\n<!-- end {name} -->" if name in parts else match[0]

    for page in pages:
        text, count = _PART.subn(replace, page.read_text())
        if not count:
            raise ValueError(f"{page} has no part to replace: mark one with <!-- begin NAME --> and <!-- end NAME -->")
        page.write_text(text)
    return [name for name in parts if name not in places]
