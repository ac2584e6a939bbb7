"""Fused regions: neighbouring nodes as one kernel of PyTorch's Inductor, compiled while training goes on without it.

    program ─1─> counts calls                                            the program as it is
            ─2─> finds regions; another process compiles them            the program with a call for each that is there
            ─3─> each region by its kernel and by its nodes, timed       the program with one call a region
            ─4─> the regions that won, as one call each

    request.py    a region as bytes: its graph, and how it is called
    build.py      the cache on disk
    process.py    who starts the other process, and asks it
    child.py      the other process: bytes in, a library out
    call.py       a region as one call, by its kernel or by its nodes
    program.py    what `run` of a program is, in turn

A kernel takes any sizes from 2 on of tensors that lie in order; other calls go through the nodes. No step waits:
Inductor is not imported here, the other process runs at low priority, and what is done here between the steps of the
picture is divided into pieces with rests between them (`native/background.py`).
"""
