"""Starts child processes, servers and workers, and stays until they have ended. It knows commands, not classes.

children.py  Starts children, hears what they write, sees them end, starts them again, stops them
output.py    What children write: whole lines, with a worker's rank in front, and a file for each worker
restarts.py  How often, and after which pause, a child that ended is started again
servers.py   `ps-server up`: a cluster on this machine, one process a shard
workers.py   `ps-worker run`: workers on this machine
"""
