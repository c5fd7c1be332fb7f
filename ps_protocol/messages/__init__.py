"""The messages of the contract as values: what each carries, and both directions side by side.

A message is written by one process, and read by another that may have another version. So a value, the function that
writes it and the function that reads it stand in one file. A new field is added there, in `proto/`, where its value is
made, and where it is used.

data.py       Pushes and pulls of buckets, and the answers of shards
editions.py   Editions of weights: the requests of readers, and the answers of shards and relays
repeated.py   Exchanges that differ in their clock and hyper-parameters alone, without these
rows.py       Pushes, pulls and feeds of rows of tables, and the answers of shards
workers.py    Messages between workers and the coordinator: joins, heartbeats, rounds of values, leases of data
"""
