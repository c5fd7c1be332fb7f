"""How a worker trains: alone, with DDP, or on parameter servers.

added.py             Parameters that an optimizer is given after `prepare`: `optimizer.add_param_group`
assignments.py       Assignments: weights, and optimizer state, that a script sets itself between two steps
collectives.py       Numbers and values over all workers: mean, gather, broadcast, barrier, in every mode alike
ddp.py               Training with PyTorch's own DistributedDataParallel: the baseline, not weakened
fragment_exchange.py The exchange of a round that is pushed fragment by fragment, in mode `local:H/F`
gradient_steps.py    Steps of gradients, in the modes sync, ssp:K and async
job_stages.py        The stages of one job: other optimizers step its parameters from then on
job_training.py      The training of models in one job: the step loop
late_script.py       A process that joins late takes over what the job's script has set, such as a schedule
local_rounds.py      Rounds of local steps: with the script's own optimizers, and a push each round
parameter_server.py  Training on parameter servers: joins a job, and implements Strategy for a session
row_reads.py         Reads the rows of a job's tables from its shards, also when the worker has lost its place
sent_step.py         A step whose pushes are under way
single.py            Training in one process, without servers: the reference that every other way is compared with
step_kind.py         The kind of a job's steps: steps of gradients, or rounds of local steps
strategy.py          The interface of a strategy, one way to train, for a session
together.py          Steps of a group: all members make one, or none does
undone.py            Steps that a rollback of the job has undone, and that the script does not make again
unfinished.py        A step that has ended on this worker and does not count yet, and its fate if the place is lost
"""
