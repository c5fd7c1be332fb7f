"""What operators run and read.

dev_certs.py  `ps-server dev-certs`: a small CA with a certificate each for servers, clients and readers, for trying
gauges.py     A server process' gauges, read from its state when somebody scrapes; and /sd, where Prometheus finds
glibc.py      What a server asks of the C library: one pool of memory, and copies that go past the processor's cache
probe.py      `ps-server health`: asks the standard gRPC health service, for container and cluster probes
status.py     `ps-server status`: what is running, how far it is, and who waits for whom
"""
