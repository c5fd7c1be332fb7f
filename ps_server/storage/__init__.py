"""The files of checkpoints.

checkpoints.py  Checkpoints as files
directory_lock.py  Keeps a directory of checkpoints to one coordinator
files.py        What a directory of checkpoints is kept in: a file system or an object store
disk.py         A file system: what every file in a directory is written with and read from
objects.py      An object store, by fsspec
lease.py        The lock of a directory in an object store: a lease that its holder renews
export.py       Exports a checkpoint as plain PyTorch files
tensor_file.py  Files of tensors, in the format of safetensors, as a stream
"""
