"""A model as flat buffers, its job, and its step.

flat.py             A model's parameters and gradients as flat buffers, so that pushing packs nothing and a pull lands
gpu.py              Buckets of a model on a GPU, on their way to the host and back, without stopping the GPU or the
job_spec.py         Models and their optimizers as a job: what is trained, in which groups, with what
no_sync.py          What a session lends to the user's model: `no_sync`, for scripts written for DistributedDataParallel
optimizer.py        The optimizer that `prepare` returns: the user's own to look at, stepped on the servers
optimizer_state.py  Optimizer state on its way to the shards and back: torch's own, by parameter, and theirs, by bucket
outgoing.py         What a worker tells the shards in a step besides the gradients
overlap.py          Which buckets leave while backward still runs
tracked.py          Parameters and gradients of which the session learns that a script may have changed them
"""
