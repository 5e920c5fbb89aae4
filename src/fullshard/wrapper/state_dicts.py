"""What a wrapped module's ``state_dict()`` and ``load_state_dict()`` hold, and the methods that set it.

Owns the settings of each instance and the hooks by which ``nn.Module`` makes and loads state dicts. What modules show
meanwhile is left to :mod:`fullshard.wrapper.state_dict`.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.nn as nn

from fullshard.group.parameter import plain_name
from fullshard.wrapper.settings import (
    CONFIGS,
    OptimStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    as_state_dict_type,
    settings_of,
)
from fullshard.wrapper.state_dict import Loading, finish, saving, unwrap_names
from fullshard.wrapper.unit import WrappedUnit


class StateDictMethods(nn.Module):
    """The part of the wrapper that is about the module's state dicts."""

    _settings: StateDictSettings
    _loading: Loading

    def _prepare_state_dicts(self, unit: WrappedUnit) -> None:
        self._settings, self._loading = settings_of(nn.Module()), Loading(unit)
        self.register_state_dict_post_hook(unwrap_names)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(self._loading.before)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(self._loading.after)  # type: ignore[no-untyped-call]

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set what ``state_dict()``, ``load_state_dict()`` and the optimizer's counterparts of a tree hold.

        Returns:
            what was set before.

        Raises:
            RuntimeError: a configuration of another type.
            AssertionError: the wrappers in ``module`` have different settings.
        """
        warnings.warn(
            "FSDP.state_dict_type() and FSDP.set_state_dict_type() are deprecated: get_state_dict() and "
            "set_state_dict() of torch.distributed.checkpoint.state_dict know every parallelism, this one too",
            FutureWarning,
            stacklevel=2,
        )
        return _set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The settings of all wrappers in ``module``; an AssertionError if they differ."""
        return settings_of(module)

    @staticmethod
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> AbstractContextManager[None]:
        """:meth:`set_state_dict_type` for the time of a context."""
        return _speaking(module, state_dict_type, state_dict_config, optim_state_dict_config)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Like any module's: by the names of the plain model, of the type that is set. All ranks must call it."""
        kind, config = self._settings.state_dict_type, self._settings.state_dict_config
        with saving(self._loading.unit, kind, config):
            saved = super().state_dict(*args, **kwargs)
        finish(self, self._loading.unit, kind, config, saved, kwargs.get("prefix", args[1] if len(args) > 1 else ""))
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Like any module's: whole tensors or DTensors, by names of the plain model. All ranks must call it."""
        with_metadata = OrderedDict(state_dict)
        known = getattr(state_dict, "_metadata", {})
        names = {name: plain_name(name) for name, _ in self.named_modules()}
        metadata = {name: known[plain] for name, plain in names.items() if plain in known}
        with_metadata._metadata = {**known, **metadata}  # type: ignore[attr-defined]
        try:
            return super().load_state_dict(with_metadata, *args, **kwargs)
        finally:
            for wrapper in _wrappers(self):
                wrapper._loading.close()


@contextmanager
def _speaking(module: nn.Module, *settings: Any) -> Iterator[None]:
    before = StateDictMethods.set_state_dict_type(module, *settings)  # warns of a line here: once, not for each user's
    try:
        yield
    finally:
        for wrapper in _wrappers(module):
            wrapper._settings = before


def _wrappers(module: nn.Module) -> list[StateDictMethods]:
    return [each for each in module.modules() if isinstance(each, StateDictMethods)]


def _set_state_dict_type(module: nn.Module, kind: StateDictType, *configs: Any) -> StateDictSettings:
    kind = as_state_dict_type(kind)
    expected: tuple[type[Any], ...] = CONFIGS[kind]
    given = [cls() if config is None else config for cls, config in zip(expected, configs, strict=True)]
    settings = StateDictSettings(kind, *given)
    for name, wanted in zip(("state_dict_config", "optim_state_dict_config"), expected, strict=True):
        if type(found := getattr(settings, name)) is not wanted:
            raise RuntimeError(f"{name} for {kind} must be a {wanted.__name__}, got a {type(found).__name__}")
    before = settings_of(module)
    for wrapper in _wrappers(module):
        wrapper._settings = copy.copy(settings)
    return before
