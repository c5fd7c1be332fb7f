"""How a worker trains: alone, with DDP, or on parameter servers.

added.py             Parameters that an optimizer is given after `prepare`: `optimizer.add_param_group`, to unfreeze
collectives.py       Numbers and values over all workers: mean, gather, broadcast, barrier, in every mode alike
ddp.py               Training with PyTorch's own DistributedDataParallel: the baseline, not weakened
options.py           What a job on a parameter server is, as `prepare` was told
parameter_server.py  Training on a parameter server
strategy.py          The three ways to train behind one face: alone, with DDP, or on a parameter server
"""
