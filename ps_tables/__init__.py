"""Tables of rows that are named by 64-bit ids: what a shard holds of one, and a process of its own in `single`.

Pure, like the servers' core: no socket, clock, thread, environment or message; native/ alone touches files. A table is
for one caller at a time.

beginning.py      What a table begins with that was trained before its job: in parts, and how they travel
candidates.py     Ids that are not rows yet: how often each has occurred
changes.py        What changed in a table after a version: a walk over its rows, some at a time
choosing.py       Which loops a process uses: compiled ones, or those of numpy and torch
cold.py           Rows that memory has no room for: in a file, until they are trained
contributions.py  What workers push: gradients of rows, and rows that a script has set
copies.py         A copy of a table as it is at one version, taken in pieces while it is trained
distinct.py       The distinct ids of a batch, by hashing
equal_bits.py     Which compiled loops give the bits of torch and numpy here
entries.py        Numbered entries of ids, each with the version that used it last
increments.py     What changed between two copies of a table, and how a table is put together from it
index.py          Which row an id has: open addressing, a whole batch of ids at a time
initial.py        The value of a row without training: a function of seed, id and column
memory.py         Arrays of rows in reserved memory: they grow without a copy
native/           Loops over rows and ids in C, for those who compile them
numbers.py        Numbers that are taken and given back
optimizers.py     Optimizers that step some rows of a table, with the state of each row
places.py         Where rows lie: what trains them works on places in memory
removed.py        Ids that were rows and are none any more, of late
saved.py          Rows in the state_dict of a model
sizes.py          How much memory so many rows take, and how many rows so much memory holds
sums.py           Sums of rows by their places, in the order of the rows
table.py          A table: its rows come into being, are trained, expire and are read
"""
