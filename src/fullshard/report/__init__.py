"""Reports: what sharding does to a model before it trains, and what happened in its steps."""
