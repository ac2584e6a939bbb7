"""Only onnxtrain/torch_compat/ names private parts of PyTorch; each is an entry there, with what takes its place."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "onnxtrain"
DOOR = PACKAGE / "torch_compat"

# Private attributes of PyTorch's objects, with the function of torch_compat that reads them.
ATTRIBUTES = {
    "_backward_cls": "autograd.backward_class",
    "_cdata": "tensors.storage_id",
    "_is_view": "tensors.is_view",
    "_overloadname": "operators.name_and_overload",
    "_schema": "operators.schema_of",
    "_version": "tensors.version_of",
}


def private_names(source: str) -> Iterator[str]:
    """The private names of PyTorch in a Python source: imports, attributes of its modules, and `ATTRIBUTES`."""
    nodes = [*ast.walk(ast.parse(source))]
    names = dict(_names_of_torch(nodes))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _is_private(alias.name))
        elif isinstance(node, ast.ImportFrom):
            yield from (n for n in (f"{node.module}.{alias.name}" for alias in node.names) if _is_private(n))
        elif isinstance(node, ast.Call) and _last_name(node.func).endswith("import_module"):
            yield from (a.value for a in node.args if isinstance(a, ast.Constant) and _is_private(str(a.value)))
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            name = _dotted(node, names)
            if (node.attr in ATTRIBUTES and ast.unparse(node.value) != "self") or _is_private(name):
                yield name or f"….{node.attr}"


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_private(name: str) -> bool:
    first, *parts = name.split(".")
    return first in ("torch", "functorch") and any(p.startswith("_") and not p.startswith("__") for p in parts)


def _names_of_torch(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, str]]:
    """Local names with the dotted names that they stand for."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.asname or alias.name.split(".")[0], alias.name) for alias in node.names if alias.asname)
            yield from ((alias.name.split(".")[0],) * 2 for alias in node.names if not alias.asname)
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = _dotted(node.value, {"torch": "torch"})
            if name:
                yield node.targets[0].id, name


def _dotted(node: ast.expr, names: dict[str, str]) -> str:
    """The dotted name of an expression such as `aten._conj`, with its first part as `names` says; else empty."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in names:
        return ""
    return ".".join([names[node.id], *parts])


def test_only_the_door_names_private_parts_of_pytorch() -> None:
    violations = {
        str(path.relative_to(PACKAGE)): sorted(set(private_names(path.read_text(encoding="utf-8"))))
        for path in sorted(PACKAGE.rglob("*.py"))
        if DOOR not in path.parents
    }
    violations = {path: names for path, names in violations.items() if names}
    assert not violations, f"make each an entry of onnxtrain/torch_compat/ ({ATTRIBUTES}): {violations}"


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch._C._dynamo import eval_frame",
        "from torch.utils import _pytree as pytree",
        "import torch\ntorch._C._aoti",
        "import torch as t\nt.ops.aten._conj",
        "import torch\nATEN = torch.ops.aten\nATEN._conj.default",
        "from torch.export import exported_program as e\ne._decompose",
        "import importlib\nimportlib.import_module('torch._inductor')",
        "def f(tensor): return tensor.untyped_storage()._cdata",
        "def f(tensors): return [tensor._version for tensor in tensors]",
    ],
)
def test_private_names_are_found(source: str) -> None:
    assert list(private_names(source))


@pytest.mark.parametrize(
    "source",
    ["import torch\ntorch.__version__", "class A:\n  def f(self): return self._x", "import os\nos._exit(1)"],
)
def test_other_names_are_allowed(source: str) -> None:
    assert not list(private_names(source))
