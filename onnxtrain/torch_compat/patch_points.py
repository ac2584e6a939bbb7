"""List all attributes of PyTorch that a capture replaces, on its own thread, and restores at its end.

    with CREATE_NODE.wrapped(lambda original: …), TENSOR_BOOL.replaced_in_thread(answer): …

An attribute that this PyTorch lacks is skipped if replacing it only saves time; otherwise no module is captured.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from onnxtrain.torch_compat.internal import Internal, accepts
from onnxtrain.torch_compat.replacement import in_thread, replaced


class PatchPoint:
    """An attribute of a module or class of PyTorch.

    Args:
        path: the module, then the attribute: "torch.fx.proxy:TracerBase.create_node".
        why: the reason for replacing it.
        cost: what users notice if PyTorch lacks it; None if no module can be captured without it.
        parameters: names of the parameters of a Python function that its replacement passes by position.
    """

    def __init__(self, path: str, why: str, cost: str | None = None, parameters: str = "") -> None:
        self._path, self._parameters = path, tuple(parameters.split())
        self.attribute = path.replace(":", ".").rpartition(".")[2]
        self._entry = Internal[Any](
            f"patch of {path}",
            self._find,
            why=why,
            fallback=None,
            cost=cost or "every module runs in PyTorch",
            required=cost is None,
            check=self._is_as_expected,
        )

    def _find(self) -> tuple[Any, str]:
        module, _, names = self._path.partition(":")
        *classes, attribute = names.split(".")
        owner: Any = importlib.import_module(module)
        for name in classes:
            owner = getattr(owner, name)
        return owner, attribute

    def _is_as_expected(self, location: tuple[Any, str]) -> bool:
        value = _attribute(*location)
        if self._parameters:
            return accepts(value, *self._parameters)
        return callable(value) or inspect.isdatadescriptor(value) or inspect.ismodule(value)

    @property
    def original(self) -> Any:
        """The current value of the attribute; None if this PyTorch lacks it."""
        location = self._entry.get()
        return None if location is None else _attribute(*location)

    def wrapped(self, wrap: Callable[[Any], Any]) -> AbstractContextManager[None]:
        """Replace the attribute by `wrap(original)` for all threads; the wrapper must check which thread calls it."""
        location = self._entry.get()
        if location is None:
            return nullcontext()
        owner, name = location
        return replaced(owner, name, wrap(_attribute(owner, name)))

    def replaced_in_thread(self, function: Callable[..., Any]) -> AbstractContextManager[None]:
        """Replace the attribute, a function, on this thread."""
        return self.wrapped(lambda original: in_thread(function, original))


def _attribute(owner: Any, name: str) -> Any:
    """Return an attribute of a class or module, or the builtin that a module calls by this name."""
    return getattr(owner, name) if hasattr(owner, name) else getattr(builtins, name)


_LONGER = "a capture takes longer"

# Patches without which a capture would be wrong

FUNCTION_APPLY = PatchPoint(
    "torch.autograd.function:_SingleLevelFunction.apply",
    "a custom autograd function becomes a PythonOp; users keep `apply = F.apply`, which a patch of Function would miss",
)
FUNCTION_IN_TRANSFORM = PatchPoint(
    "torch.autograd.function:custom_function_call",
    "a custom function inside a torch.func transform is refused",
)
CHECKPOINT_GENERATOR = PatchPoint(
    "torch.utils.checkpoint:_checkpoint_without_reentrant_generator",
    "records which operators run in a checkpoint and are recomputed",
    "operators inside the user's checkpoints are not recomputed",
    parameters="fn",
)
CREATE_ARGUMENT = PatchPoint(
    "torch.fx.experimental.proxy_tensor:PythonKeyTracer.create_arg",
    "the tracer makes a constant of a parameter that is not the module's, which would not be trained",
    parameters="self a",
)
CREATE_NODE = PatchPoint(
    "torch.fx.proxy:TracerBase.create_node",
    "records at each call whether grad mode is on, and the user's source line instead of a full traceback",
    parameters="self kind target args kwargs",
)
SET_PROXY_SLOT = PatchPoint(
    "torch.fx.experimental.proxy_tensor:set_proxy_slot",
    "records which operators return an argument itself, as x.to(x.dtype) does: under no_grad it keeps its gradient",
    parameters="obj tracer proxy",
)
DTENSOR_OF_STYLES = PatchPoint(
    "torch.distributed.tensor.parallel.style:DTensor",
    "the hooks of parallelize_module make values of a trace, whose collectives are its operators",
    "modules with DTensor parameters run in PyTorch",
)
TENSOR_DATA = PatchPoint("torch:Tensor.data", "the trace does not record which tensor `tensor.data` was read from")
TENSOR_BOOL = PatchPoint("torch:Tensor.__bool__", "a Python branch on the elements of a tensor becomes a guard")
TENSOR_READS = tuple(
    PatchPoint(f"torch:Tensor.{name}", "a tensor from outside the module that is read as a Python number is a constant")
    for name in ("item", "tolist", "__int__", "__float__", "__index__", "__complex__")
)
TENSOR_ITEM = TENSOR_READS[0]
FAKE_TENSOR_TOLIST = PatchPoint(
    "torch._subclasses.fake_tensor:FakeTensor.tolist",
    "a list of elements that a capture fixes is read at once",
    "forwards that read lists of elements of their inputs (Qwen2-VL) have graph breaks",
    parameters="self",
)
EXPECTED_HIDDEN_SIZE, EXPECTED_CELL_SIZE = (
    PatchPoint(
        f"torch.nn.modules.rnn:{name}",
        "a recurrent module reads the batch size of a packed sequence as a number",
        "a graph of packed sequences is for one batch size",
        parameters="self input batch_sizes",
    )
    for name in ("RNNBase.get_expected_hidden_size", "LSTM.get_expected_cell_size")
)
FROM_NUMPY = PatchPoint("torch:from_numpy", "an array that a function of the graph samples becomes its tensor")
FILL_DIAGONAL = PatchPoint(
    "torch:Tensor.fill_diagonal_", "it uses the tensor's strides, which functionalization ignores"
)
MODULE_GETATTRIBUTE = PatchPoint(
    "torch.nn:Module.__getattribute__", "a capture depends on the attributes that forward reads"
)
MODULE_SETATTR = PatchPoint(
    "torch.nn:Module.__setattr__", "a graph is for the values of the attributes that forward sets"
)
NEW_FAKE_TENSOR = PatchPoint(
    "torch._subclasses.fake_tensor:FakeTensor.__new__",
    "finds tensors that forward stores outside the module",
    parameters="cls",
)
IS_EXPORTING = PatchPoint(
    "torch.compiler:is_exporting",
    "forward takes the operators of eager PyTorch, which runs the graph",
    "forward takes the operators that it has for other runtimes",
)
EVALUATE_SIZES = PatchPoint(
    "torch.fx.experimental.symbolic_shapes:ShapeEnv.evaluate_expr",
    "a branch on sizes in the user's code is a guard",
    parameters="self orig_expr",
)
ASSERT_SIZES = PatchPoint(
    "torch.fx.experimental.symbolic_shapes:ShapeEnv.guard_or_defer_runtime_assert",
    "a check of data-dependent sizes in the user's code is a guard, where the graph rests on it",
    parameters="self orig_expr msg",
)
SIZE_COMPARISONS = tuple(
    PatchPoint(
        f"torch:SymInt.{name}",
        "a bool argument of an operator may be `size > 1`, and must not be symbolic",
        parameters="self other",
    )
    for name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
)
SIZE_TEXTS = tuple(
    PatchPoint(f"torch:SymInt.{name}", '`f"{size}"` would be the name of the symbol')
    for name in ("__repr__", "__str__", "__format__")
)
SIZE_REMAINDER = PatchPoint(
    "torch:SymInt.__mod__", "PyTorch fails to bound `size % 0.5`, as in InternVL", parameters="self other"
)
BUFFER_COPIES = PatchPoint(
    "torch.export.exported_program:_remove_unnecessary_copy_op_pass",
    "it replaces a buffer by the tensor copied into it, even of another shape and dtype",
    parameters="gm new_graph_signature",
)
EXPORT_PRINT = PatchPoint(
    "torch.export._trace:print", "torch.export prints the graph of a forward that it cannot trace", "it is printed"
)
# Before 2.13, losses broadcast their weights with it.
INFER_SIZE = (
    PatchPoint("torch.nn.functional:_infer_size", "it converts sizes to ints, and so specializes on them")
    if hasattr(torch.nn.functional, "_infer_size")
    else None
)

# Patches that skip work whose results are not used

FAKE_DISPATCH = PatchPoint(
    "torch._subclasses.fake_tensor:FakeTensorMode.dispatch",
    "computes the results of frequent operators without PyTorch's reference functions",
    "a capture takes twice as long",
    "self func types args kwargs",
)
CALL_MODULE = PatchPoint(
    "torch.fx.experimental.proxy_tensor:_ModuleStackTracer.call_module",
    "repeated blocks are traced twice, then copied",
    "the time of a capture grows with the number of layers",
    "self m forward args kwargs",
)
LAZY_MODULE_CLASS = PatchPoint(
    "torch.fx._lazy_graph_module:_get_graph_module_cls", "a traced module's source is compiled and never run", _LONGER
)
EXPORT_MODULE = PatchPoint(
    "torch.export.exported_program:_create_graph_module_for_export", "see _get_graph_module_cls", _LONGER, "root graph"
)
TENSOR_METADATA = PatchPoint(
    "torch.fx.experimental.proxy_tensor:_extract_tensor_metadata",
    "the contiguity it computes is never read",
    _LONGER,
    "result",
)
SIZE_ARITHMETIC = {
    name: PatchPoint(
        f"torch.fx.experimental.sym_node:SymNode._{name}", "each result is computed once", _LONGER, "self other"
    )
    for name in (
        "add", "sub", "mul", "mod", "int_floordiv", "eq", "ne", "lt", "le", "gt", "ge", "sym_max", "sym_min",
    )
}  # fmt: skip
SOLVE_CONSTRAINTS = PatchPoint(
    "torch.fx.experimental.symbolic_shapes:DimConstraints.solve",
    "it also solves the inequalities between sizes, to suggest ranges of named dimensions, which captures do not use",
    _LONGER,
    "self",
)
REGISTER_KERNEL = PatchPoint(
    "torch._ops:OperatorBase.py_impl",
    "evaluating its annotations takes most of the time of each of the 11 000 calls of run_decompositions",
    "a capture that functionalizes takes a tenth longer",
    "self k",
)
LIST_COMPOSITES = PatchPoint(
    "torch._export.utils:_materialize_cpp_cia_ops",
    "run_decompositions looks up the same 1000 composite operators by name for each namespace",
    "a capture that functionalizes takes a tenth longer",
)

# Calls whose effect a graph would not repeat

HOOK_REGISTRATIONS = [
    PatchPoint(f"torch:Tensor.{name}", "a hook on a tensor inside forward would be lost: refused")
    for name in ("register_hook", "retain_grad")
]
RANDOM_STATES = [
    PatchPoint(f"{module}:{name}", "a seed that forward sets would be set once, during the capture: refused")
    for module, names in (
        ("torch", ("manual_seed", "seed", "set_rng_state")),
        ("torch.random", ("manual_seed", "seed", "set_rng_state", "fork_rng")),
    )
    for name in names
]
