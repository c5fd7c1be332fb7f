"""Tables of rows in a model: modules that look like torch's embeddings, whose ids are any 64-bit numbers.

local.py       The tables of a model in this process, and a replica of them on each rank of DDP
lookups.py     The rows that a step has looked up, and their gradients
modules.py     Embedding and EmbeddingBag
optimizers.py  Optimizers that only tables have
"""
