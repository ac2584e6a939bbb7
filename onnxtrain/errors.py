"""Every error says what went wrong, where, what was expected against what was found, and what to do next.

The ORTModule family keeps the names that ORTModule's users catch. A fallback policy may turn its members into a run in
plain PyTorch (`options.FallbackPolicy.covers`). `GraphError` and `KernelError` are faults of onnxtrain itself and never
fall back.
"""

from __future__ import annotations


class OnnxTrainError(Exception):
    """The base of all errors raised by onnxtrain.

    Args:
        what: what went wrong, as one sentence.
        where: the user's line, module or node.
        expected: what would have been right.
        got: what was found instead.
        todo: what the user can do next.
    """

    def __init__(
        self,
        what: str,
        where: str | None = None,
        expected: object = None,
        got: object = None,
        todo: str | None = None,
    ) -> None:
        super().__init__(what, where, expected, got, todo)  # the full args, so that pickle and copy rebuild the error
        self.what = what
        self.where = where
        self.expected = expected
        self.got = got
        self.todo = todo

    def __str__(self) -> str:
        details = (("where", self.where), ("expected", self.expected), ("got", self.got), ("to do", self.todo))
        lines = [f"  {label + ':':<10}{text}" for label, text in details if text is not None]
        return "\n".join([self.what, *lines])


class OptionError(OnnxTrainError, ValueError, KeyError):
    """An option or environment variable has an unknown name or value.

    It is a `KeyError` too, because ORTModule raised that for a bad enum name in a variable.
    """


class ORTModuleFallbackException(OnnxTrainError):  # noqa: N818  the peer's name
    """The base of the errors after which a module may run in plain PyTorch instead."""


class ORTModuleInitException(ORTModuleFallbackException):
    """ORTModule could not be set up."""


class ORTModuleDeviceException(ORTModuleFallbackException):
    """The module or its inputs lie on a device, or on several devices, that are not supported."""


class ORTModuleIOError(ORTModuleFallbackException):
    """An input or output of the module has a type that is not supported."""


class ORTModuleTorchModelException(ORTModuleFallbackException):
    """The PyTorch module cannot be handled."""


class ORTModuleONNXModelException(ORTModuleFallbackException):
    """The module has no ONNX training graph."""


class CaptureError(ORTModuleTorchModelException):
    """The module's forward cannot be captured as a graph."""


class ChangedArgumentError(CaptureError):
    """Forward changes a container among its arguments, as a cache of keys and values that it fills."""


class ChangedParameterError(CaptureError):
    """Forward changes a parameter, as an embedding with `max_norm` does."""


class UnsupportedOperatorError(ORTModuleONNXModelException):
    """A PyTorch operator has no definition in the graph."""


class GradientError(ORTModuleONNXModelException):
    """The gradient of a node cannot be built."""


class GraphError(OnnxTrainError):
    """The verifier found a graph that is not well formed."""


class KernelError(OnnxTrainError):
    """A node has no kernel that applies, or its kernel failed."""


class MemoryBudgetError(OnnxTrainError, RuntimeError):
    """A training step does not fit into `memory_budget_bytes`, whatever is computed again."""


class QuantizationError(OnnxTrainError, RuntimeError):
    """A quantized weight lacks what it is quantized with: neither a graph nor PyTorch can compute with it."""


class PythonOpError(KernelError, RuntimeError):
    """A user's `torch.autograd.Function` gave something that autograd, or its place in the graph, does not allow."""


class CheckpointError(OnnxTrainError, RuntimeError):
    """A checkpoint file is damaged, or holds something else than the training graphs expect."""


class TrainingError(OnnxTrainError, RuntimeError):
    """The training API was asked for, or given, something that its graphs do not have."""


class UnknownNameError(TrainingError, KeyError):
    """There is no parameter or property of this name."""


class ArtifactError(OnnxTrainError, RuntimeError):
    """Training artifacts cannot be made from this model or these arguments."""


class LeftOutError(OnnxTrainError, TypeError):
    """An output of a module is used that the option `keep_outputs` does not name."""
