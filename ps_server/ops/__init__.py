"""What operators run and read.

dev_certs.py  `ps-server dev-certs`: a small CA with a certificate each for servers, clients and readers, for trying
gauges.py     A server process' gauges, read at each scrape; and /sd, where Prometheus finds every process
glibc.py      What a server asks of the C library: one pool of memory, and copies that go past the processor's cache
status.py     `ps-server status`, `health`, `end` and `checkpoint`: what operators ask of a running cluster
"""
