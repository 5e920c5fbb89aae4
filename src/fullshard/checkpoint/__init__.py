"""Checkpoints that are never lost: :func:`save` and :func:`load` of a sharded model, its optimizer and other state.

Works with both front ends. Programs without ranks and without a model can use ``reader`` alone.
"""

from fullshard.checkpoint.background import wait_until_finished
from fullshard.checkpoint.blocks import CheckpointError, CorruptCheckpointError
from fullshard.checkpoint.keep import BestN, CheckpointInfo, EveryNSteps, LatestN, NewerThan, PreservationPolicy
from fullshard.checkpoint.load import load
from fullshard.checkpoint.preemption import PreemptionHandler
from fullshard.checkpoint.pretrained import load_pretrained
from fullshard.checkpoint.reader import Checkpoint, latest, list_checkpoints
from fullshard.checkpoint.replicas import forget_replicas
from fullshard.checkpoint.save import save

__all__ = [
    "BestN",
    "Checkpoint",
    "CheckpointError",
    "CheckpointInfo",
    "CorruptCheckpointError",
    "EveryNSteps",
    "LatestN",
    "NewerThan",
    "PreemptionHandler",
    "PreservationPolicy",
    "forget_replicas",
    "latest",
    "list_checkpoints",
    "load",
    "load_pretrained",
    "save",
    "wait_until_finished",
]
