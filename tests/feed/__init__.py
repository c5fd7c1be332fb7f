"""Feeds of weights: what a shard sends, and what a reader makes of it."""
