"""A model as flat buffers, its job, and its step.

replicated.py       Parameters that several members of a group hold alike: one pushes, and sends the weights to the
                    others
base.py             The base of a round of local steps: the weights that it begins with
buffers.py          A model in flat buffers: their memory, the weights and the gradients there
elements.py         The description of a model's tensors in a job, whatever their element types
empty_shards.py     Optimizer state of parameters of which a member of a group holds no element
flat.py             A model as flat buffers, so that pushing packs nothing and a pull lands in place
gpu.py              Copies buckets between a GPU and the host without stopping the GPU
group_spec.py       Combines the tensors of a group's members into one job
job_spec.py         Models and their optimizers as a job: what is trained, in which groups, with what
local_settings.py   The settings of a job of local steps
local_round.py      A round of local steps: which fragment of the model is due, and its pushes
no_sync.py          Lends a session's `no_sync` to the user's model, for scripts written for DistributedDataParallel
optimizer.py        The optimizer that `prepare` returns and that servers step; steps of others on the same parameters
pipeline_stages.py  Pipeline stages: members of a group hold different layers of one model
state_transfer.py   Optimizer state on its way to the shards and back: by parameter as in torch, by bucket on the shards
refused.py          Refuses models that servers cannot train, before a worker joins and in a dry run
residual.py         Error feedback: the rounding error of sent gradients is added to the next ones
sharded.py          Tensors that the processes of a group hold in pieces: DTensors
step.py             Makes the pushes of a step, from the first gradient of backward to `optimizer.step()`
script_stages.py    Which optimizer steps each parameter, in each stage of the script
storage.py          Gives a slice of a flat buffer a storage of its own
tracked.py          Parameters and gradients that notify the session where a script may change them
"""
