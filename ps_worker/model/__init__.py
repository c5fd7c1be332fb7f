"""A model as flat buffers, its job, and its step.

buffers.py          The flat buffers that a model lies in: one tensor for the weights and one for the gradients
flat.py             A model as flat buffers, so that pushing packs nothing and a pull lands in place
gpu.py              Buckets of a model on a GPU, on their way to the host and back, without stopping the GPU
gradients.py        The gradients as views into flat buffers: which are there, which were changed, which are not finite
job_spec.py         Models and their optimizers as a job: what is trained, in which groups, with what
no_sync.py          What a session lends to the user's model: `no_sync`, for scripts written for DistributedDataParallel
optimizer.py        The optimizer that `prepare` returns: the user's own to look at, stepped on the servers
optimizer_state.py  Optimizer state on its way to the shards and back: torch's own, by parameter, and theirs, by bucket
overlap.py          Which buckets leave while backward still runs
step.py             What a worker pushes in a step, from the first gradient of backward to `optimizer.step()`
tracked.py          Parameters and gradients of which the session learns that a script may have changed them
weights.py          The weights as views into flat buffers, and which of them a script has changed
"""
