"""How a worker reaches the servers: the only room of the worker that knows gRPC and messages.

participation.py  A worker's part in its job, through every place that it has there: one connection after the other
connection.py     One incarnation of a worker in its job: its place, and the ways to all shards that it opens from there
transport.py      What a way for buckets between a worker and one shard must offer
network.py        One way: buckets as gRPC messages
shared_memory.py  The other: buckets through memory that the worker shares with the shards on its host
calls.py          How a shard is called: with bytes, through the one retry loop
coordinator.py    Calls to the coordinator, and the one retry loop that every call goes through
membership.py     A worker's place in its job: taken, kept by heartbeats, and taken again when it was lost
rounds.py         A worker's part in the job's rounds, in which all live workers exchange a value
convert.py        Where the worker's values become protobuf messages, and back
threads.py        Threads that work for a session and never keep a script from ending
"""
