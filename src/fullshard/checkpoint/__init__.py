"""State dicts of sharded models and of their optimizers."""
