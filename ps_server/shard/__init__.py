"""A shard at work: locks and threads around `core`. Knows no coordinator and no gRPC.

apply.py      The threads that add gradients and step optimizers, and others that lend them a hand
job.py        What a shard holds while it runs: the state of `core`, with the locks, segments and waiting pulls beside
ledger.py     Limits the bytes that one caller may have staged on this shard, over all its workers and jobs
memory.py     How much memory this process may still take: a job that is larger is refused, or the kernel would kill the
metrics.py    What a server process tells Prometheus
pulls.py      Pulls: those that are admitted are sent, those that are not wait without a thread and can always say for
segments.py   Mapping a worker's segment, without trusting what it says
shard.py      The shard at work: locks, threads and waiting pulls around the pure rules of `core`
snapshots.py  Taking a checkpoint of a job on one shard, beside training
waiting.py    A pull while it is under way: what was asked for, where the answers go, which of its buckets wait
"""
