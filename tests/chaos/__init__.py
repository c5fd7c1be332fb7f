"""Faults at random on real processes, and the counting oracle that judges what is left.

benchmark.py  `python -m bench chaos`: trains each mode undisturbed, then with faults, and compares
trial.py      One job from its first worker to its last, with faults or without, and what came of it
trace.py      What happened meanwhile, and what it says: rates, and how long recovery takes
faults.py     What can be done to a cluster, and to which of its processes
plans.py      Which faults and pairs of faults are to come, and when: all of it drawn from a seed
servers.py    Servers on fixed ports: those of `ps-server up`, or of docker-compose.yml's containers
audience.py   Readers that follow the job, the relay between, and what is wrong with what they saw
reader.py     One of these readers
crew.py       Workers of `ps-worker run`, which starts them again when they die
processes.py  Processes that are started again, found among another's children, and signalled
cluster.py    Free ports, and the weights as they are on the shards
links.py      TCP connections between workers and servers, which can be cut or held
worker.py     The training script of a worker: its weights are the counting oracle
ledger.py     What a worker writes down as it goes: JSON lines that survive kill -9
oracle.py     The counting oracle: its weights tell which pushes are in them

The trial and its faults sleep between two looks at other processes' files and status: nothing tells of a change there.
The time of a fault is real time.
"""
