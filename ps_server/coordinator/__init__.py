"""The coordinator: it decides which workers take part in a job, and which shard holds which bucket.

coordinator.py  The coordinator: its jobs, from beginning to end
new_jobs.py     Makes a job on all shards: a new one, or one restored from the last checkpoint of its name
runs.py         The identity of each run of a job
coordinated_job.py A job on its coordinator: everything that happens to a job is a method of it
job_workers.py  The live workers of one job, and which of them each shard counts
joins.py        Joins of one job: workers that come during another join are added together after it
coalesced.py    Group commit: calls that arrive while one is under way are carried out together by the next
removals.py     Workers that have left, and that shards may still count
lifecycle.py    The phase of a job (running, rolling back, ending), and whether it has ended
watchers.py     The workers that watch the roster of one job
job_data.py     The leased data of one job: the rules of core.data_leases with a lock, and the calls to shards
job_value_rounds.py The rounds of values of one job: core.rounds_of_values with a lock, and the streams that wait
job_checkpoints.py The checkpoints of one job: decides when one is made, and runs the attempts
checkpoint_attempt.py One checkpoint of a job under way: its clock, the shards' parts, the workers' states
worker_states.py The workers' own parts of a job's checkpoints
recovery.py     Rolls a job back to its last checkpoint, after a shard lost its part
shared_room.py  A memory budget that all jobs share: no principal gets more than half
shards.py       The registered shards: the interface of one, and which process serves which
held_jobs.py    Finds jobs that only the shards or only the coordinator has, and ends them
expiry.py       Ends leases that have run out, and jobs that have had no worker for too long
refusals.py     The errors for a process that cannot join now, such as because another launch trains the job
cluster.py      Shared by all jobs of a coordinator: the shards, the limits, the checkpoints, and the clock
charge.py       Whether a coordinator is still in charge: another one may have taken its lock lease over
ended_jobs.py   The jobs that are over: why, and which of them have finished
events.py       The log of recent events, for status
job_script.py   The settings of one job's script (learning-rate schedule), for workers that join late
heard.py        The figures that the workers of one job have measured, from their last heartbeats
checkpoint_policy.py When checkpoints are made, where they go, and how many are kept
drain.py        Whether the coordinator is told to stop, and has made the last checkpoints of its jobs
state_file.py   The state that a restarted coordinator needs, in one small file beside the checkpoints
timing.py       The coordinator's clock, and the times that it waits, in seconds
"""
