"""The edge: the only room of the servers that knows gRPC and messages.

auth.py             Tells the principal of a call: by its bearer token, or its certificate's name
call_limits.py      Authenticates and limits every call, and cancels slow peers
cluster_service.py  Serves what shards and operators ask of the coordinator
coordinator_client.py How operators and shards call the coordinator
data_service.py     Serves pushes and pulls
feed_methods.py     The methods of FeedService, which shards and relays serve alike
feed_service.py     Serves readers that follow a job while it trains
feed_status.py      How a job's weights are read, as a message
grpc_port.py        The gRPC port of a server process: how it is bound and started
health.py           Serves the health of each server, and reflection
health_client.py    Asks a server whether it serves, as probes do
interceptor.py      Intercepts every gRPC method: errors become statuses, and calls are counted
job_service.py      Serves what is asked of the coordinator about jobs as a whole: they are registered, saved and ended
own_ports.py        Whether this process serves: it asks its own ports
permissions.py      What each role may call: one table of every method, and principals as values
plain.py            Messages as plain data, and as JSON
position.py         Where a reader of views is: what it has been told already
relay_site.py       Serves editions of a relay as files over HTTP
relay_service.py    Serves the readers of a relay
receiving.py        Receives requests, a few of each kind at a time
registration.py     How a shard makes itself known to the coordinator
shard_client.py     How the coordinator calls the shards
shard_messages.py   What a coordinator asks of a shard and hears from it, as values and as messages
shard_service.py    Serves what the coordinator asks of a shard
streams.py          Server streams that hold no thread while they wait
view_messages.py    The view of a cluster as messages: what one caller may see of it
views.py            Answers of WatchStatus: each with what its caller has not been told yet
worker_services.py  Serves workers: they join jobs, live in them, gather values in rounds and lease data
"""
