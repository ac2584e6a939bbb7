"""The compilation pipeline. Each stage takes a value and returns a value.

nn.Module ─capture─▶ forward graph ─optimize─▶ forward graph ─differentiate─▶ joint graph ─optimize─▶ joint graph
          ─plan─▶ joint graph and what backward recomputes ─lower─▶ forward program, backward programs

`frontend.engine` captures the module and calls `compile_module`, for ORTModule, prepare and torch.compile's backend.
Artifacts for devices use the stages up to the second `optimize` (`device.training_graph`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from onnxtrain.autodiff import Joint
from onnxtrain.capture.capture import Captured
from onnxtrain.capture.internal_errors import internal_errors_as
from onnxtrain.capture.refusals import common_device
from onnxtrain.errors import CompileError
from onnxtrain.execute.boundary import Unit
from onnxtrain.execute.compiled import Compiled, runner, runner_by_sizes
from onnxtrain.execute.cuda_recorder import Recorders, recordings_for
from onnxtrain.execute.kernel_annotations import annotate_kernels
from onnxtrain.execute.packed_variants import plan_packed_variants
from onnxtrain.execute.sized_units import SizedUnits
from onnxtrain.execute.unit_builder import Rerun, UnitBuilder
from onnxtrain.execute.work_counter import WorkCounter
from onnxtrain.options import Options
from onnxtrain.passes import forward_passes_around_packing, joint_passes, optimize
from onnxtrain.passes.user_graph_optimizers import functions_for
from onnxtrain.plan.channels_last import ChannelsLast, is_profitable
from onnxtrain.plan.differentiation import Differentiation, rewrite_joint, unoptimized_joint
from onnxtrain.plan.memory_plan import MemoryPlan, plan_memory
from onnxtrain.plan.output_views import input_views
from onnxtrain.plan.parameter_order import limit_in_flight
from onnxtrain.plan.recompute import RecomputeChoice
from onnxtrain.plan.storage import bind_symbols
from onnxtrain.stages import Mode, Stages
from onnxtrain.system.time_limit import part


def compile_module(
    module: torch.nn.Module,
    captured: Captured,
    inputs: Sequence[torch.Tensor],
    options: Options,
    rerun: Rerun,
    recorders: Recorders,
    counterpart: Unit | None = None,
) -> Compiled:
    """Compile a captured module.

    Args:
        module: the user's module, in the state (training, autocast, grad mode) in which it will run.
        captured: its capture (`capture.export.capture`).
        inputs: a tensor for each input of the capture.
        options: see `onnxtrain.options`.
        rerun: runs the module in PyTorch on such tensors, for create_graph.
        recorders: those of the user's model, under the option cuda_graphs.
        counterpart: see `UnitBuilder`.

    Raises:
        ORTModuleFallbackException: the module cannot be differentiated, or onnxtrain has a bug.
        GraphError: a user's graph optimizer left a malformed graph.
    """
    name, device = type(module).__name__, common_device(inputs)
    wrt = tuple(torch.is_grad_enabled() and t.requires_grad for t in inputs)
    mode: Mode = "training" if module.training and torch.is_grad_enabled() else "inference"
    stages = Stages(options, mode, name, WorkCounter(inputs, device) if "work" in options.statistics else None, module)
    problem = f"the graph of {name} cannot be compiled"
    with internal_errors_as(CompileError, problem):
        # capture
        model = stages.record("capture", captured.model, took_ms=captured.took_ms)
        annotate_kernels(model.graph, options, device)
        stages.count_unoptimized(lambda: unoptimized_joint(model, wrt, captured.result_count))

        # optimize
        first, then = forward_passes_around_packing(options)
        changes = optimize(model, first)
        packed = plan_packed_variants(model, captured, options, device, any(wrt))
        changes.add(optimize(model, then))
        stages.record("optimize", model, changes, sum(report.took_ms for report in changes.passes))
        builder = UnitBuilder(
            captured,
            Differentiation(model, wrt, captured.result_count, captured.mutated, joint_passes(options)),
            input_views(model, captured.result_count),
            device,
            options,
            ChannelsLast() if is_profitable(model.graph, inputs) else None,
            recordings_for(captured, inputs, options, device, recorders),
            rerun,
            counterpart,
        )
        joint = _gradients(builder, stages) if any(wrt) else None
    if joint is not None and (functions := functions_for(name, device.type)):  # the user's: their errors are raised
        joint = stages.record_joint("user-functions", rewrite_joint(joint, functions))
    with internal_errors_as(CompileError, problem):
        compiled = _lower(joint, builder, inputs, stages)
    compile_packed = partial(compile_module, module, recorders=recorders, counterpart=compiled.unit)
    return compiled if packed is None else packed.attach(compiled, name, rerun, compile_packed)


@part("differentiation")
def _gradients(builder: UnitBuilder, stages: Stages) -> Joint:
    """Differentiate the forward graph, and optimize the joint graph."""
    differentiation = builder.differentiation
    limit_in_flight(differentiation.forward.graph, builder.options.memory_budget_bytes)
    joint, changes = differentiation.optimize(stages.record_joint("differentiate", differentiation.joint()))
    return stages.record_joint("optimize-joint", joint, changes)


def _plan(joint: Joint, builder: UnitBuilder, inputs: Sequence[torch.Tensor]) -> MemoryPlan:
    mutated, device = builder.differentiation.mutated_inputs(joint), builder.device.type
    omitted = builder.captured.omitted
    return plan_memory(joint, mutated, builder.views, inputs, builder.options, device, builder.layout, omitted)


@part("planning and lowering")
def _lower(joint: Joint | None, builder: UnitBuilder, inputs: Sequence[torch.Tensor], stages: Stages) -> Compiled:
    """Build the programs of the joint graph, or of the forward graph if no input needs a gradient."""
    if joint is None:
        return _lower_inference(builder, inputs, stages)
    return _lower_training(_plan(joint, builder, inputs), builder, inputs, stages)


def _lower_training(plan: MemoryPlan, builder: UnitBuilder, inputs: Sequence[torch.Tensor], stages: Stages) -> Compiled:
    """Build one unit, or one for each recompute choice that depends on the sizes of a call."""

    def unit_for(choice: RecomputeChoice) -> Unit:
        joint, copies = plan.planned(choice)
        unit = builder.training_unit(joint, choice)
        stages.end("plan", joint.model, plan.sentences(choice, copies), plan.subgraphs, builder.not_recorded(unit))
        return unit

    captured, symbol_values = builder.captured, bind_symbols(plan.joint.model.graph.inputs, inputs)
    if not plan.by_size:
        unit = unit_for(plan.choose(symbol_values))
        return Compiled(captured, unit, stages.report(), runner(captured, unit), symbol_values, layout=builder.layout)
    units = SizedUnits(plan.joint.model.graph.inputs[: len(inputs)], plan.choose, unit_for)  # cotangents come later
    unit, run = units.unit(inputs), runner_by_sizes(captured, units)
    return Compiled(captured, unit, stages.report(), run, symbol_values, units, builder.layout)


def _lower_inference(builder: UnitBuilder, inputs: Sequence[torch.Tensor], stages: Stages) -> Compiled:
    captured, model, unit = builder.captured, builder.differentiation.forward, builder.inference_unit()
    stages.end("plan", model, refused=builder.not_recorded(unit))
    symbol_values = bind_symbols(model.graph.inputs, inputs)
    return Compiled(captured, unit, stages.report(), runner(captured, unit), symbol_values, layout=builder.layout)
