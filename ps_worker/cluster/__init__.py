"""How a worker reaches the servers: the only room of the worker that knows gRPC and messages.

connection.py     One incarnation of a worker in its job: its place, and the ways to all shards that it opens from there
convert.py        Where the worker's values become protobuf messages, and back
coordinator.py    Calls to the coordinator, and the one retry loop that every call goes through
membership.py     A worker's place in its job: taken, kept by heartbeats, and taken again when it was lost
participation.py  A worker's part in its job, through every place that it has there: one connection after the other
rounds.py         A worker's part in the job's rounds, in which all live workers exchange a value; the coordinator keeps
shared_memory.py  A segment that this worker shares with the shards on its host
threads.py        Threads that work for a session and never keep a script from ending
transports.py     The two ways that buckets travel between a worker and one shard: over the network, or through shared
"""
