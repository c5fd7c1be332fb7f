"""Starts child processes, servers and workers, and stays until they have ended.

output.py    What workers write, made into whole lines with the worker's rank in front, and into a file for each worker
restarts.py  How often, and after which pause, a worker that failed is started again
servers.py   `ps-server up`: a cluster on this machine, one process a shard
workers.py   Starts worker processes on this machine and stays until all have ended
"""
