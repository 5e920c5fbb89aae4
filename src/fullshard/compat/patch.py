"""``patch()``: unchanged programs that import torch's FSDP get fullshard.

In all modules of the process, names of torch's front ends, settings, wrap policies and gradient scaler are bound to
ours. Modules that are imported later find ours in torch's modules. Only torch's FSDP itself keeps its own names, and
``replicate()``, which is built on it. Descriptions of meshes and placements (``FSDPMeshInfo``,
``ShardPlacementResult``, ``_get_mesh_info``) are not bound, because the engine accepts torch's.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
from importlib.util import find_spec
from multiprocessing.util import Finalize
from types import ModuleType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import fullshard
from fullshard import interop, wrap
from fullshard.compat import frameworks
from fullshard.module import FSDPModule
from fullshard.optim.grad_scaler import ShardedGradScaler
from fullshard.schedule.hooks import when_sharded

_log = logging.getLogger("fullshard")

#: The modules of torch in which programs find the names.
_PUBLIC = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp.api",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "torch.distributed.fsdp.sharded_grad_scaler",
    "torch.distributed.fsdp.wrap",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp._fully_shard._fsdp_api",
    "torch.distributed.fsdp._fully_shard._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
#: Modules of torch that need torch's own classes. They are imported before the names are bound, and not changed.
_TORCH_CLASSES = ("torch.distributed.fsdp.", "torch.distributed._composable.replicate")

#: The value of ``FULLSHARD_PATCH`` in child processes of a process that has reported the patch.
_REPORTED = "said"
#: The bindings that were changed: the namespace of a module, the name there, and torch's object.
_bound: list[tuple[dict[str, Any], str, Any]] = []


def patch() -> int:
    """Let torch's names stand for fullshard's from now on; returns how many names were bound.

    ``torch.distributed.fsdp.fully_shard`` is then :func:`fullshard.fully_shard`, and so on for all that fullshard has,
    in every module that holds one of them, and in those that are imported later. Call it before a model is sharded. A
    second call changes nothing. Enums keep torch's members and values. torch's FSDP itself keeps what it had, and so
    does ``replicate()``. ``FSDPMeshInfo`` and ``ShardPlacementResult`` stay torch's, and are accepted. Frameworks that
    are asked for FSDP shard on CPUs too.

    Raises:
        RuntimeError: a model is sharded already, by whichever library.

    Ranks: each for itself, all of them.
    """
    if _bound:
        return len(_bound)
    _refuse_sharded("patch")
    interop.install()  # before: its values for these names hold torch's own
    for name in (*_PUBLIC, "torch.distributed._composable.replicate_with_fsdp"):
        if find_spec(name) is not None:
            importlib.import_module(name)
    frameworks.install()
    ours = _replacements()
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and not _is_left_alone(module.__name__):
            for name, value in list(vars(module).items()):
                if id(value) in ours:
                    _bound.append((vars(module), name, value))
                    vars(module)[name] = ours[id(value)]
    found = fullshard.__version__, torch.__version__, len(_bound)
    if os.environ.get("RANK", "0") == "0":
        _tell_if_nothing_is_sharded()
    _log.info("version %s replaces the FSDP of torch %s: %d names bound", *found)
    return len(_bound)


def unpatch() -> None:
    """Give torch's names back what they stood for. What was imported in between keeps what it has.

    Raises:
        RuntimeError: a model is sharded.

    Ranks: each for itself, all of them.
    """
    if _bound:
        _refuse_sharded("unpatch")
        for names, name, original in _bound:
            names[name] = original
        _bound.clear()
        frameworks.remove()


def is_patched() -> bool:
    """Whether torch's names stand for fullshard's.

    Ranks: each for itself.
    """
    return bool(_bound)


def patch_and_report() -> None:
    """:func:`patch` for unchanged programs. The first rank logs fullshard's choices on stderr. Only one process logs
    that fullshard is used instead of torch's FSDP: ``FULLSHARD_PATCH`` tells its child processes (ranks of a launcher,
    workers) that this is done."""
    is_reported = os.environ.get("FULLSHARD_PATCH") == _REPORTED
    if is_reported:
        patch()
    if os.environ.get("RANK", "0") == "0":
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("fullshard: %(message)s"))
        handler.addFilter(lambda _: not logging.getLogger().handlers)  # unless the program configures logging
        _log.addHandler(handler)
        _log.setLevel(logging.INFO)
        os.environ["FULLSHARD_PATCH"] = _REPORTED
    patch()


def _tell_if_nothing_is_sharded() -> None:
    """Say at the end of this process if an optimizer has stepped in it, and nothing was sharded."""
    stepped, sharded = list[str](), list[bool]()

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not stepped:  # torch iterates over these hooks, so that it cannot be removed here
            stepped.append(type(optimizer).__name__)

    register_optimizer_step_pre_hook(note)
    when_sharded(lambda unit: sharded.append(True))

    def tell() -> None:
        if _bound and stepped and not sharded:
            _log.warning(
                "nothing was sharded: this program trained with %s and called neither fully_shard nor "
                "FullyShardedDataParallel, so each rank had a whole model. A framework shards only if its settings "
                "ask for FSDP, as --use_fsdp of accelerate does",
                stepped[0],
            )

    Finalize(None, tell, exitpriority=0)  # in processes of multiprocessing atexit does not run


def _replacements() -> dict[int, Any]:
    """Our objects by the identity of torch's."""
    theirs = set().union(*(vars(module) for module in map(sys.modules.get, _PUBLIC) if module is not None))
    ours = {
        name: getattr(fullshard, name) for name in theirs.intersection(fullshard.__all__) - {"ShardPlacementResult"}
    }
    policies = {name: each for name, each in vars(wrap).items() if getattr(each, "__module__", "") == wrap.__name__}
    ours |= {name: each for name, each in policies.items() if name != "_Policy"}  # programs derive classes from torch's
    ours["ShardedGradScaler"] = ShardedGradScaler
    found = {}
    for module in map(sys.modules.get, _PUBLIC):
        for name in ours.keys() & vars(module).keys() if module is not None else ():
            if not isinstance(vars(module)[name], ModuleType):
                found[id(vars(module)[name])] = ours[name]
    return found


def _is_left_alone(name: str) -> bool:
    return name.startswith("fullshard") or (name not in _PUBLIC and name.startswith(_TORCH_CLASSES))


def _refuse_sharded(what: str) -> None:
    """Raise an error if a sharded model exists: programs would not recognize its classes any more."""
    gc.collect()
    names = {FSDPModule.__name__, "FullyShardedDataParallel"}
    for each in gc.get_objects():
        if issubclass(type(each), torch.nn.Module) and names & {cls.__name__ for cls in type(each).__mro__}:
            raise RuntimeError(
                f"fullshard.{what}() was called after a model, a {type(each).__name__}, was sharded: call it "
                f"first, at the beginning of the program"
            )
