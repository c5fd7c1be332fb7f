"""The files of checkpoints.

checkpoints.py  Checkpoints as files
export.py       Exports a checkpoint as plain PyTorch files
"""
