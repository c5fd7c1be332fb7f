"""Tables of rows that are named by 64-bit ids: the part of a table on one shard, or in one process without servers.

Pure, like the servers' core: no socket, clock, thread, environment or message; native/ alone touches files. A table has
one caller at a time.

beginning.py      The rows that a table begins with, and their encoding in messages
candidates.py     Ids that are not admitted yet, with the count of each
changed_rows.py   A walk over the rows that changed after a version
choosing.py       Selects the loops of a process: those of the library, or numpy and torch
cold.py           Keeps the rows that do not fit into memory in a file, until they are trained
contributions.py  What workers push: gradients of rows, and rows that a script has set
copies.py         A copy of a table at one version, made some rows at a time while the table is trained
distinct.py       The distinct ids of a batch, by hashing; whether ids are distinct, and of one shard
entries.py        Numbered entries of ids, each with the version that used it last
increments.py     The difference between two copies of a table, and a table from such differences
index.py          Finds the row of an id: open addressing, a whole batch of ids at a time
initial.py        The first value of a row: a function of seed, id and column
row_arrays.py     Arrays of rows in reserved memory, which grow without a copy
native/           Loops over rows and ids in C, in a library that wheels bring along
numbers.py        An allocator of numbers
optimizing_rows.py Optimizers that step some rows of a table, with the state of each row
positions.py      The positions of rows in memory, on which training works
removed.py        Ids of rows that were removed lately
saved.py          Rows in the state_dict of a model
sizes.py          The memory of a number of rows, and the number of rows for an amount of memory
steps.py          Steps of plain SGD and row-wise Adagrad, whose rounding is defined there
row_sums.py       Sums of rows by index, in the order of the rows
table.py          A table: creates, trains, expires and reads its rows
"""
