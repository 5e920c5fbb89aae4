"""State dicts of wrapped modules: full, sharded or local values under the names of the plain model.

Owns the settings of each wrapper, and what modules show while a state dict is made or loaded. ``nn.Module`` itself
makes and loads it, so that users' hooks and methods keep working::

    FULL      whole parameters, in private copies
    SHARDED   each rank's rows of every parameter as a DTensor, as ``fully_shard`` has them
    LOCAL     each rank's flat shard as a DTensor of one dim, without padding

Whole tensors and DTensors of any placement can be loaded, whatever type is set. Every rank must take part.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fullshard import torch_private
from fullshard.comm.process_group import all_reduce
from fullshard.comm.waits import waiting
from fullshard.full_params import FullParameters, gather
from fullshard.group.param_group import ParamGroup
from fullshard.group.parameter import WRAPPED_NAME, ShardedParameter, local_tensor, plain_name
from fullshard.group.shard import give_own_storage
from fullshard.policies import as_setting, warn
from fullshard.schedule.states import IDLE
from fullshard.wrapper import settings as kinds
from fullshard.wrapper.flat import FLAT_NAME, FlatParameter, flat_name
from fullshard.wrapper.settings import CONFIGS, StateDictSettings, StateDictType, settings_of
from fullshard.wrapper.unit import WrappedUnit

_PREFIX = f"{WRAPPED_NAME}."


class StateDictMethods(nn.Module):
    """The state-dict methods of the wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self._settings = settings_of(nn.Module())
        self._loaded: list[FullParameters] = []  # full parameters into which values are loaded
        self._loads_local = False  # whether a state dict of local shards is being loaded
        self.register_state_dict_post_hook(_unwrap_names)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(StateDictMethods._before_loading)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(StateDictMethods._after_loading)  # type: ignore[no-untyped-call]

    @property
    def _unit(self) -> WrappedUnit:
        unit: WrappedUnit = self.__dict__["_fullshard_unit"]
        return unit

    @property
    def _groups(self) -> list[ParamGroup]:
        """The groups whose parameters this instance saves and loads."""
        return [*self._unit.groups, *self._unit.borrowed]

    def _check_idle(self, method: str) -> None:
        self._unit.recover()
        if self._unit.state is not IDLE:
            where = f"{method}() of {self._unit!r} was called inside its {self._unit.state.name}"
            raise AssertionError(f"{where}: call it after, on all ranks")

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: kinds.StateDictConfig | None = None,
        optim_state_dict_config: kinds.OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set the type of the state dicts of a model and its optimizer, for all wrappers in ``module``.

        Deprecated, as in PyTorch: ``get_state_dict()`` and ``set_state_dict()`` of
        ``torch.distributed.checkpoint.state_dict`` replace it.

        Args:
            module: the root of the wrappers to set; it may be a wrapper itself.
            state_dict_type: the type of both state dicts.
            state_dict_config: the configuration for the model; by default that of the type.
            optim_state_dict_config: the configuration for the optimizer; by default that of the type.

        Returns:
            the previous settings.

        Raises:
            TypeError: an argument has a wrong type.
            RuntimeError: a configuration does not belong to ``state_dict_type``.
            AssertionError: the wrappers in ``module`` have different settings.

        Ranks: each for itself, alike.
        """
        warn(
            "FSDP.state_dict_type() and FSDP.set_state_dict_type() are deprecated: get_state_dict() and "
            "set_state_dict() of torch.distributed.checkpoint.state_dict know every parallelism, this one too",
            FutureWarning,
        )
        kind = as_setting(state_dict_type, StateDictType, "state_dict_type")
        configs: Any = zip(CONFIGS[kind], (state_dict_config, optim_state_dict_config), strict=True)
        settings = StateDictSettings(kind, *(expected() if config is None else config for expected, config in configs))
        for name, expected in zip(("state_dict_config", "optim_state_dict_config"), CONFIGS[kind], strict=True):
            if type(found := getattr(settings, name)) is not expected:
                raise RuntimeError(f"{name} for {kind} must be a {expected.__name__}, got a {type(found).__name__}")
        before = settings_of(module)
        for wrapper in _wrappers(module):
            wrapper._settings = copy.copy(settings)
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The settings of the wrappers in ``module``; the defaults if there are none.

        Raises:
            AssertionError: the wrappers have different settings.

        Ranks: each for itself.
        """
        return settings_of(module)

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: kinds.StateDictConfig | None = None,
        optim_state_dict_config: kinds.OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """Set the type of state dicts within a context; deprecated too.

        Args:
            module: as for :meth:`set_state_dict_type`, like ``state_dict_type``, ``state_dict_config`` and
                ``optim_state_dict_config``.

        Ranks: each for itself, alike.
        """
        configs = state_dict_config, optim_state_dict_config
        with temporarily(_wrappers(module), "_settings", settings_of(module)):
            # The warning names this line, so it is shown once in a program, not once for each line of the user.
            StateDictMethods.set_state_dict_type(module, state_dict_type, *configs)
            yield

    def _state_dict_in_place(self) -> AbstractContextManager[None]:
        """A context in which state dicts copy no parameter of this wrapper. For reading the other values in them."""
        local = StateDictType.LOCAL_STATE_DICT
        return temporarily([self], "_settings", StateDictSettings(local, _InPlaceConfig(), CONFIGS[local][1]()))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Like ``nn.Module.state_dict()``, with the names of the plain model, and of the type that is set.

        Raises:
            AssertionError: it was called in a forward or backward.
        """
        self._check_idle("state_dict")
        config = self._settings.state_dict_config
        with ExitStack() as shown:
            for group in self._groups:
                if isinstance(group.summoned, _Saved):
                    continue  # a module around this one, which shares a parameter, shows the group already
                group.notice_changes()
                group.reshard()
                if not isinstance(config, _InPlaceConfig) and not _is_local(config, group):
                    shown.callback(_Saved(group, _values(group, config)).close)
            saved = super().state_dict(*args, **kwargs)
        self._finish(saved, kwargs.get("prefix", args[1] if len(args) > 1 else ""))
        return saved

    def _finish(self, saved: Any, prefix: str) -> None:
        """Finish the state dict that the module made: add local shards, cast buffers, and empty it on ranks that keep
        nothing."""
        config, unit = self._settings.state_dict_config, self._unit
        paths = paths_in(self.get_submodule(WRAPPED_NAME))
        buffers = {prefix + plain_name(f"{path}.{at[1]}"): at for at in unit.buffers for path in paths.get(at[0], ())}
        if any(_is_discarded(config, group) for group in self._groups):
            whole = [key for group in self._groups for key in _keys(group, paths, prefix)]
            for key in (*whole, *buffers, *[key for key in saved if key.startswith(prefix + FLAT_NAME)]):
                saved.pop(key, None)
            return
        for group in self._groups:
            if _is_local(config, group):
                for key in _keys(group, paths, prefix):
                    saved.pop(key, None)
                for number in range(len(group.shard.shards)) if group in unit.groups else ():
                    local = _local_shard(group, number)
                    saved[prefix + flat_name(number)] = local.cpu() if config.offload_to_cpu else local
        for key in buffers.keys() & saved.keys():
            dtype = unit.buffer_dtypes.get(buffers[key], saved[key].dtype)
            saved[key] = saved[key].to("cpu" if config.offload_to_cpu else None, dtype)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Like ``nn.Module.load_state_dict()``, whatever type is set.

        Args:
            state_dict: whole tensors or DTensors of any placement, by the names of the plain model; or a LOCAL state
                dict, by its flat parameters.

        Raises:
            AssertionError: it was called in a forward or backward.
            RuntimeError: as for any module; or a LOCAL state dict was made with a different sharding.
        """
        with_metadata = OrderedDict(state_dict)
        known = getattr(state_dict, "_metadata", {})
        metadata = {name: known[plain] for name, _ in self.named_modules() if (plain := plain_name(name)) in known}
        with_metadata._metadata = {**known, **metadata}  # type: ignore[attr-defined]
        try:
            return super().load_state_dict(with_metadata, *args, **kwargs)
        finally:
            for wrapper in _wrappers(self):
                wrapper._end_loading()

    def _before_loading(self, values: Any, prefix: str, *_: Any) -> None:
        """Show whole parameters, into which the module copies the values. All ranks must call it."""
        self._check_idle("load_state_dict")
        is_local = self._loads_local
        self._end_loading()
        inner = prefix + _PREFIX
        for key in [key for key in values if key.startswith(prefix) and not key.startswith(inner)]:
            values[inner + key.removeprefix(prefix)] = values.pop(key)
        if is_local or any(key.rpartition(".")[2].startswith(FLAT_NAME) for key in values):
            for inside in _wrappers(self):
                inside._loads_local = True
        paths = paths_in(self.get_submodule(WRAPPED_NAME))
        for group in [group for inside in _wrappers(self) for group in inside._groups]:
            if isinstance(group.params[0].sharded, FlatParameter):  # torch gives one name of a tied one
                plain = _keys(group, paths, inner)
                named_values = {plain[key]: values[key] for key in values.keys() & plain.keys()}
                values.update((key, values.get(key, named_values[i])) for key, i in plain.items() if i in named_values)
        for group in self._groups:
            plain = _keys(group, paths, inner)
            for key in [key for key in values if key in plain]:  # in the same order on all ranks
                if isinstance(value := values[key], torch.Tensor):
                    values[key] = whole_as_before(value, group.params[plain[key]])
            if group.summoned is None:  # otherwise a module around this one, or the user, writes back
                group.notice_changes()
                group.reshard()
            is_own = group in self._unit.groups
            is_flat = is_own and inner + FLAT_NAME in values
            if is_flat:
                _load_local(group, values, inner)
            blank = {index: _blank(group, index) for index in range(len(group.params))}
            full = group.summoned
            if full is None:
                self._loaded.append(full := _Loaded(group, blank))
            if is_flat or (self._loads_local and not is_own):  # if it is not this unit's, its own unit loads it
                shown = blank if is_flat else full.current()
                values.update((name, shown[index].detach()) for name, index in plain.items())

    def _after_loading(self, incompatible: Any) -> None:
        """Copy this rank's part of the loaded values into its shards."""
        for full in self._loaded:
            full.write_back()
        self._end_loading()
        for names in incompatible:
            names[:] = map(plain_name, names)

    def _end_loading(self) -> None:
        loaded, self._loaded, self._loads_local = self._loaded, [], False
        for full in loaded:
            full.close()


