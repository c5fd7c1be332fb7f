"""What servers and workers must agree on: a change on one side alone breaks the other.

addresses.py       What an address and a host's name may be
codecs.py          How a bucket's elements become a payload, and back: the one home of wire formats
convert.py         Protobuf messages as values, and back, where both ends do the same
data.py            Elastic data: batches that the coordinator leases to workers, as both ends speak of them
errors.py          Every error of the project, its reason and its canonical code
figures.py         What a worker measures of its own work, for people who watch
fragments.py       The fragments of a model in mode `local:H/F`: when each is pushed and mixed in
framing.py         Messages with a payload: all fields but the last by protobuf, the payload by hand, without a copy
frames.py          How messages travel on a data connection, those of several calls one after the other
hyper_parameters.py  Hyper-parameters of optimizers, as plain values
identity.py        Who a worker is: what every message of one names
job.py             What a job is, as a value that both ends can compare
layout.py          How a model's parameters become buckets: one pure function that both ends run on the same job
local.py           Local steps: the modes `local:H`, `local:H/F` and `local:Ts`, their rounds, and the outer optimizer
modes.py           The modes of training, and the one rule behind four of them
optimizer_state.py What torch.optim's optimizers keep for each parameter, by name
optimizers.py      Which torch.optim optimizers a shard can run on slices of parameters, and what they are called with
row_ids.py         Ids of rows: how they are mixed, and which shard has a row
row_memory.py      Memory for rows that a worker shares with the shards on its host
row_optimizers.py  Which optimizers can step the rows of a table, and what they are called with
segment_layout.py  Memory that a worker shares with the shards on its host: what lies where in it
stages.py          What trains a bucket from some step on: stages of a script that goes on with other optimizers
tables.py          What a table of rows is, as a value that both ends can compare
tensors.py         Bytes as tensors and tensors as bytes, without copying
wire_formats.py    How many bytes a bucket's elements take on the wire, and which format it travels in
versions.py        Versions of the protocol, and which of them understand each other
"""
