"""The edge: the only room of the servers that knows gRPC and messages.

auth.py            Who a caller is: by its bearer token, by the name in its certificate, or, where nobody is asked, by
call_limits.py     Authenticates and limits every call, and cancels slow peers
convert.py         Where protobuf messages become the server's values, and back
data_messages.py   Where the messages of the data path become the server's values, and back; see `messages`
interceptor.py     The boundary of every gRPC method: errors become statuses, and each call is counted under the
lease_messages.py  Messages about leased data as the server's values, and back: what `messages` is for everything else
permissions.py     Who may call what: one table of every method, and callers as values
services.py        The gRPC methods: each checks, delegates, and answers
shard_client.py    How the coordinator calls the shards
streams.py         Server streams that hold no thread while they wait
"""
