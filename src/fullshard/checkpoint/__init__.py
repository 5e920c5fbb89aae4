"""Checkpoints that are never lost: :func:`save` and :func:`load` of a sharded model, its optimizer and other state.

Works with both front ends. Programs without ranks and without a model can use ``reader`` alone.
"""

from fullshard.checkpoint.background import finish as finish
from fullshard.checkpoint.blocks import BrokenCheckpoint as BrokenCheckpoint
from fullshard.checkpoint.blocks import CheckpointError as CheckpointError
from fullshard.checkpoint.load import load as load
from fullshard.checkpoint.near import forget as forget
from fullshard.checkpoint.preemption import Preemption as Preemption
from fullshard.checkpoint.reader import Checkpoint as Checkpoint
from fullshard.checkpoint.reader import checkpoints as checkpoints
from fullshard.checkpoint.reader import newest as newest
from fullshard.checkpoint.save import save as save
