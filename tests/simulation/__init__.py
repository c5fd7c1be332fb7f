"""Clusters in virtual time, a seed each.

simulator.py        Shards without clock or socket: seeded random interleavings of calls
virtual_cluster.py  A whole cluster on hosts that die, over links that fail
virtual_time.py     A clock, processes, hosts and links, all driven by one seed
"""
