"""The messages of the contract as values: what each carries, and both directions side by side.

A message is written by one process, and read by another that may have another version. So a value, the function that
writes it and the function that reads it stand in one file. A new field is added there, in `proto/`, where its value is
made, and where it is used.

data.py       Pushes and pulls of buckets, and what shards answer
editions.py   Editions of weights: what readers ask shards for, and what these answer
rows.py       Pushes, pulls and feeds of rows of tables, and what shards answer
workers.py    What workers tell the coordinator and hear from it: joins, signs of life, rounds of values, leases of data
"""