def _wrappers(module: nn.Module) -> list[StateDictMethods]:
    return [each for each in module.modules() if isinstance(each, StateDictMethods)]


@contextmanager
def temporarily(objects: Sequence[object], name: str, value: object) -> Iterator[None]:
    """A context in which an attribute of all objects has a different value."""
    before = [getattr(each, name) for each in objects]
    for each in objects:
        setattr(each, name, value)
    try:
        yield
    finally:
        for each, old in zip(objects, before, strict=True):
            setattr(each, name, old)


class _InPlaceConfig(kinds.LocalStateDictConfig):
    """A configuration: local shards, and unsharded parameters without copies."""


class _Saved(FullParameters):
    """The full parameters that a group shows to a state dict."""


class _Loaded(FullParameters):
    """The full parameters into which values are loaded. If loading fails, no hook closes them."""

    is_left_by_errors = True


def _is_local(config: kinds.StateDictConfig, group: ParamGroup) -> bool:
    """Whether a state dict gets the local shards of a group. For an unsharded group, all types are full."""
    return isinstance(config, kinds.LocalStateDictConfig) and group.data.shard_group is not None


def _is_discarded(config: kinds.StateDictConfig, group: ParamGroup) -> bool:
    """Whether this rank's state dict has nothing of a group's module."""
    return config.rank0_only and group.data.shard_rank != 0


