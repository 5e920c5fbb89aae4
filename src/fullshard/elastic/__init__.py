"""Training that survives the loss of processes, with the parameters of an undisturbed run, to the bit."""

from fullshard.elastic.session import Elastic, ElasticError, MicroBatch, Step

__all__ = ["Elastic", "ElasticError", "MicroBatch", "Step"]
