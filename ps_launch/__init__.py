"""Starts child processes, servers and workers, and runs until they have ended. It knows their commands, and imports
none of their classes.

children.py     Starts and restarts children, passes on their output, detects their end, and stops them
failures.py     Describes how a worker failed: its code or signal, and the last line of its traceback
launch_folder.py The folder of a launch for temporary files; removes those of launchers that were killed
groups.py       The processes of workers, one each or the members of a group, which end and start together
lifeline.py     The standard input of a supervised process: one line, and its end when the parent is gone
output.py       The output of children, as whole lines: on the console after the worker's rank, and in a log file
ready.py        The line with which a supervised server tells its parent its addresses
restarts.py     How often, and after which pause, a child that ended is started again
local_cluster.py `ps-server up`: a cluster on this machine, one process a shard
timelines.py    Combines the timelines of a launch's workers into one file
worker_launch.py `ps-worker run`: workers on this machine
one_server.py   One server process for a parent of any kind: in threads, without signals
own_servers.py  Starts `ps-server up` as a child of `ps-worker run`, waits for its address, and stops it
"""
