"""Fully sharded data parallelism for PyTorch."""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if sys.orig_argv[-1:] == ["--version"] and [os.path.basename(each) for each in sys.orig_argv[-2:-1]] == ["fullshard"]:
    sys.exit(print(f"fullshard {__version__}"))  # what the command says, before torch is imported

from fullshard import interop as interop
from fullshard import optim as optim
from fullshard.comm.waits import LostRankError as LostRankError
from fullshard.compat import names as _names  # noqa: F401
from fullshard.compat.patch import is_patched as is_patched
from fullshard.compat.patch import patch as patch
from fullshard.compat.patch import unpatch as unpatch
from fullshard.finite import NonFiniteDetector as NonFiniteDetector
from fullshard.finite import NonFiniteError as NonFiniteError
from fullshard.finite import detect_non_finite as detect_non_finite
from fullshard.full_params import summon_full_params as summon_full_params
from fullshard.fully_shard import fully_shard as fully_shard
from fullshard.fully_shard import fully_shard_blocks as fully_shard_blocks
from fullshard.leave_out import leave_out as leave_out
from fullshard.module import FSDPModule as FSDPModule
from fullshard.module import GradientReductionHandle as GradientReductionHandle
from fullshard.module import UnshardHandle as UnshardHandle
from fullshard.module import register_fsdp_forward_method as register_fsdp_forward_method
from fullshard.module import share_comm_ctx as share_comm_ctx
from fullshard.policies import *  # noqa: F403
from fullshard.watch import watch as _watch  # noqa: F401
from fullshard.wrapper.flat import FlatParameter as FlatParameter
from fullshard.wrapper.fsdp import FullyShardedDataParallel as FullyShardedDataParallel
from fullshard.wrapper.settings import *  # noqa: F403

if TYPE_CHECKING:
    from fullshard import checkpoint as checkpoint
    from fullshard.report.doctor import Diagnosis as Diagnosis
    from fullshard.report.doctor import doctor as doctor
    from fullshard.report.explain import explain as explain
    from fullshard.report.metrics import Metrics as Metrics
    from fullshard.report.metrics import log_metrics as log_metrics
    from fullshard.report.record import Recording as Recording
    from fullshard.report.record import record as record

#: Where names are that are imported once they are asked for.
_LATER = {"Recording": "report.record", "explain": "report.explain", "record": "report.record"}
_LATER |= {"Metrics": "report.metrics", "log_metrics": "report.metrics"}
_LATER |= {"Diagnosis": "report.doctor", "doctor": "report.doctor"}
#: The classes and functions of these lines.
__all__ = [name for name, value in globals().items() if getattr(value, "__module__", "").startswith("fullshard.")]
__all__ += _LATER


def __getattr__(name: str) -> Any:
    """Imports ``checkpoint`` and reports once they are asked for: torch's own checkpoints take their time."""
    if name == "checkpoint":
        return importlib.import_module("fullshard.checkpoint")
    if name in _LATER:
        return getattr(importlib.import_module(f"fullshard.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if "FULLSHARD_DOCTOR" in os.environ:  # set by `fullshard doctor` for the ranks of the job that it looks at
    importlib.import_module("fullshard.report.rank_observer").start()
