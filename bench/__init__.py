"""Benchmarks: each prints JSON, one line a result, with the peer measured beside us in the same run."""
