"""`onnxtrain.prepare(model)`: run the model's forward as ONNX graphs, without a wrapper.

    model ── its class, attributes, state_dict, hooks, methods: unchanged
      └─ forward ─▶ engine ─▶ programs          the only change, in the model or in each of its blocks

`ORTModule` wraps the model; `prepare` replaces one attribute. `isinstance`, the signature of forward, `config`,
`generate` and `save_pretrained` are the model's own. The hooks of a prepared module run around its graph, so libraries
that work block by block with hooks (FSDP's all-gathers, DDP's buckets, statistics) keep working.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar

import torch

from onnxtrain.capture.export.patches import is_capturing
from onnxtrain.capture.refusals import refuse_module
from onnxtrain.capture.sharded.layout import gathering_of
from onnxtrain.errors import OptionError, ORTModuleTorchModelException
from onnxtrain.frontend.blocks import blocks_of, reason_of_hooks
from onnxtrain.frontend.entry_point import Call
from onnxtrain.frontend.ort_module import ORTModule
from onnxtrain.frontend.region import KEY, RegionForward, Twins, install_in
from onnxtrain.options import Options
from onnxtrain.report import PrepareReport
from onnxtrain.system import ranks
from onnxtrain.torch_compat.dynamo import untraced

M = TypeVar("M", bound=torch.nn.Module)
Regional = bool | Literal["auto"]


def prepare(model: M, regional: Regional = "auto", **options: Any) -> M:
    """Make `model` run as ONNX graphs, in place. A second call replaces the settings of the first.

    Args:
        model: any `nn.Module`. Its class, `state_dict` keys, the signature of forward and all methods are unchanged.
        regional: True captures one graph for each repeated block (the layers of a transformer), False one graph of the
            whole model. "auto" captures the whole model, or blocks if several processes train the model together or
            blocks have hooks. It decides at the first call, and again once there is a process group or an engine such
            as FSDP2 has wrapped the blocks. `report_of` gives the choice and the reason. After
            `shard_parameters`, "auto" is False.
        **options: any field of `onnxtrain.Options`.

    Returns:
        `model` itself.

    Raises:
        OptionError: an option is unknown or has an invalid value, or the model has no repeated blocks.
        ORTModuleTorchModelException: the model is wrapped (ORTModule, DataParallel), or is a TorchScript module.
    """
    settings = Options.resolve(**options)
    if isinstance(model, (ORTModule, torch.jit.ScriptModule)):
        raise ORTModuleTorchModelException(
            "The model cannot be prepared.",
            "onnxtrain.prepare",
            "a torch.nn.Module that is not wrapped or scripted",
            type(model).__name__,
            "prepare the PyTorch module itself",
        )
    if not isinstance(model, torch.nn.Module):
        raise ORTModuleTorchModelException(
            "The model cannot be prepared.",
            "onnxtrain.prepare",
            "a torch.nn.Module",
            type(model).__name__,
            "pass the model itself",
        )
    if isinstance(model, torch.nn.DataParallel):
        refuse_module(model)
    unprepare(model)
    _install(model, regional, settings)
    return model


def _install(model: torch.nn.Module, regional: Regional, settings: Options) -> None:
    if gathering_of(model) is not None:
        if regional is True:
            where, todo = f"prepare({type(model).__name__}, regional=True)", "omit regional"
            raise OptionError("Sharded parameters need one graph.", where, "regional=False or 'auto'", "True", todo)
        regional = False
    blocks = blocks_of(model)
    by_block, reason = _choose_regional(regional, model, blocks)
    if by_block:
        install_in(blocks.values(), settings, reason)
    else:
        forward = _AutoForward if regional == "auto" and blocks else RegionForward
        forward(model, settings, Twins(), reason).install()


def unprepare(model: M) -> M:
    """Restore the forward of `model` and of its blocks. A model that is not prepared is left unchanged."""
    for _, forward in _prepared(model):
        forward.remove()
    return model


def report_of(model: torch.nn.Module) -> PrepareReport:
    """Return how a model was prepared, and what has been compiled for it so far.

    Raises:
        OptionError: the model is not prepared.
    """
    forwards = list(_prepared(model))
    if not forwards:
        raise OptionError(
            "The model is not prepared.", type(model).__name__, todo="call onnxtrain.prepare(model) first"
        )
    first = forwards[0][1]
    regions = tuple(forward.region(name) for name, forward in forwards)
    return PrepareReport(first.module is not model, first.reason, regions)


def _prepared(model: torch.nn.Module) -> Iterator[tuple[str, RegionForward]]:
    for name, module in list(model.named_modules()):
        forward = module.__dict__.get(KEY)
        if isinstance(forward, RegionForward):
            yield name, forward


# As a whole or block by block


def _choose_regional(
    regional: Regional, model: torch.nn.Module, blocks: Mapping[str, torch.nn.Module]
) -> tuple[bool, str]:
    """Return whether to prepare the model block by block, and the reason."""
    if regional not in (True, False, "auto"):
        where = f"prepare({type(model).__name__}, regional=)"
        raise OptionError("The value of regional is invalid.", where, "True, False or 'auto'", repr(regional))
    if regional is True and not blocks:
        raise OptionError(
            "The model has no repeated blocks.",
            f"prepare({type(model).__name__}, regional=True)",
            "a ModuleList or Sequential of two or more modules of one class, with layers in each",
            todo="call prepare(model, regional=False)",
        )
    if regional != "auto":
        return regional, f"regional={regional}"
    if not blocks:
        return False, "the model has no repeated blocks"
    if ranks.world_size() > 1:
        return True, "several processes train it: gradients of one block are exchanged while others are computed"
    if (reason := reason_of_hooks(blocks)) is not None:
        return True, reason
    return False, "one process trains it, and no block has hooks"


class _AutoForward(RegionForward):
    """A whole model's forward under regional="auto". Graphs of the blocks replace it if they turn out better."""

    __slots__ = ()

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if ranks.world_size() > 1 and not is_capturing():
            return self._by_block()(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def instead_of_capture(self) -> Call | None:
        if _choose_regional("auto", self.module, blocks_of(self.module))[0]:
            return self._by_block()
        return super().instead_of_capture()

    def _by_block(self) -> Call:
        """Install graphs of the blocks in place of this one; return the forward that calls the blocks."""
        if self.module.__dict__.get(KEY) is self:  # else this object is called by one that holds it
            self.remove()
            _install(self.module, "auto", self.options)
        return self.in_torch