def _values(group: ParamGroup, config: kinds.StateDictConfig) -> dict[int, nn.Parameter]:
    """The value of each parameter for a state dict, in new memory. Empty on ranks that keep nothing."""
    if group.summoned is None:
        whole = gather(group, [param.values for param in group.params])
    else:
        whole = {index: local_tensor(full) for index, full in group.summoned.current().items()}
    as_rows = isinstance(config, kinds.ShardedStateDictConfig) and group.data.shard_group is not None
    values = {}
    for index, value in whole.items() if not _is_discarded(config, group) else ():
        entry = state_dict_entry(value, group.params[index], as_rows, config.offload_to_cpu)
        values[index] = nn.Parameter(entry, group.params[index].sharded.requires_grad)
    return values


def state_dict_entry(whole: torch.Tensor, param: ShardedParameter, as_rows: bool, to_cpu: bool) -> torch.Tensor:
    """The entry of a state dict for a whole value of ``param``, in new memory: this rank's rows as a DTensor, or the
    whole value, even with tensor parallel."""
    if not as_rows:
        return own_copy(all_of(param.as_before(whole)), to_cpu)
    spec = torch_private.altered_spec(param.spec, dtype=whole.dtype)
    return torch_private.make_dtensor(own_copy(param.rows_of(whole), to_cpu), spec)


