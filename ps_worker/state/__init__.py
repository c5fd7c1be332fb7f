"""A worker's own state for checkpoints: everything but the weights.

checkpoint.py       Captures the worker's state at a clock, and restores it after a rollback of the job
model_state.py      The worker's own part of a model: frozen tensors, and the residuals of gradients
loader_position.py  The position of a script's loops over one loader, and moving it
job_state.py        The settings of a script that belong to the job, for workers that join late
documents.py        Encodes values as one safetensors file with JSON, and decodes them
encoding.py         The state of a worker without the weights, as values and as bytes
inner.py            The state of optimizers that step on the worker, at the rounds of checkpoints
state_sender.py     Sends each captured state to the coordinator, in a thread
"""
