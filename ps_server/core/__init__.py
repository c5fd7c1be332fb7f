"""The rules, without sockets, clocks, threads, environment or messages: `now` and data come in as arguments.

membership.py   who takes part in a job, and until when           (coordinator)
placement.py    which shard holds which bucket                    (coordinator)
bucket.py       one bucket's protocol: staged, applied, admitted  (shard)
weights.py      one bucket's tensors and optimizer                (shard)
shard_job.py    one job's buckets on one shard, put together      (shard)
"""
