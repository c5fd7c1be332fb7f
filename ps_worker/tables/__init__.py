"""Tables of rows in a model: modules that look like torch's embeddings, whose ids are any 64-bit numbers.

ahead.py       The ids of a batch, and the announced ids of the next one, whose rows are pulled ahead
assigned.py    Rows that a script has set, until a step includes them
followed_rows.py The rows of a module in a process that does not train, which follow a job
freezing.py    A copy of a model for serving, with plain modules of torch in place of tables
frozen.py      Modules for serving: torch's plain embeddings, with a map from ids to rows
given_rows.py  Vectors that a script gives a table, from tensors, arrays and files
lookups.py     The rows that a step has looked up, and their gradients; the gradient of a table's handle
modules.py     Embedding and EmbeddingBag
table_library.py Loads the compiled library for tables in a worker's process
table_optimizers.py Optimizers that only tables have
row_copy.py    A reader's copy of the rows of one shard, from its feed
own_rows.py    The rows of one module in this process, and their steps; a replica of them on each rank of DDP
server_rows.py Tables whose rows are on parameter servers
stepping.py    Steps a table with the optimizer that has its handle
"""
