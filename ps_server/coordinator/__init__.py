"""Which workers take part in a job, and which shard holds which bucket.

admitting.py    Having the shards count a worker that joins, in two rounds, so that each counts it from the same clock
checkpoints.py  Checkpoints of one job, from the coordinator's side: when, at which clock, and what belongs to each
coordinator.py  The coordinator: jobs, who takes part in them, and where their buckets are
data.py         The leased data of one job, on the coordinator: the rules of core.data_leases with a lock, and the
job.py          A job and its shards, as the coordinator holds them
keeping.py      What a coordinator keeps on disk, and what it makes of it when it comes back: checkpoints, and its own
launches.py     What a launch is told that asks for places which workers of another launch hold
leasing.py      Leasing a job's data: what core.data_leases needs to hear from its membership and its shards
policy.py       When checkpoints are made, where they go, and how many are kept
recovery.py     Setting a job back to its last checkpoint, after a shard lost what it held
retiring.py     Having the shards stop counting a worker, however long one of them takes to hear it
rounds.py       The rounds of one job on the coordinator: the rules of core.rounds with a lock, and the streams of those
shards.py       The shards as the coordinator knows them: what it asks of one, and which process serves which
state_file.py   What a coordinator needs to come back after its death, in one small file beside the checkpoints
"""
