"""Commands and outputs for operators.

columns.py      Tables for a terminal, none wider than the window
compiler.py     Keeps torch's compiler out of a server
dev_certs.py    `ps-server dev-certs`: a small CA, and certificates for servers, clients and readers, to try things out
feed_gauges.py  The readers of a job's weights, as gauges of shards and relays
feed_screen.py  `ps-server feed`: follows a job's weights in a terminal
gauges.py       A server process' gauges, read at each scrape; and /sd, where Prometheus finds all processes
glibc.py        Settings of the C library: one pool of memory, and large copies past the processor's cache
health_port.py  Two pages in plaintext, for probes that cannot show a certificate
plan.py         `ps-server plan`: the resources that a job needs, before anything is started
plan_costs.py   Measured processor time of a step
plan_tables.py  The memory of tables of rows
page.py         The page on which a browser shows a cluster; and `ps-server page`
race.py         The race of a job's workers, for a terminal
requests.py     Requests of operators to a running cluster: `ps-server status`, `end`, `checkpoint` and `report`
screen.py       `ps-server status --watch`: what limits each job, the race and the processes, drawn again and again
relay_gauges.py A relay's editions and readers, as gauges
security_gauges.py The exposure of a server process, as gauges
status_text.py  The state of a cluster as text: the output of `ps-server status`
"""
