"""What a sharded model will do and what it has done: explained before training, recorded while it trains."""
