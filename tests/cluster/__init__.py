"""Whole clusters: consistency, recovery, checkpoints, metrics."""
