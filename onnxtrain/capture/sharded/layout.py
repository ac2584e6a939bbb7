"""The layout of a DTensor on a mesh of one dimension, and the process group of that mesh."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from onnxtrain.errors import CaptureError

_DTENSOR = "torch.distributed.tensor"


GATHERING = "_onnxtrain_gathering"  # attribute of a module with a Gathering


@dataclass(frozen=True)
class Gathering:
    """How a graph gathers the DTensor parameters of a module, from `shard_parameters`.

    Attributes:
        least_bytes: how many bytes of the parameters that forward reads last backward keeps.
        bucket_bytes: the most bytes of parameters, or of gradients, that one collective communicates together.
        in_flight_bytes: the most bytes of parameters that are gathered early, and of gradients that are being reduced.
    """

    least_bytes: int
    bucket_bytes: int
    in_flight_bytes: int


def gathering_of(module: torch.nn.Module) -> Gathering | None:
    """Return how the parameters of a module, or of one that it contains, are gathered; None if they are not."""
    return next((m.__dict__[GATHERING] for m in module.modules() if GATHERING in m.__dict__), None)


def is_sharded(tensor: object) -> bool:
    """Return whether a tensor is a DTensor."""
    return _DTENSOR in sys.modules and isinstance(tensor, dtensor_class())


def dtensor_class() -> Any:
    """Return the class DTensor, which a program with such a tensor has imported."""
    return sys.modules[_DTENSOR].DTensor


@dataclass(frozen=True)
class Group:
    """The ranks of a mesh of one dimension.

    Attributes:
        mesh: the `DeviceMesh`.
        name: of its process group.
        size: the number of ranks.
        rank: of this process in the group.
    """

    mesh: Any
    name: str
    size: int
    rank: int

    @staticmethod
    def from_mesh(mesh: Any) -> Group:
        """Return the group of a mesh.

        Raises:
            CaptureError: the mesh has several dimensions, or this process is not in it.
        """
        if mesh.ndim != 1 or mesh.get_coordinate() is None:
            raise CaptureError(
                "a DTensor is on a mesh that a graph does not support",
                expected="a mesh of one dimension that contains this rank, such as mesh['tp']",
                got=str(mesh),
                todo="the module runs in PyTorch; pass a submesh of one dimension to parallelize_module",
            )
        return Group(mesh, mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())


@dataclass(frozen=True)
class Layout:
    """How the tensors of the ranks make up the tensor: a placement of torch.distributed, with an axis counted from 0.

    Attributes:
        kind: "replicated": each rank has the tensor; "sharded": each has a part of `axis`; "partial": it is their sum.
        axis: of a sharded tensor, else -1.
    """

    kind: str
    axis: int = -1

    @staticmethod
    def from_placement(placement: Any, rank: int) -> Layout:
        """Return the layout of a tensor with this number of dimensions.

        Raises:
            CaptureError: the placement is of another kind.
        """
        if isinstance(placement, Layout):
            return placement
        kind = type(placement).__name__
        if kind == "Replicate":
            return REPLICATED
        if kind == "Shard":
            return Layout("sharded", placement.dim % rank if rank else placement.dim)
        if kind == "Partial" and placement.reduce_op == "sum":
            return PARTIAL
        raise CaptureError(
            "a DTensor has a placement that a graph does not support",
            expected="Replicate(), Shard(dim) or Partial('sum')",
            got=repr(placement),
            todo="the module runs in PyTorch",
        )

    def __str__(self) -> str:
        return {"replicated": "Replicate()", "sharded": f"Shard({self.axis})", "partial": "Partial()"}[self.kind]

    def placement(self) -> Any:
        """Return the placement of torch.distributed."""
        module: Any = sys.modules[_DTENSOR]
        if self.kind == "sharded":
            return module.Shard(self.axis)
        return module.Replicate() if self.kind == "replicated" else module.Partial()

    # What the hooks of torch.distributed.tensor.parallel ask a placement.

    def is_shard(self, dim: int | None = None) -> bool:
        return self.kind == "sharded" and dim in (None, self.axis)

    def is_replicate(self) -> bool:
        return self.kind == "replicated"

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return self.kind == "partial" and reduce_op in (None, "sum")


REPLICATED = Layout("replicated")
PARTIAL = Layout("partial")


def sharding_of(tensor: torch.Tensor, may_be_partial: bool = False) -> tuple[Layout, Group]:
    """Return the layout and group of a DTensor.

    Raises:
        CaptureError: a graph does not support them.
    """
    group = Group.from_mesh(tensor.device_mesh)  # type: ignore[attr-defined]  # of a DTensor
    layout = Layout.from_placement(tensor.placements[0], tensor.dim())  # type: ignore[attr-defined]
    is_refused = layout.kind == "partial" and not may_be_partial
    if is_refused or (layout.kind == "sharded" and tensor.shape[layout.axis] % group.size):
        partial = ", or Partial()" if may_be_partial else ""
        raise CaptureError(
            f"a DTensor {'' if may_be_partial else 'parameter '}has a layout that a graph does not support",
            expected=f"Replicate(){partial}, or Shard(dim) of a dimension that {group.size} ranks divide evenly",
            got=f"{layout} of {list(tensor.shape)}",
            todo="the module runs in PyTorch; choose sizes that the ranks divide evenly",
        )
    return layout, group
