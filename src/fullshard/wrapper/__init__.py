"""The wrapper front end: ``FullyShardedDataParallel`` and its settings."""
