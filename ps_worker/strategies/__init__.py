"""How a worker trains: alone, with DDP, or on parameter servers.

added.py             Parameters that an optimizer is given after `prepare`: `optimizer.add_param_group`
assignments.py       What a script sets itself between two steps: weights, and the state of its optimizers
collectives.py       Numbers and values over all workers: mean, gather, broadcast, barrier, in every mode alike
ddp.py               Training with PyTorch's own DistributedDataParallel: the baseline, not weakened
options.py           How models are trained, as `prepare` was told
parameter_server.py  Training on parameter servers
single.py            Training in one process, without servers: the reference that every other way is compared with
strategy.py          What a session asks of the way it trains
"""
