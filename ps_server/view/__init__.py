"""What people see who watch a cluster: made of what coordinator and shards say anyway, once a second, and kept a while.

Nothing in training depends on it, and it waits for no shard.

view.py       The view: how each job, worker and shard does, as values
rates.py      What was done over the last seconds, from sums that processes report now and then
diagnosis.py  What a job is doing, and what limits it: each in a line of words
finished.py   The last few jobs that have ended, with their curves
making.py     Makes the view from what coordinator and shards say
history.py    The samples of the last 15 minutes, in bounded memory
watch.py      The thread that looks once a second, and those that wait for the next view
"""
