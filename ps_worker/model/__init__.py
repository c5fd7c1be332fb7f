"""A model as flat buffers, its job, and its step.

alike.py            Parameters that several members of a group hold alike: one of them pushes, and hands on
base.py             The base of a round of local steps: the weights that it begins with
buffers.py          A model in flat buffers: their memory, the weights and the gradients there
elements.py         The tensors of a model as a job describes them, whatever their element types
empty_shards.py     Optimizer state of parameters of which a member of a group holds no element
flat.py             A model as flat buffers, so that pushing packs nothing and a pull lands in place
gpu.py              Buckets of a model on a GPU, on their way to the host and back, without stopping the GPU
group_spec.py       One job out of what the members of a group hold
job_spec.py         Models and their optimizers as a job: what is trained, in which groups, with what
local_settings.py   The settings of a job of local steps, as a script gives them
local_round.py      A round of local steps: which fragment of the model is due, and what is pushed of it
no_sync.py          Lends a session's `no_sync` to the user's model, for scripts written for DistributedDataParallel
optimizer.py        The optimizer that `prepare` returns: it looks like the user's own, and is stepped on the servers
pipeline_stages.py  What members hold where each has other layers of one model, under the names of the whole
state_transfer.py   Optimizer state on its way to the shards and back: by parameter as in torch, by bucket on the shards
refused.py          Models that servers cannot train, told before anything joins, and in a dry run
residual.py         What gradients have lost on the wire, and send with the next ones: error feedback
sharded.py          Tensors that the processes of a group hold in pieces: DTensors
step.py             Makes the pushes of a step, from the first gradient of backward to `optimizer.step()`
script_stages.py    What steps the parameters of a job, in each stage of the script
storage.py          A storage of its own for a part of a flat buffer
stepped_alone.py    Notices an optimizer that steps a session's parameters past it, on this worker alone
tracked.py          Parameters and gradients that notify the session where a script may change them
"""
