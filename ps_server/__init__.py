"""The servers: shards that hold weights and optimizer state, and the coordinator that knows the workers.

core/          The rules, without sockets, clocks, threads, environment or messages: time and data come in as arguments
shard/         A running shard: locks and threads around `core`
coordinator/   The coordinator: which workers take part in a job, and which shard holds which bucket
relay/         A running relay: it follows editions, and sends them on to readers
storage/       The files of checkpoints, and of rows that do not fit into memory
view/          The view of a cluster for people, made once a second and kept for 15 minutes
rpc/           The edge: the only package here that uses gRPC and protobuf messages
ops/           Commands and outputs for operators; page/ has the files for the browser
config.py      The settings of a server process, each declared once
server.py      One server process: a gRPC port, a metrics port, and behind them a coordinator, a shard, or both
relay_config.py The settings of a relay
relay_server.py One relay process: a gRPC port, a metrics port, and behind them the jobs that it follows
failpoints.py  Named points in the code at which a server kills itself on request, for tests
cli.py         The command `ps-server`
"""

import ps_runtime  # noqa: F401  # sets what grpc reads when it is imported
from ps_runtime.version import version

__version__ = version()
