"""Models equal eager PyTorch with each private part switched off, and with all that are not required."""

from __future__ import annotations

import importlib
import math
import pkgutil
import re

import pytest

from onnxtrain import torch_compat
from onnxtrain.torch_compat.internal import ENTRIES, Internal
from tests.torch_compat.without_internals import MODELS, Outcome, outcomes

MODULES = [module.name for module in pkgutil.iter_modules(torch_compat.__path__, "onnxtrain.torch_compat.")]
for name in MODULES:
    importlib.import_module(name)

# The models that use a part, by the module and name of its entry; "mlp" for all others.
USERS = {
    r"aten_kernels nn\.(adaptive|avg|max)_|aten_kernels adaptive_": ("pools",),
    r"aten_kernels nn\..*loss|aten_kernels nn\.binary": ("losses",),
    r"aten_kernels (nn\.|.*softmax|prelu|fused_rms)": ("layers",),
    r"aten_kernels (cpu_|gpu_|varlen_|sdp_)|attention_switches ": ("transformer-encoder",),
    r"aten_kernels weight_norm": ("weight-norm",),
    r"aten_kernels index_put": ("custom-function",),
    r"aten_kernels onednn": ("lstm",),
    r"autograd |dispatch ": ("custom-function", "checkpoint-non-reentrant"),
    r"decompositions ": ("transformer-encoder", "lstm", "losses"),
    r"modes |fake_tensors ": ("mlp", "no-grad-region", "custom-function"),
    r"patch_points .*checkpoint": ("checkpoint-non-reentrant",),
    r"patch_points |symbols |tensors |tracing ": ("transformer-encoder", "pools"),
}


def users(entry: Internal[object]) -> tuple[str, ...]:
    if entry.required:
        return ("mlp",)
    label = f"{entry.module.rpartition('.')[2]} {entry.name}"
    return next((models for pattern, models in USERS.items() if re.match(pattern, label)), ("mlp",))


def check(outcome: Outcome) -> None:
    """Check that results equal eager's; the model may run in PyTorch, or be captured again, if the entry says so."""
    assert not outcome.error, f"{outcome.model} without {outcome.without}:\n{outcome.error}"
    entry = ENTRIES.get(outcome.without)
    cost = "" if entry is None else entry.cost
    if entry is None and outcome.model == "custom-function":
        cost = ENTRIES["backward_class"].cost
    if "in PyTorch" not in cost and MODELS[outcome.model].falls_back is None:
        assert not outcome.fallbacks, f"{outcome.model} without {outcome.without}: {outcome.fallbacks}"
        several = entry is None or "captures" in cost or "specialize" in cost
        most = math.inf if several else outcome.max_captures
        assert 1 <= outcome.captures <= most, f"{outcome.captures} captures of {outcome.model}"
    elif entry is not None and entry.required:
        assert len(outcome.fallbacks) == 1, f"{outcome.model} without {outcome.without}: {outcome.fallbacks}"
        assert outcome.without in outcome.fallbacks[0]
        assert "in pieces" not in outcome.fallbacks[0]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("module", MODULES)
def test_each_part_alone(module: str) -> None:
    runs = {name: users(entry) for name, entry in ENTRIES.items() if entry.module == module}
    for outcome in outcomes(runs):
        check(outcome)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("third", range(3))
def test_all_parts_at_once(third: int) -> None:
    for outcome in outcomes({"all": [*MODELS][third::3]}):
        check(outcome)
