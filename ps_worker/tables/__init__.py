"""Tables of rows in a model: modules that look like torch's embeddings, whose ids are any 64-bit numbers.

lookups.py     The rows that a step has looked up, and their gradients
modules.py     Embedding and EmbeddingBag
optimizers.py  Optimizers that only tables have
rows.py        The rows of one module in this process, and their steps; a replica of them on each rank of DDP
server_rows.py Tables whose rows are on parameter servers
stepping.py    What steps a table: the step of whichever optimizer has its handle
"""
