"""Training that survives the loss of processes, with the parameters of an undisturbed run, to the bit."""

from fullshard.elastic.entry import ElasticError
from fullshard.elastic.local import LocalRounds
from fullshard.elastic.session import Elastic, ElasticStep, MicroBatch

__all__ = ["Elastic", "ElasticError", "ElasticStep", "LocalRounds", "MicroBatch"]
