"""A worker's own part of a checkpoint.

checkpoint.py       Going back to a clock: a worker's own part of a checkpoint, caught and put back
encoding.py         What a worker needs besides the weights to go on from a clock, as values and as bytes
loader_position.py  How far a script's loops over one loader are, and how they go somewhere else
sender.py           Sends a worker's own part of each checkpoint to the coordinator, beside training
"""
