"""Clusters in virtual time: the real coordinator and the real shards, with their locks, threads and files; a seed each.

world.py        A clock, events and threads, all driven by one seed
processes.py    Processes that are killed, stopped and continued
threads.py      Replaces `threading` and `concurrent.futures`
binding.py      Puts that, and chance and failpoints, in the place of the real ones in the servers' modules
network.py      Calls over links that delay, lose, repeat, and are cut
disk.py         Files in memory, on disks that are full or slow, and forget what was not flushed
servers.py      What a process does as coordinator, and as shard
supervision.py  The servers' processes, started again where they have died
worker.py       A worker that trains the counting oracle's job
members.py      The members of a worker that is a group of processes
buffers.py      What rank 0 tells readers of tensors that no optimizer steps
fragments.py    Its rounds whose buckets leave fragment by fragment
rows.py         The tables of a job: which rows a step pushes, and what it makes of them
row_worker.py   A worker's pushes and pulls of rows
row_oracle.py   What is wrong with rows
sharing.py      Memory that workers share with the shards on their host, and exchanges
readers.py      Processes that follow the job's weights, and what is wrong with what they have
relays.py       Relays between the servers and these
saving.py       What rank 0 saves, and what is wrong with it
schedules.py    A worker's script with a schedule, which one that joins late continues
whole_steps.py  Whether steps count as a whole where updates are means
runs.py         A job from its beginning to its end, as its user knows it
cluster.py      All together, and its course
faults.py       What goes wrong
promises.py     What must hold
mutations.py    Clusters that are broken on purpose
reader_mutations.py Feeds that are broken on purpose
sharing_mutations.py Exchanges and shared memory that are broken on purpose
simulator.py    Shards alone, without clock or socket: seeded random interleavings of calls
"""
