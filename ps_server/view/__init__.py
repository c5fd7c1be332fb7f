"""The view of a cluster for people. It is made once a second from the statistics of coordinator and shards, and kept a
while.

Nothing in training depends on it, and it waits for no shard.

view.py       The view: the state of each job, worker and shard, as values
rates.py      Rates over the last seconds, from sums that processes report now and then
diagnosis.py  The state of a job, and what limits it: each as a sentence
finished.py   The last few jobs that have ended, with their curves
making.py     Makes the view from the statistics of coordinator and shards
history.py    The samples of the last 15 minutes, in bounded memory
watch.py      The thread that makes a view once a second, and the readers that wait for the next one
"""
