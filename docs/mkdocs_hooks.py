"""What mkdocs does with the pages of this directory, beyond its settings in mkdocs.yml.

Pages link to files of the repository, which the site does not have, and docstrings have the markup of Sphinx. Both are
converted while the site is built.
"""

from __future__ import annotations

import os
import re
from typing import Any

import griffe

_LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)\s#]+)(#[^)\s]*)?(?=\))")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Lets links to files outside of docs/ lead to the repository."""
    docs, root = config.docs_dir, os.path.dirname(config.config_file_path)

    def to_repository(link: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(docs, os.path.dirname(page.file.src_uri), link[1]))
        is_on_site = target.startswith(docs + os.sep) and not target.endswith((".py", ".json"))
        if is_on_site or not os.path.exists(target):
            return link[0]
        kind = "tree" if os.path.isdir(target) else "blob"
        return f"{config.extra['repository']}/{kind}/main/{os.path.relpath(target, root)}{link[2] or ''}"

    return _LINK.sub(to_repository, markdown)


class PublicNames(griffe.Extension):
    """Shows public names where users find them, and their docstrings as Markdown."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Binds the names that packages import from their own files, also where a file has the same name."""
        found = []
        for module in (pkg, *pkg.modules.values()):
            for name, path in module.imports.items():
                place = path.removeprefix(f"{pkg.name}.")
                if module.is_init_module and place != path and path != f"{module.path}.{name}":
                    found.append((module, name, pkg[place]))
        for module, name, target in found:
            module.members[name] = griffe.Alias(name, target, parent=module)

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Converts the markup of Sphinx: roles such as ``:func:`load` `` become links, and ``::`` before code goes."""
        if obj.docstring is not None:
            text = re.sub(
                r":\w+:`~?([\w.]+)`", lambda role: f"[`{role[1].rpartition('.')[2]}`][{role[1]}]", obj.docstring.value
            )
            text = re.sub(r"^ *::\n\n", "", text, flags=re.MULTILINE)
            text = re.sub(r"(?<=\S)::$", ":", text, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"\bRanks: ", "**Ranks:** ", text)
