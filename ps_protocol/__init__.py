"""The agreements between servers and workers. A change on one side alone breaks the other.

addresses.py       The syntax of addresses and of host names
changes.py         The change of a bucket between two of its versions, as bytes
convert.py         Conversions between protobuf messages and values; payloads, headers of answers, notices of a wait
batches.py         Elastic data: the batches that the coordinator leases to workers
errors.py          Every error of the project, its reason and its canonical code
figures.py         The measurements of a worker, for dashboards
fragments.py       The fragments of a model in mode `local:H/F`, and the steps at which each is pushed and mixed in
framing.py         Messages with a payload: protobuf for the other fields, no copy for the payload
handover.py        The offer by which a reader gets memory from a relay on the same host
hyper_parameters.py  Hyper-parameters of optimizers, as plain values
identity.py        The identity of a worker, which all its messages carry
job.py             The specification of a job, which servers compare between workers
layout.py          Cuts a model's parameters into buckets
local.py           Local steps: the modes `local:H`, `local:H/F` and `local:Ts`, their rounds, and the outer optimizer
messages/          The messages of the contract as values, and both directions of each
modes.py           The modes of training, and the one rule behind four of them
numpy_numbers.py   Numbers of numpy, where a number of Python is expected
optimizer_state.py The state that torch.optim's optimizers keep for each parameter, by name
optimizers.py      The torch.optim optimizers that a shard can run on slices of parameters, and their arguments
pieces.py          Pieces of parameters, which the members of a group hold; the whole parameters that they form
row_ids.py         Ids of rows: their hash, and the shard of a row
row_optimizers.py  The optimizers that can step the rows of a table, and their arguments
segment_layout.py  The layout of the memory that a worker shares with the shards on its host
stage_spec.py      Stages of a script that changes its optimizers: the optimizer of a bucket in each stage
tables.py          The specification of a table of rows, which servers compare between workers
tensors.py         Tensors as bytes: as they lie in memory, without copying, and in the wire formats of buckets
versions.py        The versions of the protocol, and their compatibility
wire_formats.py    The wire formats of buckets: their names, and the size of a bucket in each, in bytes
"""
