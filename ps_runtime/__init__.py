"""What every process needs, and is no matter of tensors, workers or shards.

arrivals.py       Connections by host: how many each has, and how many it has opened of late
audit.py          The audit log: who was refused, joined, left and ended what, a JSON object a line
background.py     Threads that run beside the calls of a process, and go on whatever happens in them
channel.py        Channels and servers: the options that both ends must hold in common
command_line.py   The parser of a command, with short errors
completion.py     Completion of commands and flags in bash, zsh and fish
config_file.py    A file of settings, as TOML: what `--config FILE` reads, and what `config` prints
credentials.py    TLS and tokens: what a process shows to its peers, and what it checks of them
dates.py          Dates in words, for people to read in logs
downloads.py      Serves bytes that lie in memory over HTTP: whole, a range, or that they have not changed
free_ports.py     A free port for a process that listens there later
grpc_status.py    Errors of the project as gRPC statuses, and back
launch_id.py      Which launch a process belongs to, and what it tells its launcher
local_sockets.py  Unix sockets in a directory that other processes write into, too
logs.py           Log lines: text for a person, or a JSON object a line for a program
memory.py         How much memory this process may still take
memory_files.py   Memory files, which processes of one host can map: made, filled, sealed, checked
memory_place.py   Where processes can share memory
metrics.py        /metrics, and what all metrics have in common
own_address.py    The address by which this machine is seen from a server
own_program.py    How a process starts another program of this project
pools.py          Pools of threads: of servers, which go on without more threads, and of workers, which let a script end
quantities.py     Quantities as text for a person: sizes in bytes, counts
rank.py           Which worker a process is: its rank, the number of workers, and its place on its host
reloading.py      Values that are read from files, and read again when they change
retry.py          How a failed call is repeated: the pauses, the limit, and what the failure means
settings.py       One declaration a setting: argument, flag, PS_* variable, name in a file, type, default, help
signals.py        Signals: handlers, waits in which they are handled, and blocks that they do not disturb
thread_limit.py   How many threads this process may have
tls_contexts.py   TLS of connections that are not gRPC's
tls_diagnosis.py  Why a TLS connection does not come about
troubles.py       Troubles that come again and again: logged once, then counted
version.py        Which version of this software, and of what it stands on, a process runs
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
