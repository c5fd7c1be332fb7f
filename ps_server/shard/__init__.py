"""A running shard: the rules of `core` with locks and threads around them. Uses neither coordinator nor gRPC.

bucket_messages.py Splits a bucket of an edition into messages for one reader
shared_changes.py The changes between copies of a bucket, for readers that have an older one
copied_buckets.py Copies a bucket for an edition: into memory of its own or into a memory file
editions.py   Editions: unchanging copies of a job's weights, for readers that follow training
feed_bytes.py The memory that the feeds of one principal may take, over all jobs
feed_context.py What the feeds of one shard have in common
feed_tally.py Counts the editions and bytes that readers of a job's weights get, for status and metrics
hosted.py     The jobs that a shard has: made, restored from checkpoints, and dropped
hosted_job.py A job on a shard: the state of `core`, with locks, segments and waiting pulls
last_weights.py The last weights of a job that has ended, for readers that follow it
mapped.py     Shares the memory of editions with readers on the host of a shard or a relay
metrics.py    A shard's counters and histograms for Prometheus; gauges are in ops/gauges.py
native_loops.py Chooses between the compiled library for tables and numpy
outbox.py     The outbox: the interface for the answers to one call
pulls.py      Pulls: sent as soon as they are admitted; the others wait without a thread
pushes.py     Pushes: each is checked, then staged, then its bucket is scheduled, and applied
restored_files.py The files of a checkpoint that a shard must read for a restore
row_feeds.py  Feeds of rows: each reader gets the changes of a table, round after round, from its cursor on
segments.py   Maps a worker's segment, without trusting the worker
shard.py      A shard: its jobs, and the calls to it
snapshots.py  Takes a snapshot of a job on one shard, while it trains; copies tables in pieces
optimizer_room.py Memory for the optimizer state of a script's later stages
terms.py      The terms of coordinators: a shard obeys only the latest one
relay_reports.py What relays have said of themselves, for status and metrics
reader_room.py Memory for rank 0's buffers, which readers get
threads.py    The threads of a shard: they apply updates, write checkpoints, and tick
waiting.py    A pull under way, and the limit of the buckets that each principal has asked for
weight_feeds.py Feeds of weights: each reader gets an edition, bucket after bucket, once it is complete
"""
