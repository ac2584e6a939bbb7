"""Fused regions: adjacent nodes as one kernel of PyTorch's Inductor, compiled in the background while training runs.

They are for a CPU: AOTInductor of PyTorch 2.11 crashed when it compiled a region for an NVIDIA H200. On a GPU whole
programs are compiled instead (`inductor_program`).

    program ─1─> counts calls                                            the program as it is
            ─2─> finds regions; another process compiles them            the program with a call for each one built
            ─3─> times each region's kernel against its nodes            the program with one call per region
            ─4─> keeps the regions whose kernel was faster               the program with a call for each of them

    request.py    a region as bytes: its graph, and how it is called
    build.py      the cache on disk
    process.py    starts the compiling process and sends it requests
    child.py      the compiling process: bytes in, a library out
    call.py       a call of a region: its kernel or its nodes
    program.py    the successive `run` functions of a program

A kernel takes contiguous tensors with any sizes from 2 on; other calls run the nodes. No step waits: Inductor is not
imported here, the compiling process runs at low priority, and the work of this process between the steps above is done
in slices with pauses (`native/background.py`).
"""
