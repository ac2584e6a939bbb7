"""All options of onnxtrain in one table: default, environment variable, allowed values and meaning of each.

    options = Options.resolve(rng="torch")      defaults, then code, then the JSON file, then the environment

The fields of `Options` (`table.py`) are the table: a new option is one row there. `without_effect.py` lists the
variables of ONNX Runtime Training that have no effect here. The documentation is generated from both.
"""

from onnxtrain.options.kinds import Kind, Knob, OldName
from onnxtrain.options.policies import FallbackPolicy, LogLevel, MemoryOptLevel, SkipCheck, SubgraphConfig
from onnxtrain.options.table import (
    JSON_VARIABLE,
    PROCESS_VARIABLES,
    Options,
    Resolved,
    knobs,
    resolved,
    warn_ineffective_variables,
)

__all__ = [
    "JSON_VARIABLE",
    "PROCESS_VARIABLES",
    "FallbackPolicy",
    "Kind",
    "Knob",
    "LogLevel",
    "MemoryOptLevel",
    "OldName",
    "Options",
    "Resolved",
    "SkipCheck",
    "SubgraphConfig",
    "knobs",
    "resolved",
    "warn_ineffective_variables",
]
