"""Small programs as one compiled call: all their nodes in one C++ function, for the sizes at hand.

    Part ──sizes put in──> graph of standard ops ──C++──> one function ──> run(arguments, sizes)

An operator of PyTorch takes 1 to 4 us before it computes anything. Where the tensors are small, that is the step.

    static_graph.py   the part with numbers for sizes, and bodies in place of our ops
    arrays.py         how values lie in memory, and loops over them
    operators.py      each standard op as C++
    source.py         the function
    call.py           a program that calls it: by entry.cpp, or by Python where that is not compiled
    program.py        counts calls, compiles behind, compares the two on the steps themselves, exchanges them
"""
