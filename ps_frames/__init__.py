"""Data connections between a worker and a shard: frames over TCP, with or without TLS, or over a unix socket.

Both ends know bytes and calls, and nothing of jobs, buckets or tables.

attending.py A thread that waits for answers receives them itself
client.py    A worker's end: calls side by side; when to open it again where it has ended
opening.py   Opens the connection that a shard offers
listener.py  Where workers open data connections, and connections that have not shown their ticket yet
loans.py     Lends weights to the threads that send them; they are copied only if an update must change them first
reading.py   Threads that read from connections as bytes come
server.py    A server's end: calls, memory for their payloads, and answers, which any thread sends without waiting
frames.py    The frames, which interleave the messages of several calls, and the sockets that carry them
"""
