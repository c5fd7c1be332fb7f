"""Loops over rows and ids in C, for those who compile them: the bits are those of numpy and torch, the time is less.

Nothing else of ps_tables touches a file or starts a program.

building.py  Compiles the loops with this machine's C compiler, into a folder of the user's
in_use.py    The loops that this process uses; none: numpy and torch do the work
loading.py   Loads compiled loops, from where nobody else can write
loops.py     The compiled loops, as functions of arrays

loops.c and loops.h are the loops themselves.
"""
