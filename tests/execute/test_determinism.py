"""Under torch.use_deterministic_algorithms deterministic kernels run, or PyTorch raises or warns, as in eager."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F

from onnxtrain import ORTModule
from onnxtrain.execute import boundary
from onnxtrain.graph.values import TensorType, set_type
from onnxtrain.ops import builder, definition_of
from onnxtrain.testing import assert_no_worse_than_eager

Function = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(params=["error", "warning"])
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    torch.use_deterministic_algorithms(True, warn_only=request.param == "warning")
    yield request.param
    torch.use_deterministic_algorithms(False)


class Applied(torch.nn.Module):
    """Applies a function to scaled inputs, so that a gradient flows through it."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.scale)


def test_a_deterministic_kernel_is_preferred(mode: str) -> None:
    shape, rows, dy = (ir.Value(name=name) for name in ("shape", "rows", "dy"))
    set_type(shape, TensorType(ir.DataType.INT64, (3,)))
    set_type(rows, TensorType(ir.DataType.INT64, (4,)))
    set_type(dy, TensorType(ir.DataType.FLOAT, (4, 3, 2)))
    op = builder(ir.Graph([rows, dy], [], nodes=[], opset_imports={"": 23}, name="gather"))
    node = op.ms.GatherGrad(op.sizes([5, 3, 2]), rows, dy, axis=0).producer()
    definition = definition_of(node)
    assert definition.kernel(node, "cuda").deterministic
    assert all(kernel.deterministic for kernel in definition.candidates(node, "cuda"))
    torch.use_deterministic_algorithms(False)
    assert not definition.kernel(node, "cuda").deterministic


def test_an_op_without_one_raises_or_warns_as_in_eager(mode: str) -> None:
    module = Applied(lambda x: x.put(torch.tensor([0, 3]), x[0, :2]))
    x = torch.randn(2, 4)
    results = []
    for run in (module, ORTModule(module)):
        if mode == "error":
            with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
                run(x)
        else:
            with pytest.warns(UserWarning, match="put_ does not have a deterministic implementation"):
                results.append(run(x))
    if results:
        assert torch.equal(*results)


ON_GPU: dict[str, Function] = {
    "rows": lambda x: x[:, torch.tensor([1, 0, 1] * 50, device=x.device)],
    "gather": lambda x: x.gather(1, torch.zeros_like(x, dtype=torch.int64)),
    "scatter_add": lambda x: torch.zeros_like(x).scatter_add(1, torch.zeros_like(x, dtype=torch.int64), x),
    "scatter": lambda x: x.scatter(1, torch.zeros_like(x, dtype=torch.int64), x * 2),
    "index_add": lambda x: x.index_add(0, torch.zeros(x.size(0), dtype=torch.int64, device=x.device), x),
    "index_copy": lambda x: x.index_copy(0, torch.zeros(x.size(0), dtype=torch.int64, device=x.device), x * 2),
    "index_put": lambda x: x.index_put((torch.zeros(x.size(0), dtype=torch.int64, device=x.device),), x * 2),
    "reflect": lambda x: F.pad(x, (5, 3), mode="reflect"),
    "bilinear": lambda x: F.interpolate(x[None, None], scale_factor=2, mode="bilinear"),
    "grid": lambda x: F.grid_sample(x[None, None], x[:, :2][None, None].tanh(), align_corners=False),
    "cumsum": lambda x: x.cumsum(0),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(x.size(0), dtype=torch.int64, device=x.device)),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x[None, None], (7, 5)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(ON_GPU))
def test_two_runs_on_a_gpu_give_the_same_bits_or_raise(name: str) -> None:
    """The graph raises if eager does, or computes deterministically."""
    torch.use_deterministic_algorithms(True)
    try:
        module = Applied(ON_GPU[name]).cuda()
        compiled = ORTModule(copy.deepcopy(module))
        x = torch.randn(300, 200, device="cuda")
        eager = _gradient(module, x)
        runs = [_gradient(compiled, x) for _ in range(3)]
        assert all((run is None) == (runs[0] is None) for run in runs)
        if eager is not None:
            assert runs[0] is not None
            exact = _gradient(copy.deepcopy(module).double(), x.double())
            assert exact is not None
            assert_no_worse_than_eager(name, runs[0], eager, exact)
        if runs[0] is not None:
            assert all(run is not None and torch.equal(run, runs[0]) for run in runs)
    finally:
        torch.use_deterministic_algorithms(False)


def _gradient(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of x, or None if PyTorch raises because there is no deterministic algorithm."""
    x = x.clone().requires_grad_()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            module(x).square().sum().backward()
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        return None
    return x.grad


def test_no_tensor_is_asked_for_its_device_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward remembers the random state of the CPU only; to look for GPUs took 10 us for 30 tensors."""
    asked: list[int] = []
    random_state = boundary.random_state
    monkeypatch.setattr(
        boundary, "random_state", lambda tensors, *others: asked.append(len(tensors)) or random_state(tensors, *others)
    )  # type: ignore[func-returns-value]
    ORTModule(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)))(torch.randn(3, 4)).sum().backward()
    assert asked == [0]
