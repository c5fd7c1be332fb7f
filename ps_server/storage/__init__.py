"""The files of checkpoints, and of cold rows, which do not fit into memory.

checkpoints.py  A directory of checkpoints: writes, lists, reads and removes them
manifest.py     The manifest of a checkpoint, and its file
retention.py    Selects the checkpoints of a job that stay, including those that others build on
bucket_file.py  The buckets of a shard in a file of tensors
own_disk.py     A shard's own disk, for servers without a shared directory
directory_lock.py  Locks a directory of checkpoints for one coordinator
files.py        The interface of a storage backend, and the names of the object stores that there are
disk.py         The backend for a file system
objects.py      The backend for object stores, by fsspec; another store of fsspec is one entry of `_PACKAGES`
lock_lease.py   The lock of a directory in an object store: a lease that its holder renews
dcp_folder.py   A checkpoint as a folder of torch.distributed.checkpoint
export.py       Exports a checkpoint as plain PyTorch files
changed_tensors.py  Tensors of a model that no optimizer steps and that training has changed, such as buffers
any_type.py     Files of tensors of any element type
row_files.py    Rows of tables in files without a name
table_files.py  The rows of one table as files for other programs: safetensors, npy, Parquet
tensor_file.py  Files of tensors in the safetensors format, written and read as a stream
"""
