"""Calls ``fullshard.patch()`` when this process has imported torch. ``FULLSHARD_PATCH=1`` makes every Python import it.

A file ``.pth`` beside it in site-packages does so at the start of the interpreter, before any program runs. Nothing is
imported here that the program does not import, and a process that never imports torch pays nothing.
"""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


class _AfterTorch:
    """Finds torch as everybody does, and patches it once it was executed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = find_spec("torch")
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_patch(module: ModuleType) -> None:
                execute(module)
                from fullshard.compat.patch import patch_and_say

                patch_and_say()

            spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _AfterTorch())  # type: ignore[arg-type]
