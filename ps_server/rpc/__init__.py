"""The servers' edge: the only package of ps_server that uses gRPC and protobuf messages.

auth.py             Identifies the principal of a call, by its bearer token or its certificate's name
call_limits.py      Authenticates and limits every call, and cancels slow peers
cluster_service.py  The coordinator's service for shards and operators
data_service.py     Serves pushes and pulls
feed_methods.py     The methods of FeedService, for shards and relays
feed_service.py     Serves readers that follow a job while it trains
feed_status.py      The measurements of a job's readers, as a message
grpc_port.py        The gRPC port of a server process: how it is bound and started
health.py           Serves the health of each server, and reflection
health_client.py    Checks a server's health, for probes
interceptor.py      Intercepts every gRPC method: errors become statuses, and calls are counted
job_service.py      The coordinator's service for whole jobs: registers, saves and ends them
operator_client.py  How operators and shards call the coordinator
own_ports.py        Checks whether this process serves, by calls to its own ports
permissions.py      Permissions: one table of every method with the roles that may call it, and principals
plain.py            Messages as plain data, and as JSON
position.py         The position of a watcher: the events and samples that it has already
relay_site.py       Serves editions of a relay as files over HTTP
relay_service.py    Serves the readers of a relay
receiving.py        Receives requests, a few of each kind at a time
registration.py     Registers a shard with the coordinator
shard_client.py     How the coordinator calls the shards
shard_messages.py   Requests of a coordinator to a shard, and the answers, as values and as messages
shard_service.py    A shard's service for the coordinator
streams.py          Server streams that hold no thread while they wait
view_messages.py    The view of a cluster as messages: what one caller may see of it
views.py            Answers of WatchStatus: each with the events and samples that its caller lacks
worker_services.py  The coordinator's services for workers: membership, rounds of values and data leases
"""
