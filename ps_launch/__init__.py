"""Starts child processes, servers and workers, and stays until they have ended. It knows commands, not classes.

children.py     Starts and restarts children, passes on what they write, notices their end, and stops them
failures.py     How a worker failed, in a few words: its code or signal, and the last line of its traceback
launch_folder.py The folder of a launch for temporary files, and those of launchers that were killed
groups.py       The processes of workers, one each or the members of a group, which end and start as a whole
lifeline.py     A supervised process' standard input: one line, and whether the parent is there
output.py       What children write, as whole lines: on the console with a worker's rank in front, and in a log file
ready.py        The line by which a supervised server tells its parent where it serves
restarts.py     How often, and after which pause, a child that ended is started again
local_cluster.py `ps-server up`: a cluster on this machine, one process a shard
timelines.py    The timelines of the workers of one launch, as one file
worker_launch.py `ps-worker run`: workers on this machine
one_server.py   One server process for a parent of any kind: in threads, without signals
own_servers.py  The servers that `ps-worker run` starts itself: `ps-server up` as its child
"""
