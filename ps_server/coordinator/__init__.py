"""Which workers take part in a job, and which shard holds which bucket.

coordinator.py  The coordinator: its jobs, and where each begins and ends
new_jobs.py     Makes a job on all shards: a new one, or one restored from the last checkpoint of its name
runs.py         The identity of each run of a job
coordinated_job.py A job, as its coordinator knows it: all that happens to it is a method of it
members.py      The live workers of one job, and which of them each shard counts
joins.py        Joins of one job: those that wait while others are being counted on the shards go together
coalesced.py    Group commit: callers that come while work is under way share the next turn of it
removals.py     Workers that are gone, and that shards may still count
lifecycle.py    The phase of a job (running, rolling back, ending), and whether it has ended
watchers.py     The workers that watch the roster of one job
job_data.py     The leased data of one job: the rules of core.data_leases with a lock, and the shards to ask
job_rounds.py   The rounds of one job: the rules of core.rounds with a lock, and the streams of the workers that wait
job_checkpoints.py The checkpoints of one job: when one is made, which is asked for, and what the last one has
checkpoint_attempt.py One checkpoint of a job under way: its clock, the shards' parts, the workers' states
worker_states.py The workers' own parts of a job's checkpoints
recovery.py     Rolling a job back to its last checkpoint, after a shard lost what it held
shared_room.py   Memory that all jobs share, of which no principal has more than half
shards.py       The shards as the coordinator knows them: what it asks of one, and which process serves which
held_jobs.py    Finds jobs that only the shards or only the coordinator has, and ends them
refusals.py     The errors for a process that cannot join now, such as because another launch trains the job
cluster.py      What all jobs of a coordinator share: the shards, the limits, the checkpoints, and the time
charge.py       Whether a coordinator is still in charge: another one may have taken its lease over
ended_jobs.py   The jobs that are over: why, and which of them have finished
events.py       What happened lately, for people who watch
job_script.py   What the script of one job has set that is the job's, for workers that join late
heard.py        The figures that the workers of one job have measured, from their last heartbeats
policy.py       When checkpoints are made, where they go, and how many are kept
state_file.py   What a coordinator needs to come back after its death, in one small file beside the checkpoints
timing.py       The coordinator's clock, and the times that it waits, in seconds
"""
