"""The files of checkpoints.

checkpoints.py  Checkpoints as files
directory_lock.py  Keeps a directory of checkpoints to one coordinator
disk.py         What every file here is written with and read from
export.py       Exports a checkpoint as plain PyTorch files
tensor_file.py  Files of tensors, in the format of safetensors, as a stream
"""
