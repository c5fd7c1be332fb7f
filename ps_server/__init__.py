"""The servers: shards that hold weights and optimizer state, and the coordinator that knows the workers.

core/          The rules, without sockets, clocks, threads, environment or messages: time and data come in as arguments
shard/         A shard at work: locks and threads around `core`
coordinator/   Which workers take part in a job, and which shard holds which bucket
relay/         A relay at work: editions that it follows for others, and hands on
storage/       The files of checkpoints, and of rows that memory has no room for
view/          What people see who watch a cluster, made once a second and kept for 15 minutes
rpc/           The edge: the only room of the servers that knows gRPC and messages
ops/           What operators run and read; page/ beside it is what a browser gets
config.py      What a server process is told: the declaration of every setting
server.py      One server process: a gRPC port, a metrics port, and behind them a coordinator, a shard, or both
relay_config.py What a relay is told
relay_server.py One relay process: a gRPC port, a metrics port, and behind them the jobs that it follows
failpoints.py  Places where a server kills itself on request, so that tests can show what a death there does
cli.py         The command `ps-server`
"""

import ps_runtime  # noqa: F401  # sets what grpc reads when it is imported
from ps_runtime.version import version

__version__ = version()
