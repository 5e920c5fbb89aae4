"""Tests of what `fully_shard` shows to its user; whether it trains right is the subject of `tests.parity`."""
