"""How a worker reaches the servers: the only room of the worker that knows gRPC and messages.

options.py        Which job a worker takes part in, as which of its workers, and how it reaches the servers
participation.py  A worker's part in its job, through every place that it has there: one connection after the other
connection.py     One incarnation of a worker in its job: its place, and the ways to all shards that it opens from there
transport.py      The ways for buckets between a worker and one shard: what each has to do, and the way over the network
shared_memory.py  The transport through shared memory: buckets in a segment that worker and shard both map
row_transport.py  Moves rows between a worker and all shards
first_rows.py     Rows from before `prepare` on their way from rank 0 to a shard
feeds.py          Feeds of rows, as a reader calls them
local_segment.py  A segment: memory that the worker makes, and hands over to shards on its host
calls.py          Calls to a shard, which are repeated when they fail: over its data connection, or by gRPC
told_buffers.py   What rank 0 tells of tensors that no optimizer steps, for readers of the weights
landing.py        A pull under way: which buckets are still to come, and where the elements of each belong
coordinator_calls.py Calls to the coordinator
own_membership.py A worker's place in its job: taken, kept by heartbeats, and taken again when it was lost
group_membership.py The place of a group in its job, as one of its members has it
heartbeat_process.py Heartbeats while C code keeps the GIL: the process beside the worker that sends them
heartbeat_child.py What that process runs: the standard library alone
launcher_reports.py The calls of launchers to a coordinator: they report processes that have ended
script.py         Tells the coordinator what this worker's script has set, for workers that join late
value_rounds.py   A worker's part in the job's rounds, in which all live workers exchange a value
"""
