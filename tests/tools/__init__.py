"""Clusters, clients and faults that several tests use."""