def own_copy(tensor: torch.Tensor, to_cpu: bool) -> torch.Tensor:
    device = torch.device("cpu") if to_cpu else tensor.device
    return tensor.to(device, copy=True, memory_format=torch.contiguous_format)


def all_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor. A DTensor's local part that is offloaded to the CPU is moved to the device of its mesh to
    communicate."""
    if torch_private.is_sharded_tensor(tensor):
        whole, process_group = torch_private.own_part_of_sharded_tensor(tensor)
        all_reduce(whole.view(-1).view(torch.uint8), process_group, "the whole of a ShardedTensor")
        return whole
    if not isinstance(tensor, DTensor):
        return tensor
    mesh, spec = tensor.device_mesh, torch_private.spec_of(tensor)
    groups = zip(mesh.get_all_groups(), tensor.placements, strict=True)
    cut = next((group for group, placement in groups if not placement.is_replicate()), None)
    with waiting("the whole of a DTensor", cut) if cut is not None else nullcontext():
        return torch_private.make_dtensor(local_tensor(tensor).to(mesh.device_type), spec).full_tensor()


def whole_as_before(tensor: torch.Tensor, param: ShardedParameter) -> torch.Tensor:
    """The whole of a tensor, or with tensor parallel, the part that ``param`` had before it was sharded."""
    whole, before = all_of(tensor), param.unsharded_spec
    if before is None:
        return whole
    return distribute_tensor(whole.detach(), before.mesh, before.placements, src_data_rank=None)


def _local_shard(group: ParamGroup, number: int) -> DTensor:
    """A section's shard as a DTensor over all ranks' shards. It is cut as torch cuts it, but has no padding."""
    data, plan, shard = group.data, group.sections[number].plan, group.shard.shards[number]
    placements = [Replicate(), Shard(0)] if data.replicate_group is not None else [Shard(0)]
    spec = torch_private.sharding_spec(data.mesh, placements, torch.Size((plan.end,)), (1,), shard.dtype)
    give_own_storage(local := shard.detach()[: plan.owned_numel(data.shard_rank)])
    return torch_private.make_dtensor(local, spec)


def _load_local(group: ParamGroup, values: Any, prefix: str) -> None:
    """Copy local shards from ``values`` into those of the group, and remove them from ``values``."""
    for number in range(len(group.shard.shards)):
        local, name = local_tensor(_local_shard(group, number)), prefix + flat_name(number)
        loaded = local_tensor(values.pop(name, local))
        if loaded.shape != local.shape:
            raise RuntimeError(
                f"'{plain_name(name)}' has {loaded.numel()} elements for this rank, which holds {local.numel()}: a "
                f"local state dict loads only into the sharding of which it was made"
            )
        local.copy_(loaded)


def _blank(group: ParamGroup, index: int) -> nn.Parameter:
    """A whole parameter that has this rank's part, and zeros elsewhere."""
    param = group.params[index]
    flat = torch.zeros(param.shape.numel(), dtype=param.dtype, device=group.device)
    whole = param.view(flat, param.plan_shape.shape)
    if not param.values.is_meta:
        param.chunk_of(whole).copy_(param.values)
    return nn.Parameter(param.as_before(whole), requires_grad=param.sharded.requires_grad)


def paths_in(root: nn.Module) -> dict[nn.Module, list[str]]:
    """All names of each module inside of ``root``. A shared module has several."""
    paths: dict[nn.Module, list[str]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    return paths


def _keys(group: ParamGroup, paths: Mapping[nn.Module, list[str]], prefix: str) -> dict[str, int]:
    """The keys of a group's parameters in a wrapper's state dict, each with the index of its parameter."""
    locations = [(at, index) for index, param in enumerate(group.params) for at in param.locations]
    return {prefix + plain_name(f"{path}.{at.name}"): i for at, i in locations for path in paths.get(at.module, ())}


def _unwrap_names(wrapper: nn.Module, saved: Any, prefix: str, metadata: Any) -> None:
    """A hook that removes the wrapper's own name from all names, after the state dict of ``wrapper`` is made."""
    for key in [key for key in saved if key.startswith(prefix + _PREFIX)]:
        saved[prefix + key.removeprefix(prefix + _PREFIX)] = saved.pop(key)
    known = getattr(saved, "_metadata", {})
    for path in [path for path in known if f"{path}.".startswith(prefix + _PREFIX)]:
        known.setdefault(f"{path}.".replace(prefix + _PREFIX, prefix, 1)[:-1], known[path])
