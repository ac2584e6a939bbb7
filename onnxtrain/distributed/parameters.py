"""Shard the parameters of a module over data-parallel ranks, as FSDP2 does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from onnxtrain.capture.sharded.layout import GATHERING, Gathering
from onnxtrain.errors import OptionError

M = TypeVar("M", bound=torch.nn.Module)


def shard_parameters(
    module: M,
    mesh: DeviceMesh,
    least_bytes: int = 25 * 2**20,
    bucket_bytes: int = 25 * 2**20,
    in_flight_bytes: int = 100 * 2**20,
) -> M:
    """Replace each parameter by a DTensor, of which each rank holds a part of the first dimension, in place.

    The layout is that of `fully_shard`, so that torch.distributed.checkpoint saves and loads the same state dicts.
    Make the optimizer afterwards. The module then runs by `ORTModule` or `onnxtrain.prepare` only: its graph gathers
    the parameters, in forward and again in backward, and averages their gradients over the ranks.

    Args:
        module: has the same parameters on each rank, as after `torch.manual_seed` with one seed.
        mesh: of one dimension, or of two (HSDP): ranks that differ in the first have replicas of the same shards.
        least_bytes: the parameters that forward reads last, together of at least this size, stay gathered for
            backward. At least 1.
        bucket_bytes: the most bytes of whole parameters, or of gradients, that one collective communicates. Smaller
            ones are communicated together, larger ones by themselves; 0: each by itself.
        in_flight_bytes: the most bytes of whole parameters that are gathered before they are needed, and of gradients
            whose reduction is not awaited yet, while other nodes are computed; 0: none. A `memory_budget_bytes` that is
            a number of bytes, the same on all ranks, limits each to an eighth of it.

    Raises:
        OptionError: the mesh has more than two dimensions, a parameter is a scalar or sharded in another way, as by
            `parallelize_module`, `least_bytes` is below 1, or another number of bytes below 0.
    """
    if mesh.ndim > 2:
        expected, todo = "a mesh of one or two dimensions", "pass a submesh, such as mesh['replicate', 'shard']"
        raise OptionError("The mesh is not supported.", "shard_parameters", expected, str(mesh), todo)
    placements = (*[Replicate()] * (mesh.ndim - 1), Shard(0))
    _check_bytes(least_bytes, bucket_bytes, in_flight_bytes)
    sharded: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for path, submodule in module.named_modules():
        for name, parameter in submodule._parameters.items():
            where = f"{path}.{name}".lstrip(".")
            if isinstance(parameter, DTensor):
                _check_layout(parameter, where, mesh, placements)
            if parameter is None or isinstance(parameter, DTensor):
                continue
            if parameter.dim() == 0:
                todo = "give it the shape (1,)"
                raise OptionError("A scalar parameter cannot be sharded.", where, "a dimension", "none", todo)
            if parameter not in sharded:
                shards = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
                sharded[parameter] = torch.nn.Parameter(shards, requires_grad=parameter.requires_grad)
            submodule._parameters[name] = sharded[parameter]
    module.__dict__[GATHERING] = Gathering(least_bytes, bucket_bytes, in_flight_bytes)
    return module


def _check_layout(parameter: DTensor, where: str, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    """Raise OptionError if a parameter is sharded in another way."""
    if parameter.device_mesh != mesh or tuple(parameter.placements) != tuple(placements):
        raise OptionError(
            "A parameter is sharded already, in another way.",
            where,
            expected=f"a plain parameter, or one with {placements} on {mesh}",
            got=f"{parameter.placements} on {parameter.device_mesh}",
            todo="with tensor parallelism, call fully_shard on each block instead: the blocks are then graphs",
        )


def _check_bytes(least_bytes: int, bucket_bytes: int, in_flight_bytes: int) -> None:
    """Raise OptionError if a number of bytes is invalid."""
    for name, number, minimum, meaning, remedy in (
        ("least_bytes", least_bytes, 1, "keep gathered for backward", "keep the last one that forward reads"),
        ("bucket_bytes", bucket_bytes, 0, "communicate together", "communicate each parameter by itself"),
        ("in_flight_bytes", in_flight_bytes, 0, "keep in flight", "wait for each collective at once"),
    ):
        if number < minimum:
            raise OptionError(
                f"The number of bytes to {meaning} is invalid.",
                f"shard_parameters({name}=...)",
                expected=f"{minimum} or more",
                got=str(number),
                todo=f"pass {minimum} to {remedy}, or leave the default",
            )
