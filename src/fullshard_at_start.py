"""Calls ``fullshard.patch()`` when this process has imported torch. ``FULLSHARD_PATCH=1`` makes every Python import it.

A file ``.pth`` beside it in site-packages does so at the start of the interpreter, before any program runs. Nothing is
imported here that the program does not import, and a process that never imports torch pays nothing.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _AfterTorch:
    """Finds torch as everybody does, and patches it once it was executed. Others may look for it before."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_patch(module: ModuleType) -> None:
                sys.meta_path.remove(self)
                execute(module)
                from fullshard.compat.patch import patch_and_report

                patch_and_report()

            spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _AfterTorch())
