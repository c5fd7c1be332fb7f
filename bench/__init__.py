"""Benchmarks: each prints JSON, one line a result, with the peer measured in the same run."""
