"""Tables of rows in a model: modules that look like torch's embeddings, whose ids are any 64-bit numbers.

ahead.py       The ids of a batch: those of a lookup, and those that the next one is said to ask for
assigned.py    Rows that a script has set, until a step takes them along
freezing.py    A copy of a model for serving, with plain modules of torch in place of tables
frozen.py      Modules for serving: torch's plain embeddings, with a map from ids to rows
given_rows.py  Vectors that a script gives a table, from tensors, arrays and files
handle_gradient.py The gradient of a table's handle
lookups.py     The rows that a step has looked up, and their gradients
modules.py     Embedding and EmbeddingBag
table_library.py The library for tables in a worker's process: whether it is used
table_optimizers.py Optimizers that only tables have
row_copy.py    The rows of one shard as a reader has copied them from its feed
own_rows.py    The rows of one module in this process, and their steps; a replica of them on each rank of DDP
server_rows.py Tables whose rows are on parameter servers
stepping.py    What steps a table: the step of whichever optimizer has its handle
"""
