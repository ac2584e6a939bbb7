"""The exceptions of onnxtrain. Each says what went wrong, where, expected against got, and what to do next.

The ORTModule family keeps the names that ORTModule's users catch. Depending on the fallback policy, the module runs in
eager PyTorch after one of them (`options.FallbackPolicy.covers`). `GraphError` and `KernelError` are bugs of onnxtrain
itself. Raised while a module is compiled, they become a `CaptureError` or `CompileError`, so that they end no training;
the warning of the fallback asks for a report.
"""

from __future__ import annotations

import warnings


class OnnxTrainError(Exception):
    """The base class of all errors raised by onnxtrain.

    Args:
        problem: what went wrong, as one sentence.
        where: the source location, module or node.
        expected: the values or state that would have been valid.
        got: the value or state that was seen instead.
        todo: the next step for the user.
    """

    def __init__(
        self,
        problem: str,
        where: str | None = None,
        expected: object = None,
        got: object = None,
        todo: str | None = None,
    ) -> None:
        super().__init__(
            problem, where, expected, got, todo
        )  # the full args, so that pickle and copy rebuild the error
        self.problem = problem
        self.where = where
        self.expected = expected
        self.got = got
        self.todo = todo

    def __str__(self) -> str:
        details = (("where", self.where), ("expected", self.expected), ("got", self.got), ("to do", self.todo))
        lines = [f"  {label + ':':<10}{text}" for label, text in details if text is not None]
        return "\n".join([self.problem, *lines])


class OptionError(OnnxTrainError, ValueError, KeyError):
    """An option or environment variable has an unknown name or an invalid value.

    It is also a `KeyError`, because ORTModule raised one for an unknown enum name in a variable.
    """


class ORTModuleFallbackException(OnnxTrainError):  # noqa: N818  ORTModule's name
    """The base class of the errors after which a module may fall back to eager PyTorch."""


class ORTModuleInitException(ORTModuleFallbackException):
    """ORTModule could not be initialized."""


class ORTModuleDeviceException(ORTModuleFallbackException):
    """The module or its inputs are on an unsupported device, or on several devices."""


class ORTModuleIOError(ORTModuleFallbackException):
    """An input or output of the module has an unsupported type."""


class ORTModuleTorchModelException(ORTModuleFallbackException):
    """The PyTorch module is not supported."""


class ORTModuleONNXModelException(ORTModuleFallbackException):
    """The module has no ONNX training graph."""


class CaptureError(ORTModuleTorchModelException):
    """The module's forward cannot be captured as a graph."""


class SlowCaptureError(CaptureError):
    """Capturing and compiling the module takes longer than the option `capture_seconds` allows."""


class ChangedArgumentError(CaptureError):
    """Forward mutates a container among its arguments, such as a key-value cache that it fills."""


class ChangedParameterError(CaptureError):
    """Forward mutates a parameter, as an embedding with `max_norm` does."""


class UnsupportedOperatorError(ORTModuleONNXModelException):
    """A PyTorch operator has no ONNX definition."""


class GradientError(ORTModuleONNXModelException):
    """The gradient of a node cannot be built."""


class CompileError(ORTModuleONNXModelException):
    """Compiling a captured module failed because of a bug of onnxtrain."""


class OmittedBlocksError(ORTModuleONNXModelException):
    """Repeated blocks cannot be inserted into a planned graph. The module is captured again, with all blocks."""


class GraphError(OnnxTrainError):
    """The verifier rejected a malformed graph."""


class KernelError(OnnxTrainError):
    """No kernel applies to a node, or its kernel failed."""


class CommunicationError(OnnxTrainError, RuntimeError):
    """Ranks would communicate in different orders, which would give wrong results or end in a timeout."""


class MemoryBudgetError(OnnxTrainError, RuntimeError):
    """A training step does not fit into `memory_budget_bytes`, however much is recomputed."""


class QuantizationError(OnnxTrainError, RuntimeError):
    """A quantized weight lacks its quantization state, without which neither a graph nor PyTorch can use it."""


class PythonOpError(KernelError, RuntimeError):
    """A user's `torch.autograd.Function` returned something that autograd, or its node in the graph, does not allow."""


class CheckpointError(OnnxTrainError, RuntimeError):
    """A checkpoint file is corrupt, or does not match the training graphs."""


class TrainingError(OnnxTrainError, RuntimeError):
    """The training API was called with something that its graphs do not have or do not accept."""


class UnknownNameError(TrainingError, KeyError):
    """No parameter or property has this name."""


class ArtifactError(OnnxTrainError, RuntimeError):
    """Training artifacts cannot be generated from this model or these arguments."""


class OutputNotKeptError(OnnxTrainError, TypeError):
    """The caller used an output of the module that the option `keep_outputs` does not list."""


_OLD_NAMES = {"LeftOutError": OutputNotKeptError}


def __getattr__(name: str) -> type[OnnxTrainError]:
    if name not in _OLD_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    replacement = _OLD_NAMES[name]
    message = f"onnxtrain.errors.{name} was renamed to {replacement.__name__}"
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return replacement
