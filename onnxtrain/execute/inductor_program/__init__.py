"""A program as one artifact of PyTorch's Inductor, compiled beside a training (`inductor_compiles` says when).

    program ─1─> counts calls                                             the program as it is
            ─2─> another process traces and compiles it                   the program as it is
            ─3─> compares the artifact's first results with the program's both
            ─4─> times the two                                            both
            ─5─> keeps the faster

    split.py      the part that is compiled, and the views that are made of its results
    request.py    the part as bytes: its graph, symbolic sizes and strides
    child.py      in the compiling process of `regions`: bytes in, an artifact out
    call.py       a call of the artifact: for which sizes and strides it runs
    program.py    the successive `run` functions of a program

The program stays: for calls whose sizes or strides the artifact does not support, and as the reference of its results.
"""
