"""The files of checkpoints, and of rows that memory has no room for.

checkpoints.py  Checkpoints as files
manifest.py     What a checkpoint is: its manifest, and how that stands in a file
retention.py    Which checkpoints of a job stay, where some build on the files of others
bucket_file.py  The buckets of a shard in a file of tensors
own_disk.py     A disk of a shard's own, where the servers share no directory
directory_lock.py  Keeps a directory of checkpoints to one coordinator
files.py        What a directory of checkpoints is kept in: a file system or an object store
disk.py         A file system: what every file in a directory is written with and read from
objects.py      An object store, by fsspec
lease.py        The lock of a directory in an object store: a lease that its holder renews
export.py       Exports a checkpoint as plain PyTorch files
any_type.py     Files of tensors of any element type
row_files.py    Rows of tables in files without a name
table_files.py  The rows of one table as files for other programs: safetensors, npy, Parquet
tensor_file.py  Files of tensors, in the format of safetensors, as a stream
"""
