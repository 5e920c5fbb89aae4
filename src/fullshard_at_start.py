"""Changes modules of others once they are imported. ``FULLSHARD_PATCH=1`` makes every Python patch torch in this way.

A file ``.pth`` beside it in site-packages calls :func:`patch_torch` at the start of the interpreter, before any program
runs. So this file imports nothing that a program may not import, and a process that never imports torch pays nothing.
"""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class AfterImport:
    """An import hook that changes modules, by name, after they were executed. Others find them."""

    def __init__(self, changes: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._changes = changes

    def install(self) -> None:
        """Change the modules that are imported, and from now on those that will be. A second call does nothing."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
            for name in self._changes.keys() & sys.modules.keys():
                self._changes[name](importlib.import_module(name))  # which waits if another thread executes it

    def remove(self) -> bool:
        """Change no further module. Returns whether the hook was installed."""
        if is_installed := self in sys.meta_path:
            sys.meta_path.remove(self)
        return is_installed

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._changes or self not in sys.meta_path:
            return None
        after = sys.meta_path[sys.meta_path.index(self) + 1 :]  # another hook of this kind would ask this one
        found = (finder.find_spec(name, path, target) for finder in after)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_change(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    self._changes[name](module)

            spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def _patch(_: ModuleType) -> None:
    _torch.remove()
    from fullshard.compat.patch import patch_and_report

    patch_and_report()


_torch = AfterImport({"torch": _patch})


def patch_torch() -> None:
    """Call ``fullshard.patch()`` when this process has imported torch. A second call does nothing."""
    _torch.install()
