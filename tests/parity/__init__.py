"""Training with `fully_shard` against unsharded training and torch's `fully_shard`, one case after the other."""
