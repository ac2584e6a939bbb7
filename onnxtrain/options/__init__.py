"""Every knob of onnxtrain in one table: its default, environment variable, allowed values and meaning.

    options = Options.resolve(rng="torch")      defaults, then code, then the JSON file, then the environment

The fields of `Options` (`table.py`) are the table: a new option is one row there. `without_effect.py` answers the
variables of ONNX Runtime Training that have nothing to switch here; the documentation lists both.
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
