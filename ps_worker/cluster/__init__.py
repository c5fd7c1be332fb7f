"""A worker's connections to the servers: the only package of ps_worker that uses gRPC and protobuf messages.

A *place* is one membership of the worker in its job, from a join until its loss: a rank, an incarnation and the clock
at which it began (`JoinResult`).

options.py        A worker's settings for its job: rank, servers, transport and timeouts
participation.py  A worker's part in its job, over all its places: one connection after the other
connection.py     One incarnation of a worker in its job: its place, and its transports to all shards
transport.py      The interface of a transport for buckets to one shard, and the transport over the network
shared_memory.py  The transport through shared memory: buckets in a segment that worker and shard both map
row_transport.py  Moves rows between a worker and all shards
first_rows.py     Rows from before `prepare` on their way from rank 0 to a shard
feeds.py          A reader's calls for feeds of rows
local_segment.py  A segment: memory that the worker makes, and hands over to shards on its host
calls.py          Calls to a shard, which are repeated when they fail: over its data connection, or by gRPC
reader_buffers.py Rank 0 sends tensors that no optimizer steps (buffers) to the shards, for readers of the weights
landing.py        A pull under way: which buckets are still to come, and where the elements of each belong
coordinator_calls.py Calls to the coordinator
own_membership.py A worker's membership: joins, keeps the place by heartbeats, and joins again when it is lost
group_membership.py A group's membership, on one of its members
heartbeat_process.py Sends heartbeats from a child process while C code keeps the GIL
heartbeat_child.py The program of that child process, on the standard library alone
launcher_reports.py The calls of launchers to a coordinator: they report processes that have ended
script.py         Reports the settings of this worker's script to the coordinator, for workers that join late
value_rounds.py   A worker's part in the job's rounds, in which all live workers exchange a value
"""
