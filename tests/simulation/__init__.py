"""Clusters in virtual time, a seed each."""
