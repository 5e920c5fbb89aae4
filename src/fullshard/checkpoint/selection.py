"""Which tensors of a model are loaded, and which names they have in the checkpoint.

A :class:`Selection` gives the checkpoint's tensors the model's names, and hides those that are not to be loaded. So the
code that reads them knows only the model's names.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import accumulate

from fullshard.checkpoint.blocks import printable
from fullshard.checkpoint.manifest import few
from fullshard.checkpoint.reader import Checkpoint

_log = logging.getLogger("fullshard")
#: What stands before a parameter's name in the names of a checkpoint.
_KINDS = ("model.", "optimizer.state.", "optimizer.outlines.", "wire_feedback.")
#: The names of a model's tensor, several if it is tied, and its shape; ``None`` for a value that is not a tensor.
Item = tuple[Sequence[str], tuple[int, ...] | None]


class Selection:
    """The arguments ``only``, ``rename`` and ``strict`` of :func:`fullshard.checkpoint.load`."""

    def __init__(self, only: str | Iterable[str] | None, rename: Mapping[str, str] | None, strict: bool) -> None:
        self.only = None if only is None else [only] if isinstance(only, str) else list(only)
        self.rename = dict(sorted((rename or {}).items(), key=lambda each: -len(each[0])))
        self.strict, self._used = strict, set[str]()
        self.sources = dict[str, str]()  # a name in the checkpoint for each of the model's tensors that is loaded
        self.differing = dict[str, tuple[object, object]]()  # both shapes of each of the model's tensors that has two
        if self.only == []:
            raise ValueError("only=[] loads nothing: leave it out to load everything")

    def apply(self, checkpoint: Checkpoint, items: Sequence[Item]) -> None:
        """Renames the tensors and values of an open checkpoint, and hides those that are not loaded into ``items``."""
        manifest, path = checkpoint.manifest, checkpoint.path
        every = (*manifest.tensors, *manifest.objects)
        stored_as = dict[str, str]() if self.rename else dict(zip(every, every, strict=True))
        self._known = {name: names[0] for names, _ in items for name in names}
        self._selected = {names[0] for names, _ in items if self.only is None or any(map(self._matches, names))}
        for stored in every if self.rename else ():
            kind, name = _split(stored)
            new = kind + self.in_model(name) if kind else stored
            if stored_as.setdefault(new, stored) != stored:
                raise ValueError(f"rename gives '{stored}' and '{stored_as[new]}' of {path} the same name '{new}'")
        if self.strict and (unused := sorted(set(self.rename) - self._used)):
            raise KeyError(f"no name in {path} begins with {few(unused)}, or a longer prefix in rename does")
        positions, self.differing = manifest.tensors.positions, {}
        for names, shape in items:
            for name in names if names[0] in self._selected else ():
                found = positions.get(stored_as.get(f"model.{name}", ""))
                if found is not None and found[0].shape != shape:
                    self.differing[names[0]] = (shape, found[0].shape)
        self._selected -= set(self.differing)
        if self.only or self.rename or self.differing:
            stored_as = {new: stored for new, stored in stored_as.items() if new in self}
            tensors, objects, paths = copy.copy(manifest.tensors), manifest.objects, manifest.paths
            tensors.positions = {new: positions[stored] for new, stored in stored_as.items() if stored in positions}
            checkpoint.manifest = replace(
                manifest,
                tensors=tensors,
                objects={new: objects[stored] for new, stored in stored_as.items() if stored in objects},
                paths={new: self._keys(paths[stored]) for new, stored in stored_as.items() if stored in paths},
            )
        models = {new[len("model.") :]: stored for new, stored in stored_as.items() if new.startswith("model.")}
        self.sources = {owner: stored for name, stored in models.items() if (owner := self._owner(name)) is not None}

    def __contains__(self, name: str) -> bool:
        """Whether something is loaded, by its name in a checkpoint after renaming."""
        kind, name = _split(name)
        owner = self._owner(name)
        return not kind or (self._matches(name) if owner is None else owner in self._selected)

    def _owner(self, name: str) -> str | None:
        """The first name of the model's tensor to which a name in a checkpoint belongs."""
        if name in self._known:
            return self._known[name]
        every = accumulate(name.split("."), "{}.{}".format)
        return next((self._known[each] for each in every if each in self._known), None)

    def log(self, what: str) -> None:
        """Logs what was loaded and how many of the model's tensors were not; at level DEBUG, where each comes from."""
        total = len(set(self._known.values()))
        unchanged = total - len(self.sources)
        tell(what + (f"; {unchanged} of the model's {total} tensors keep their values" if unchanged else ""))
        for name, stored in self.sources.items():
            _log.debug(f"'{name}' is loaded from '{stored}'")

    def in_model(self, name: str) -> str:
        """The name in the model of what a checkpoint has under ``name``."""
        for old, new in self.rename.items():  # the longest first
            if name == old or name.startswith(old if old.endswith(".") or not old else f"{old}."):
                self._used.add(old)
                return new + name.removeprefix(old)
        return name

    def unmatched(self, matched: Iterable[Iterable[str]]) -> list[str]:
        """The patterns of ``only`` that are in none of the lists of :meth:`matched`."""
        return sorted(set(self.only or ()).difference(*matched))

    def matched(self) -> list[str]:
        """The patterns of ``only`` that match a name of this rank's model."""
        return [each for each in self.only or () if any(fnmatchcase(name, each) for name in self._known)]

    def _matches(self, name: str) -> bool:
        return self.only is None or any(fnmatchcase(name, each) for each in self.only)

    def _keys(self, path: tuple[str | int, ...]) -> tuple[str | int, ...]:
        is_state = path[:2] == ("optimizer", "state") and len(path) > 2
        return (*path[:2], self.in_model(str(path[2])), *path[3:]) if is_state else path


def tell(line: str) -> None:
    """Logs what a load took. If the log would not show it, it is printed, unless the program has set a level for our
    logger."""
    _log.info(line)
    if _log.level == logging.NOTSET and not (_log.isEnabledFor(logging.INFO) and _log.hasHandlers()):
        print(f"fullshard: {printable(line)}", file=sys.stderr, flush=True)


def _split(name: str) -> tuple[str, str]:
    """The kind and the rest of a name in a checkpoint; the kind is empty for other names."""
    kind = next((each for each in _KINDS if name.startswith(each)), "")
    return kind, name.removeprefix(kind)
