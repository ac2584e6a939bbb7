"""Trace two of the repeated blocks of a model, such as the layers of a transformer, and copy the trace for the others.

    h.0, h.1  traced, and their traces compared
    h.2 …     one call each in the trace, which becomes a copy of h.1's nodes after the export

A block is copied only if everything that its forward could depend on is the same (`module_state`, `call_arguments`),
and if two blocks had the same trace (`traced_call`). Any other block is traced.
"""
