"""Small programs compiled to one C++ function each, for fixed sizes.

    Part ──sizes substituted──> graph of standard ops ──C++──> one function ──> run(arguments, sizes)

An operator of PyTorch takes 1 to 4 us before it computes anything. With small tensors, that is most of the step.

    static_graph.py   the part with static sizes, our ops replaced by their bodies
    source.py         the function, of the C++ that is registered for each op (ops/interfaces/cpp.py)
    call.py           a program that calls it: through entry.cpp, or through Python if that cannot be compiled
    program.py        counts calls, compiles in the background, times both on real steps, keeps the faster
"""
