"""What every process needs, and would need if this were no parameter server.

channel.py        How channels and servers are set up: the options that both ends must hold in common
credentials.py    How a process proves who it is, and whom it trusts: certificate files for TLS, and a bearer token
exposure.py       Who can reach a port: this machine alone, unless it is encrypted or somebody said that it need not be
launch_id.py      Which launch this process belongs to: that tells a worker that is started again from a stranger's of
metrics.py        How every process of the project serves its metrics over HTTP: /metrics, and other paths that a
rank.py           Which worker a process is: its rank, the number of workers, and its place on its host
reloading.py      A value that is read from files, and read again when they change
settings.py       How every setting is found, by both commands and by `connect` alike: the flag or argument, its
tls_diagnosis.py  Why a TLS connection does not come about, in one line: gRPC only says that it did not
variables.py      The PS_* variables that some part of the project reads, and the word about those that nothing reads
"""
