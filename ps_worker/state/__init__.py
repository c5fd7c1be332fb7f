"""A worker's own part of a checkpoint.

checkpoint.py       What is captured at a clock, and restored when the job is rolled back to it
model_state.py      What of a model is a worker's own: frozen tensors, and what gradients have lost on the wire
loader_position.py  How far a script's loops over one loader are, and how they go somewhere else
job_state.py        What a script has set that is the job's, brought from worker to worker
documents.py        Values as bytes, and back: one safetensors file, with JSON beside the tensors
encoding.py         The state of a worker besides the weights, as values and as bytes
ending.py           Whether a script comes to its end, or is cut short; and where no signal may cut it
inner.py            The state of optimizers that step on the worker, at the rounds that checkpoints keep
inner_weights.py    The same with the worker's own weights, where fragments are mixed into them
sender.py           Sends each captured state to the coordinator, beside training
"""
