"""Fully sharded data parallelism for PyTorch."""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if sys.orig_argv[-1:] == ["--version"] and [os.path.basename(each) for each in sys.orig_argv[-2:-1]] == ["fullshard"]:
    sys.exit(print(f"fullshard {__version__}"))  # what the command says, before torch is imported

import torch as _torch

if not _torch.distributed.is_available():
    raise ImportError(
        f"this torch, {_torch.__version__}, was built without torch.distributed, by which the ranks of fullshard "
        f"communicate: install a build that has it, such as those of pytorch.org"
    )

from fullshard import optim as optim
from fullshard.comm.waits import PeerFailureError
from fullshard.compat import names as _names  # noqa: F401
from fullshard.compat.patch import is_patched, patch, unpatch
from fullshard.disk.file import DiskError
from fullshard.finite import NanDetector, NanError, detect_nan
from fullshard.full_params import summon_full_params
from fullshard.fully_shard import fully_shard, fully_shard_blocks
from fullshard.handles import GradientReductionHandle, UnshardHandle
from fullshard.module import FSDPModule, register_fsdp_forward_method, share_comm_ctx
from fullshard.offload_policy import CPUOffloadPolicy, DiskOffloadPolicy, OffloadPolicy
from fullshard.policies import (
    AllGather,
    Comm,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    ReduceScatter,
    ShardPlacementResult,
)
from fullshard.ragged import Ragged
from fullshard.skip_module import skip_module
from fullshard.watch import watch as _watch  # noqa: F401
from fullshard.wire_policy import WirePolicy

if TYPE_CHECKING:
    from fullshard import checkpoint as checkpoint
    from fullshard.report.doctor import Diagnosis, doctor
    from fullshard.report.explain import explain
    from fullshard.report.metrics import Metrics, log_metrics
    from fullshard.report.plan import Plan
    from fullshard.report.profile import Trace, profile
    from fullshard.report.search import DoesNotFitError, fit
    from fullshard.wrapper.flat import FlatParameter
    from fullshard.wrapper.fsdp import FullyShardedDataParallel
    from fullshard.wrapper.settings import (
        BackwardPrefetch,
        CPUOffload,
        FullOptimStateDictConfig,
        FullStateDictConfig,
        LocalOptimStateDictConfig,
        LocalStateDictConfig,
        MixedPrecision,
        OptimStateDictConfig,
        OptimStateKeyType,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        ShardingStrategy,
        StateDictConfig,
        StateDictSettings,
        StateDictType,
    )

__all__ = [
    "AllGather",
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "Comm",
    "DataParallelMeshDims",
    "Diagnosis",
    "DiskError",
    "DiskOffloadPolicy",
    "DoesNotFitError",
    "FSDPModule",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "GradientReductionHandle",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "Metrics",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "NanDetector",
    "NanError",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "PeerFailureError",
    "Plan",
    "Ragged",
    "ReduceScatter",
    "ShardPlacementResult",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "Trace",
    "UnshardHandle",
    "WirePolicy",
    "detect_nan",
    "doctor",
    "explain",
    "fit",
    "fully_shard",
    "fully_shard_blocks",
    "is_patched",
    "log_metrics",
    "patch",
    "profile",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "skip_module",
    "summon_full_params",
    "unpatch",
]

#: Where names are that are imported once they are asked for.
_LATER = {"Trace": "report.profile", "explain": "report.explain", "profile": "report.profile"}
_LATER |= {"Metrics": "report.metrics", "log_metrics": "report.metrics"}
_LATER |= {"DoesNotFitError": "report.search", "Plan": "report.plan", "fit": "report.search"}
_LATER |= {"Diagnosis": "report.doctor", "doctor": "report.doctor"}
_LATER |= {"FlatParameter": "wrapper.flat", "FullyShardedDataParallel": "wrapper.fsdp"}
_SETTINGS = "BackwardPrefetch", "CPUOffload", "MixedPrecision", "OptimStateKeyType", "ShardingStrategy"
_STATE_DICTS = "Full", "Local", "Sharded", "FullOptim", "LocalOptim", "ShardedOptim", "Optim", ""
_LATER |= dict.fromkeys((*_SETTINGS, "StateDictSettings", "StateDictType"), "wrapper.settings")
_LATER |= dict.fromkeys((f"{kind}StateDictConfig" for kind in _STATE_DICTS), "wrapper.settings")

if not TYPE_CHECKING:  # which would accept any name

    def __getattr__(name: str) -> Any:
        """Imports the wrapper, ``checkpoint`` and reports once they are asked for."""
        if name == "checkpoint":
            return importlib.import_module("fullshard.checkpoint")
        if name in _LATER:
            return getattr(importlib.import_module(f"fullshard.{_LATER[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if "FULLSHARD_DOCTOR" in os.environ:  # set by `fullshard doctor` for the ranks of the job that it looks at
    importlib.import_module("fullshard.report.rank_observer").start()
