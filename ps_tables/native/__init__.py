"""Loops over rows and ids in C, in a library that wheels for Linux bring along: numpy's bits in less time.

Nothing else of ps_tables touches a file.

in_use.py    The loops that this process uses; without any, numpy and torch do the work
libraries.py The libraries of this installation, and the processors that can run them
loading.py   Loads a library by cffi
loops.py     The loops, as functions of arrays

loops.c and loops.h are their source. setup.py compiles it, into this folder of the installation.
"""
