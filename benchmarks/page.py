"""A page of documentation that holds tables: its marked parts are replaced, and the prose around them stays.

::

    <!-- begin steps -->
    whatever a run has to say of steps
    <!-- end steps -->
"""

from __future__ import annotations

import re
from pathlib import Path

_PART = re.compile(r"<!-- begin ([\w-]+) -->\n.*?<!-- end \1 -->", re.DOTALL)


def update(page: Path, parts: dict[str, str]) -> list[str]:
    """Put each of ``parts`` between its marks in ``page``; parts that are not given stay as they are.

    Returns:
        The names of parts for which the page has no marks.

    Raises:
        ValueError: the page has no marks at all.
    """
    text = page.read_text()
    marked = _PART.findall(text)
    if not marked:
        raise ValueError(f"{page} has no part to replace: mark one with <!-- begin NAME --> and <!-- end NAME -->")

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- begin {name} -->\n\n{parts[name].strip()}\n\n<!-- end {name} -->" if name in parts else match[0]

    page.write_text(_PART.sub(replace, text))
    return [name for name in parts if name not in marked]
