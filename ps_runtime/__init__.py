"""Code that every process needs, and that knows nothing of tensors, workers or shards.

arrivals.py       Limits each host's connections: how many it has, and how many it opens
audit.py          The audit log: who was refused, joined, left, and ended a job; a JSON object a line
background.py     Background threads, which survive exceptions in their work
channel.py        Channels and servers: the options that both ends must have in common
command_line.py   The parser of a command, with short errors
completion.py     Completion of commands and flags in bash, zsh and fish
config_file.py    A file of settings, as TOML: `--config FILE` reads it, and `config` prints one
credentials.py    Certificate files for TLS and bearer tokens, a process's own and those of its peers
dates.py          Dates in words, for people who read logs
downloads.py      Serves bytes in memory over HTTP: whole, a range, or the answer that they have not changed
free_ports.py     A free port for a process that listens there later
grpc_status.py    Errors of the project as gRPC statuses, and back
launch_id.py      The launch that a process belongs to, and its report to the launcher
local_sockets.py  Unix sockets in a directory that other users can write to
logs.py           Log lines: text for a person, or a JSON object a line for a program
memory.py         The memory that this process may still allocate
memory_files.py   Memory files, which processes of one host can map: made, filled, sealed, checked
memory_place.py   Identifies a directory on a machine, in which processes can share memory
metrics.py        Serves /metrics, and has the parts that all metrics share
own_address.py    The address by which this machine is seen from a server
own_program.py    Starts another program of this project: the installed one, whatever is in the current folder
pools.py          Pools of threads: those of servers survive a lack of threads, those of workers let a script end
quantities.py     Quantities as text for a person: sizes in bytes, counts
rank.py           The rank of a process, the number of workers, and its local rank on the host
reloading.py      Values that are read from files, and read again when they change
retry.py          Repeats a failed call: the pauses, the time limit, and the meaning of the failure
known_variables.py Every PS_* variable that a setting reads
settings.py       One declaration a setting: argument, flag, PS_* variable, name in a file, type, default, help
signals.py        Signals: handlers, waits in which they are handled, and blocks that they do not disturb
thread_limit.py   The number of threads that this process may have
tls_contexts.py   TLS of connections other than gRPC's
tls_diagnosis.py  Explains why a TLS handshake fails
troubles.py       Recurring errors: logged once, then counted
version.py        The versions of this software and of its dependencies that a process runs
web.py            HTTP(S): bounded connections, and small sites for people on this machine
"""

import os

# grpc reads these when it is imported: ps_server and ps_worker import this package first.
# A DataLoader forks, and its processes call no server: grpc's fork handlers would fill the log, and have been seen to
# crash the child.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# At a lower level grpc writes a line for each handshake that fails: any client could fill a server's log, and a user
# would have to look for our one clear line beneath it.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
