"""Faults at random on real processes, and the counting oracle that judges what is left.

benchmark.py  `python -m bench chaos`: trains each mode undisturbed, then with faults, and compares
trial.py      One job from its first worker to its last, with faults or without, and what came of it
faults.py     What is done to a cluster, when, and to which process: all of it drawn from a seed
cluster.py    Servers on fixed ports, and workers that are started again when they die
links.py      TCP connections between workers and servers, which can be cut or held
worker.py     The training script of a worker: its weights are the counting oracle
ledger.py     What a worker writes down as it goes: JSON lines that survive kill -9
oracle.py     The counting oracle: its weights tell which pushes are in them

The trial and its faults sleep between two looks at other processes' files and status: nothing tells of a change there.
The time of a fault is real time.
"""
