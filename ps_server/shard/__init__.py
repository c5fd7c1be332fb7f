"""A shard at work: locks and threads around `core`. Knows no coordinator and no gRPC.

bucket_messages.py A bucket of an edition on its way to one reader, in as many messages as that wants
shared_changes.py What changed between copies of a bucket, for readers that have an older one
editions.py   Editions: unchanging copies of a job's weights, for readers that follow training
feed_bytes.py The memory that the feeds of one principal may take, over all jobs
feed_tally.py What readers of a job's weights have had, for people who watch
hosted.py     The jobs that a shard has: made, restored from checkpoints, and dropped
hosted_job.py What a shard holds while it runs: the state of `core`, with locks, segments and waiting pulls beside it
last_weights.py The last weights of a job that has ended, for readers that follow it
metrics.py    What a shard tells Prometheus
native_loops.py The library for tables in a server process: whether it is used
outbox.py     Where the answers to one call go
pulls.py      Pulls: sent as soon as they are admitted; the others wait without a thread
pushes.py     Pushes: each is checked, then staged, then its bucket is scheduled, and applied
restored_files.py The files of a checkpoint that have what a shard is to restore, and what is read from them
row_feeds.py  Feeds of rows: each reader is sent what changed in a table, round after round, from its cursor on
segments.py   Mapping a worker's segment, without trusting what it says
shard.py      A shard: the jobs that it has, and what is asked of it
snapshots.py  Taking a checkpoint of a job on one shard, beside training; copying tables for it in pieces
stage_room.py Room for what optimizers keep in a later stage of a script
terms.py      The terms of coordinators, as a shard knows them: it obeys the latest one alone
told_room.py  Room for the buffers of rank 0, which readers get
threads.py    The threads of a shard: they apply updates, write checkpoints, and tick
waiting.py    A pull while it is under way, and how many buckets each principal may have asked for
weight_feeds.py Feeds of weights: each reader is sent an edition, bucket after bucket, once it is complete
"""
