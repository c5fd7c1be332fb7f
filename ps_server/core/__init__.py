"""The rules, without sockets, clocks, threads, environment or protobuf: time and data come in as arguments.

accounting.py    Steps that workers lost, or made again, because shards were rolled back to a checkpoint
admission.py     Admission: which requests a server receives now, and which wait until another one has arrived
agreement.py     How alike workers move in a round of local steps
budget.py        How many bytes a job may take on a shard, and how many may wait there, by job and by principal
checking.py      Checks a pushed bucket against the job, and makes the command that stages it
checking_rows.py Checks pushed rows against the job's tables, and makes the commands that stage them
commands.py      Everything that changes a partition, as values
consistency.py   The rule of one bucket's updates in each mode: what is staged, what comes next, which pull is admitted
data_commits.py  Counts each sample into each bucket of a shard exactly once; sets of numbers as intervals
data_leases.py   One loader's data, as the coordinator gives it out: batch by batch, each to one worker
dense.py         One bucket's tensors: its weights, its optimizer, and the gradients being added up for the open update
sums.py          The sum of the contributions to one update: their gradients, and the hyper-parameters they name
feed_figures.py  Measurements of the readers of a job's weights, for status and metrics
extent.py        Checks how large a job is, and that its parts fit together
server_figures.py Measurements of processes' own work, for status and metrics
limits.py        Every limit of a server by name, with its default
membership.py    The live workers of a job: leases, incarnations, ranks
other_cut.py     Assembles a job's buckets from a checkpoint whose parameters were cut into other pieces
partition.py     One job's buckets and tables on one shard: roster, rules and weights, changed by commands alone
placement.py     How large a job's buckets are, and which shard holds which: by bytes, largest first
rounds_of_values.py Rounds of values: all live workers of a job exchange values, one round after the other
snapshot.py      A bucket as a checkpoint has it: a value that outlives the shard it was taken from
statistics.py    The statistics of a shard or a coordinator: frozen records
table_rows.py    A table's rows on one shard, what workers contribute to them, and how many there may be
shard_table.py   A table of a job on one shard: a unit whose contributions are rows, in several messages
thread_shares.py How the threads that a process may have are divided
unit.py          A unit: what a bucket and a table have in common; and the unit that is a bucket
validation.py    Checks registrations, addresses and names before a coordinator or a shard uses them
"""
